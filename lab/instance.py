"""The folder of one lab. Several labs can run at once; TRACKBED_LAB selects one."""

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from agent.runtime import write_atomically
from fleet import paths
from lab.command import run
from lab.errors import BadInput, LabError
from lab.hardware import ALL_MACHINES, Machine
from lab.image import Image
from lab.lock import exclusive
from lab.qemu.accelerator import BY_NAME, TCG, Accelerator

# The longest path of a unix socket. ssh first binds its control socket under a name that is 17 characters longer.
SOCKET_PATH_MAX = 107
SSH_SUFFIX = 17


@attrs.frozen
class Plan:
    """The image, the accelerator and the ports of a lab, chosen by `up` and valid until `down`."""

    image: Image
    # Kept, since a snapshot of one accelerator is not restored under the other.
    accelerator: Accelerator
    ports: dict[str, int]

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines of the lab."""
        return tuple(machine for machine in ALL_MACHINES if machine.name in self.ports)


@attrs.frozen
class Instance:
    """The folder of one lab: its keys, its plan, and a folder for each node."""

    name: str
    folder: Path

    @property
    def ssh_key(self) -> Path:
        """The private key, made for this lab only."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The nodes' host keys, by address and by name."""
        return self.folder / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """ssh's configuration: `ssh -F FILE node1` works from anywhere."""
        return self.folder / "ssh_config"

    def node_folder(self, machine: Machine) -> Path:
        """The folder of one node: disk, sockets, logs."""
        return self.folder / machine.name

    def host_key(self, machine: Machine) -> Path:
        """The host key of the node's sshd."""
        return self.node_folder(machine) / "ssh_host_ed25519_key"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Allow one `up` or `down` at a time."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with exclusive(self.folder / "lock", f"another command is changing lab {self.name}"):
            yield

    def plan(self) -> Plan | None:
        """The plan; None while the lab is down."""
        try:
            raw = json.loads(self._plan_file.read_text())
            ports = {str(name): int(port) for name, port in raw["ports"].items()}
            # A lab that an earlier Trackbed booted is emulated.
            return Plan(Image(Path(raw["image"])), BY_NAME[raw.get("accelerator", TCG.name)], ports)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LabError(
                f"{self._plan_file} is damaged", f"Run `python -m lab down`, or delete {self.folder}."
            ) from None

    def record(self, plan: Plan) -> None:
        """Write the plan, and the ssh configuration for its ports."""
        raw = {"image": str(plan.image.folder), "accelerator": plan.accelerator.name, "ports": plan.ports}
        write_atomically(self._plan_file, json.dumps(raw, indent=2) + "\n")
        write_atomically(self.known_hosts, "".join(self._known_host(machine, plan) for machine in plan.machines))
        write_atomically(self.ssh_config, "".join(self._ssh_host(machine, plan) for machine in plan.machines))

    def forget(self) -> None:
        """Delete the plan: the lab is down, and the next `up` makes a new one."""
        self._plan_file.unlink(missing_ok=True)

    def make_keys(self, machines: tuple[Machine, ...]) -> None:
        """Make the missing key pairs."""
        for machine in machines:
            self.node_folder(machine).mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {self.ssh_key: f"trackbed-{self.name}"}
        wanted |= {self.host_key(machine): machine.name for machine in machines}
        for key, comment in wanted.items():
            if not key.with_name(f"{key.name}.pub").exists():
                key.unlink(missing_ok=True)
                run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", key])

    @property
    def _plan_file(self) -> Path:
        return self.folder / "lab.json"

    def _known_host(self, machine: Machine, plan: Plan) -> str:
        kind, key = self.host_key(machine).with_suffix(".pub").read_text().split()[:2]
        return f"[127.0.0.1]:{plan.ports[machine.name]},{machine.name} {kind} {key}\n"

    def _ssh_host(self, machine: Machine, plan: Plan) -> str:
        # Multiplexed, since a handshake takes an emulated machine half a second.
        return f"""\
Host {machine.name}
    HostName 127.0.0.1
    Port {plan.ports[machine.name]}
    User root
    IdentityFile "{self.ssh_key}"
    IdentitiesOnly yes
    UserKnownHostsFile "{self.known_hosts}"
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 20
    LogLevel ERROR
    ControlMaster auto
    ControlPath "{self.node_folder(machine)}/ssh.sock"
    ControlPersist 120
"""


def named(name: str | None = None) -> Instance:
    """The lab of that name; by default TRACKBED_LAB names it."""
    name = name or os.environ.get("TRACKBED_LAB") or "lab"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise BadInput(f"TRACKBED_LAB: {name!r} is not a valid name for a lab", "Use letters, digits, - and _.")
    folder = (paths.state() / "lab" / name).absolute()
    longest = max(len(str(folder / machine.name / "console.sock")) for machine in ALL_MACHINES)
    if longest + SSH_SUFFIX > SOCKET_PATH_MAX:
        raise BadInput(
            f"the path {folder} is too long: sockets below it must stay under {SOCKET_PATH_MAX + 1} characters",
            "Set XDG_STATE_HOME to a shorter path, or TRACKBED_LAB to a shorter name.",
        )
    return Instance(name, folder)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a process could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
