"""Measures how long all VFs of a PF take to be made and configured, beside a bare loop of the same writes.

Run it with `python -m bench.creation`.

Both run on the first node of the lab: seven VFs of its igb, and 128 of a netdevsim, which has no PCI functions. The agent's
time is that of one pass: the pass that the event of the VFs' deletion causes, with all of its readings. Probes have threads of
their own. The bare counterpart repeats the writes of that pass: files by open(), netlink by pyroute2. Between the writes it
only looks for the netdevs of new VFs.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from pyroute2.iproute.linux import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import converge
from agent.hardware.functions import device_path, ifindex, netdev, vf_addresses
from agent.linux import machine as this_machine
from agent.machine import Machine
from agent.spec.node import NodeSpec, from_mapping
from bench import namespace

ATTRIBUTES = {"trust": True, "spoofchk": False}
# New VFs have new interrupts, so a write to an old interrupt cannot be repeated.
NO_STEERING: dict[str, Any] = {"irqs": {"pin": False}, "rps": {"enable": False}, "xps": {"enable": False}}
SIMULATED = 128

Write = tuple[str, tuple[Any, ...], dict[str, Any]]


class Recorder:
    """Wraps one protocol of the machine, and records its writes in ``log``."""

    def __init__(self, inner: object, log: list[Write]) -> None:
        self._inner = inner
        self._log = log

    def __getattr__(self, name: str) -> Any:
        method, log = getattr(self._inner, name), self._log
        if name not in ("write", "set_vf", "set_link"):
            return method

        def noted(*arguments: Any, **named: Any) -> Any:
            log.append((name, arguments, named))
            return method(*arguments, **named)

        return noted


@frozen
class Case:
    """A device with VFs: the machine, the PF's address, the number of VFs, and how to remove them."""

    name: str
    machine: Machine
    address: str
    count: int
    clear: Callable[[], None]

    def spec(self) -> NodeSpec:
        """The spec: all VFs have the same attributes, and each an address of its own."""
        nic = {"name": "rail0", "select": {"pci": self.address}, "vfs": {"count": self.count, "defaults": ATTRIBUTES}}
        return from_mapping({"node_name": "bench", "nics": [nic], **NO_STEERING})


def measure(case: Case, rounds: int) -> tuple[list[float], list[float], int]:
    """Milliseconds of each round by the agent and by the bare loop, and the number of writes.

    If the driver of a VF probed before the PF was ready, the pass binds that VF again. The writes of such a pass cannot be
    repeated, since other VFs need it the next time, or none. Such a round does not count.
    """
    log: list[Write] = []
    recorded = evolve(
        case.machine, files=Recorder(case.machine.files, log), netlink=Recorder(case.machine.netlink, log)
    )
    ours: list[float] = []
    bare: list[float] = []
    spec, ip = case.spec(), IPRoute()
    last = converge(recorded, Goal(spec), Memory(time.monotonic))

    def caused_by_deletion() -> None:
        nonlocal last
        scope = frozenset({case.address})
        last = converge(
            recorded, Goal(spec), Memory(time.monotonic), last.have, scope, Callbacks(judge=lambda want, have: [])
        )

    for _ in range(rounds * 3):
        if len(bare) == rounds:
            break
        case.clear()
        log.clear()
        took = _timed(caused_by_deletion)
        link = case.machine.netlink.link(_netdev(case))
        wrong = [vf for vf in (link.vfs if link else ()) if (vf.trust, vf.spoofchk) != (True, False)]
        if link is None or len(link.vfs) != case.count or wrong:
            raise SystemExit(f"{case.name}: the agent did not configure the VFs: {wrong or link}")
        vfs = dict(_netdevs(case.machine, case.address))
        case.clear()
        again = [_bare(ip, write, case, vfs) for write in log]
        try:
            bare.append(_timed(partial(_all, again)))
        except (OSError, NetlinkError) as error:
            print(f"{case.name}: a round does not count, since its writes cannot be repeated: {error}", file=sys.stderr)  # noqa: T201
        else:
            ours.append(took)
    if len(bare) < rounds:
        raise SystemExit(f"{case.name}: only {len(bare)} of {rounds} rounds could be repeated; is the node idle?")
    return ours, bare, len(log)


def _netdevs(machine: Machine, address: str) -> Iterator[tuple[int, str]]:
    """The VF of each ifindex: new VFs have other ones."""
    for vf in vf_addresses(machine.files, address).values():
        if name := netdev(machine.files, vf):
            yield ifindex(machine.files, name), vf


def _all(writes: list[Callable[[], object]]) -> None:
    for write in writes:
        write()


def _netdev(case: Case) -> str:
    (name,) = case.machine.files.names(f"{device_path(case.address)}/net")
    return name


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def _bare(ip: Any, write: Write, case: Case, vfs: Mapping[int, str]) -> Callable[[], object]:
    name, arguments, named = write
    if name == "write":
        path, text = arguments
        return lambda: _write(path, text)
    index, *rest = arguments
    if name == "set_vf":
        return lambda: ip.link("set", index=index, vf={"vf": rest[0], **named})
    given = {key: value for key, value in named.items() if key != "up"}
    if (up := named.get("up")) is not None:
        given["state"] = "up" if up else "down"
    if index not in vfs:
        return lambda: ip.link("set", index=index, **given)
    folder = f"{device_path(vfs[index])}/net"
    return lambda: ip.link("set", index=socket.if_nametoindex(os.listdir(folder)[0]), **given)  # noqa: PTH208


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123  the fastest way to write a file
        file.write(text)


def igb(address: str) -> Case:
    """The lab's emulated card."""
    machine = this_machine()
    return Case("igb", machine, address, 7, lambda: _clear(Path(device_path(address))))


def _clear(device: Path) -> None:
    (device / "sriov_numvfs").write_text("0")


def _forget(machine: Machine, name: str, device: Path) -> None:
    """Remove the VFs, and reset what was granted to them: unlike a card, netdevsim keeps that."""
    if (link := machine.netlink.link(name)) is not None:
        for vf in link.vfs:
            machine.netlink.set_vf(link.ifindex, vf.index, mac="00:00:00:00:00:00", trust=False, spoofchk=True)
    _clear(device)


@contextmanager
def netdevsim() -> Iterator[Case]:
    """The kernel's simulated device, in the place of a PCI function."""
    bus, number = Path("/sys/bus/netdevsim"), "77"
    (bus / "new_device").write_text(f"{number} 1")
    try:
        device = bus / f"devices/netdevsim{number}"
        Path(f"/sys/kernel/debug/netdevsim/netdevsim{number}/max_vfs").write_text(str(SIMULATED))
        # udev renames it.
        subprocess.run(["udevadm", "settle"], check=True)
        (name,) = (path.name for path in (device / "net").iterdir())
        with namespace.devices({namespace.ADDRESS: name}):
            folder = Path(device_path(namespace.ADDRESS))
            (folder / "sriov_totalvfs").write_text(str(SIMULATED))
            (folder / "sriov_drivers_autoprobe").write_text("1")
            (folder / "sriov_numvfs").symlink_to(device / "sriov_numvfs")
            machine = this_machine()
            clear = partial(_forget, machine, name, device)
            yield Case("netdevsim", machine, namespace.ADDRESS, SIMULATED, clear)
    finally:
        (bus / "del_device").write_text(number)


def on_the_node(address: str, rounds: int) -> None:
    """Measure both, and print the figures as JSON."""
    results = {}
    # The card comes first: the simulated device hides all others.
    for each in (nullcontext(igb(address)), netdevsim()):
        with each as case:
            ours, bare, writes = measure(case, rounds)
            results[case.name] = {"count": case.count, "writes": writes, "agent": ours, "bare": bare}
    json.dump(results, sys.stdout)


RUNNER = """
import sys
sys.path[:0] = [sys.argv[1], "/opt/trackbed/current"]
from bench.creation import on_the_node
on_the_node(sys.argv[2], int(sys.argv[3]))
"""
FOLDER = "/tmp/trackbed-bench"  # noqa: S108  on the lab's node


def main() -> None:
    """Print the milliseconds of both, and their ratio."""
    import click
    from rich.console import Console
    from rich.table import Table

    import lab
    from bench.nodes import nodes

    @click.command()
    @click.option("--rounds", default=5, show_default=True, help="Rounds: how often all VFs are made.")
    def command(rounds: int) -> None:
        """Print the milliseconds from no VFs to all of them, by the agent and by the same writes alone."""
        (node, *_) = nodes()
        files = {f"bench/{name}": Path(__file__).with_name(name) for name in ("creation.py", "namespace.py")}
        node.sh(f"systemctl stop trackbed; modprobe netdevsim; rm -rf {FOLDER}; mkdir {FOLDER}")
        try:
            node.copy(files, FOLDER)
            pf = lab.MACHINES[0].nics[0].pci
            done = node.run(["python3", "-I", "-c", RUNNER, FOLDER, pf, str(rounds)], timeout=600, check=True)
        finally:
            node.sh(f"systemctl start trackbed; modprobe -r netdevsim; rm -rf {FOLDER}")
        print(done.stderr, end="", file=sys.stderr)  # noqa: T201  rounds that were left out
        table = Table("VFs", "writes", "agent: median", "bare: median", "ratio", title="milliseconds")
        for name, row in json.loads(done.stdout).items():
            ours, bare = statistics.median(row["agent"]), statistics.median(row["bare"])
            table.add_row(
                f"{row['count']} of {name}", str(row["writes"]), f"{ours:.0f}", f"{bare:.0f}", f"{ours / bare:.2f}"
            )
        Console(width=100).print(table)

    command()


if __name__ == "__main__":
    main()
