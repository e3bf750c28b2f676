"""One node: a QEMU process, its files, and ssh into it."""

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import tarfile
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import attrs

from lab import companions, time_source
from lab.command import has_ended, run, tail
from lab.errors import BadInput, LabError
from lab.hardware import ALL_MACHINES, Machine, Nic
from lab.image import Image
from lab.instance import Instance
from lab.progress import say
from lab.qemu import monitor, vf_state
from lab.qemu.accelerator import Accelerator
from lab.qemu.arguments import QemuFiles, arguments, boot_from, nic_between

EXIT_S = 15.0
RESTORE_S = 120.0


@attrs.frozen
class Node:
    """A virtual server of one lab. Nothing is cached: each method reads the present state."""

    machine: Machine
    instance: Instance
    image: Image
    accelerator: Accelerator
    ssh_port: int
    # The other nodes of the lab.
    peers: tuple[Machine, ...]
    # A disk that it boots from (lab/qemu/boot_loader.py); without it QEMU gives it the image's kernel.
    loader: Path | None = None

    @property
    def name(self) -> str:
        """Its name in the lab, which is also its host name."""
        return self.machine.name

    @property
    def folder(self) -> Path:
        """The node's folder: overlay, sockets and logs."""
        return self.instance.node_folder(self.machine)

    @property
    def ssh_key(self) -> Path:
        """The private key for root's logins."""
        return self.instance.ssh_key

    @property
    def known_hosts(self) -> Path:
        """The node's host key, by `[127.0.0.1]:port` and by name."""
        return self.instance.known_hosts

    @property
    def ssh_config(self) -> Path:
        """A configuration for OpenSSH, which testinfra uses, too."""
        return self.instance.ssh_config

    @property
    def connection(self) -> dict[str, Any]:
        """pyinfra's data of a host to connect to."""
        return {
            "ssh_hostname": "127.0.0.1",
            "ssh_port": self.ssh_port,
            "ssh_user": "root",
            "ssh_key": str(self.ssh_key),
            "ssh_known_hosts_file": str(self.known_hosts),
            "ssh_strict_host_key_checking": "yes",
        }

    @property
    def overlay(self) -> Path:
        """The node's own disk, an overlay of the shared image. It has the snapshots."""
        return self._files.overlay

    @property
    def console_log(self) -> Path:
        """The output of its serial console, of all boots."""
        return self._files.console_log

    @property
    def qemu_log(self) -> Path:
        """QEMU's own messages."""
        return self._files.log

    @property
    def console_socket(self) -> Path:
        """The socket of its serial console."""
        return self._files.console

    @property
    def _files(self) -> QemuFiles:
        return QemuFiles(self.folder)

    def pid(self) -> int | None:
        """The process id of QEMU; None while the node is off."""
        try:
            pid = int(self._files.pid.read_text())
            # The kernel may have given the id to another process: compare the command line.
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if str(self._files.pid).encode() in words else None

    def power_on(self) -> None:
        """Boot the node, on its overlay if it has one. A running node is left alone."""
        if self.pid() is None:
            self._start_qemu()
        # Also for a node that runs: a Ctrl-C may have come between QEMU's start and theirs.
        self._start_companions()

    def _start_qemu(self) -> None:
        if not self.image.complete():
            raise LabError(
                f"{self.name}: its image {self.image.folder} is gone", "Run `python -m lab down`, then `up`."
            )
        if not self.overlay.exists():
            new = self.overlay.with_suffix(".new")
            run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", self.image.disk, new])
            new.rename(self.overlay)
        self._write_credentials()
        self._forget_ssh()
        remedy = f"Its messages are in {self.qemu_log}."
        run(["qemu-system-x86_64", *self._qemu_arguments()], timeout=60, remedy=remedy)

    def _start_companions(self) -> None:
        pid = self.pid()
        if pid is None:
            return
        # TCP and UDP have separate ports, so the UDP port with the number of ssh's TCP port is free.
        companions.start_time_source(self.ssh_port, pid, self.folder / "time-source.log")
        if len(self.peers) > 1:
            copies = {self._outlet(nic): [self._inlet(peer, nic) for peer in self.peers] for nic in self.machine.nics}
            companions.start_splitter(copies, pid, self.folder / "splitter.log")

    def power_cut(self) -> None:
        """End QEMU at once: what the guest did not flush is lost; its disk stays."""
        pid = self.pid()
        if pid is None:
            return
        self._forget_ssh()
        os.kill(pid, signal.SIGKILL)
        wait(lambda: has_ended(pid), EXIT_S, f"{self.name}: QEMU's end")

    def discard(self) -> None:
        """Stop the node and delete its disk; keys and logs stay."""
        self.power_cut()
        made = (path for kind in ("sock", "out", "snapshot") for path in self.folder.glob(f"*.{kind}"))
        for path in (self.overlay, self._files.pid, *made):
            path.unlink(missing_ok=True)

    def answers(self, timeout: float = 1.0) -> bool:
        """Whether its sshd sends its greeting. A connection proves nothing: QEMU accepts it even if the guest does not."""
        try:
            with socket.create_connection(("127.0.0.1", self.ssh_port), timeout=timeout) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def lacks_room(self) -> bool:
        """Whether QEMU has stopped the node, since this host had no room for the node's disk (werror=enospc, the default)."""
        try:
            with self._monitor(5.0) as qemu:
                return bool(qemu.execute("query-status")["status"] == "io-error")
        except LabError:
            return False

    def wait_ssh(self, deadline: float | None = None) -> None:
        """Wait until a command runs through ssh, at most the given seconds, by default as long as a boot may take."""

        def ready() -> bool:
            if self.pid() is None:
                raise LabError(f"{self.name}: QEMU has ended\n{tail(self.qemu_log)}", f"Its logs are in {self.folder}.")
            with suppress(LabError):
                if self.answers(5.0) and self.run(["true"]).returncode == 0:
                    return True
            if self.lacks_room():
                raise LabError(
                    f"{self.name} has been stopped: this host had no room for its disk",
                    f"Make room in {self.folder}, then `python -m lab power-cut {self.name}`, and `power-on`.",
                )
            return False

        try:
            wait(ready, deadline or self.accelerator.boot_s, f"{self.name}: ssh")
        except LabError as error:
            remedy = error.remedy or f"Its logs are in {self.folder}."
            raise LabError(f"{error.what}\n{tail(self.console_log)}", remedy) from None

    def boot(self) -> None:
        """Power the node on if it is off, and wait until ssh answers; once more if it fails with room on its disk.

        QEMU 10 was seen to abort while a guest boots (an assertion in iotlb_to_section), and an emulated guest to show its
        login and never answer.
        """
        self.power_on()
        try:
            self.wait_ssh()
        except LabError as error:
            if self.pid() is not None and self.lacks_room():
                raise
            say(f"    {error.what.splitlines()[0]}; it is booted once more")
            self.power_cut()
            self.power_on()
            self.wait_ssh()

    def run(
        self, argv: Sequence[str], timeout: float = 120.0, *, check: bool = False, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root by ssh; status 255 is ssh's own failure. With `check` a failure is a LabError."""
        words = ["ssh", "-F", str(self.ssh_config), self.name, "--", shlex.join(argv)]
        try:
            done = subprocess.run(
                words,
                input=stdin or "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LabError(
                f"{self.name}: {shlex.join(argv)} took longer than {timeout:.0f} s",
                f"`python -m lab console {self.name}` shows whether the node hangs.",
            ) from None
        if check and done.returncode != 0:
            raise LabError(
                f"{self.name}: {shlex.join(argv)} failed with status {done.returncode}: {done.stderr.strip()}"
            )
        return done

    def sh(self, script: str, timeout: float = 120.0) -> str:
        """Run a shell script on the node and return its standard output. A failure raises a LabError."""
        return self.run(["sh", "-euc", script], timeout, check=True).stdout

    def write(self, path: str, text: str, mode: str = "644") -> None:
        """Write a small file. Its text goes through standard input: every user can see a command's arguments."""
        script = 'install -D -m "$2" /dev/null "$1"; cat > "$1"'
        self.run(["sh", "-euc", script, "sh", path, mode], check=True, stdin=text)

    def copy(self, files: Mapping[str, Path], folder: str, timeout: float = 120.0) -> None:
        """Copy files of this host to the node, by their paths there, which begin in an existing folder."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for path, file in files.items():
                tar.add(file, path)
        # `run` takes standard input as text only, so the archive is sent as base64.
        words = ["sh", "-euc", 'base64 -d | tar -x -C "$1"', "sh", folder]
        self.run(words, timeout, check=True, stdin=b64encode(packed.getvalue()).decode())

    def snapshot(self, name: str) -> None:
        """Save memory, devices and disk under a name. An older snapshot of that name is replaced."""
        _check_snapshot_name(name)
        with self._monitor() as qemu:
            qemu.execute("stop")
            try:
                vfs = vf_state.save(self._files.test_port, self.machine)
                # savevm first deletes the older snapshot. If it then fails (a full disk), there is none of that name.
                self._vfs_of(name).unlink(missing_ok=True)
                qemu.human(f"savevm {name}")
                self._vfs_of(name).write_text(json.dumps(vfs))
            finally:
                qemu.execute("cont")

    def has(self, snapshot: str) -> bool:
        """Whether there is a snapshot of that name."""
        return self._vfs_of(snapshot).exists()

    def restore(self, name: str) -> None:
        """Go back to a snapshot and continue from there. The clock is set to the present time."""
        _check_snapshot_name(name)
        if not self.has(name):
            has = ", ".join(sorted(path.stem for path in self.folder.glob("*.snapshot"))) or "none"
            raise BadInput(f"{self.name} has no snapshot {name!r}", f"It has: {has}.")
        self.power_on()
        self._forget_ssh()
        with self._monitor() as qemu:
            qemu.execute("stop")
            qemu.human(f"loadvm {name}")
            vf_state.load(self._files.test_port, json.loads(self._vfs_of(name).read_text()))
            qemu.execute("cont")
        self.wait_ssh(RESTORE_S)
        # The guest's clock shows the time of the snapshot, so set it from this host's clock.
        self.sh(f"date -s @{time.time():.3f} >/dev/null")

    def unplug(self, pci: str) -> None:
        """Take a PCI function off the node's bus."""
        if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", pci):
            raise BadInput(f"{pci!r} is not a PCI address", "Give it as in 0000:21:00.0.")
        device = f"/sys/bus/pci/devices/{pci}"
        if self.run(["test", "-e", device]).returncode != 0:
            raise LabError(
                f"{self.name} has no PCI device {pci}", f"`python -m lab ssh {self.name} lspci -D` lists them."
            )
        self.sh(f"echo 1 > {device}/remove")

    def replug(self) -> None:
        """Have the node rescan its PCI bus, which brings back unplugged devices."""
        self.sh("echo 1 > /sys/bus/pci/rescan")

    def connect(self, nic: Nic, *, cable: bool) -> None:
        """Plug a NIC's cable in, or pull it out at this end only."""
        with self._monitor() as qemu:
            qemu.execute("set_link", name=nic.name, up=cable)

    def _inlet(self, machine: Machine, nic: Nic) -> Path:
        """The socket at which a NIC's QEMU receives frames."""
        return self.instance.node_folder(machine) / f"{nic.name}.sock"

    def _outlet(self, nic: Nic) -> Path:
        """The socket to which QEMU sends a NIC's frames in a lab of more than two nodes."""
        return self.folder / f"{nic.name}.out"

    def _vfs_of(self, snapshot: str) -> Path:
        return self.folder / f"{snapshot}.snapshot"

    def _monitor(self, timeout_s: float = monitor.TIMEOUT_S) -> AbstractContextManager[monitor.Monitor]:
        if self.pid() is None:
            raise LabError(f"{self.name} is off", f"`python -m lab power-on {self.name}` boots it.")
        return monitor.connected(self._files.monitor, timeout_s)

    def log_in_anew(self) -> None:
        """Have the next command log in: a login keeps the limits that it began with. Commands that run now go on."""
        self._end_ssh("stop")

    def _forget_ssh(self) -> None:
        """End the shared ssh connection: the guest at its other end is about to change."""
        self._end_ssh("exit")

    def _end_ssh(self, how: str) -> None:
        if (self.folder / "ssh.sock").exists():
            subprocess.run(["ssh", "-F", self.ssh_config, "-O", how, self.name], capture_output=True, check=False)

    def _write_credentials(self) -> None:
        """Write the credentials that systemd reads from SMBIOS. They are files, since every user can see a command line."""
        hosts = "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{m.mgmt_ip} {m.name}\n" for m in ALL_MACHINES)
        values = {
            "ssh.authorized_keys.root": self.ssh_key.with_suffix(".pub").read_bytes(),
            "lab.ssh_host_key": self.instance.host_key(self.machine).read_bytes(),
            "lab.time_source": time_source.setting(self.ssh_port).encode(),
            "network.hosts": hosts.encode(),
        }
        self._files.credentials.mkdir(exist_ok=True, mode=0o700)
        for name, value in values.items():
            file = self._files.credentials / name
            file.touch(mode=0o600)
            file.write_text(f"io.systemd.credential.binary:{name}={b64encode(value).decode()}")

    def _qemu_arguments(self) -> list[str]:
        nics = []
        for nic in self.machine.nics:
            theirs = self._inlet(self.peers[0], nic) if len(self.peers) == 1 else self._outlet(nic)
            nics += nic_between(nic, self._inlet(self.machine, nic), theirs)
        boot = boot_from(self.machine, self.image, self.loader, self.accelerator)
        title = f"{self.instance.name}-{self.name}"
        return arguments(title, self.machine, self._files, self.ssh_port, boot, nics, self.accelerator)


def wait(condition: Callable[[], bool], deadline: float, what: str) -> None:
    """Check a condition until it is true, for at most the given seconds."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"{what}: nothing after {deadline:.0f} s")
        time.sleep(0.2)


def _check_snapshot_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,60}", name):
        raise BadInput(
            f"{name!r} is not a valid name for a snapshot", "Start with a letter; then letters, digits, . _ and -."
        )
