"""Random trials of originals: `python -m tests.sim.engine.restoring_trials --trials 1000 --seed 1`.

A trial makes a node follow random specs while writes are refused, the agent is killed, drivers set values late, NICs leave the
spec and return, other programs set values, and a driver is loaded again. Then the spec is emptied, and nothing fails any more:
each value must be what it was before Trackbed, unless another program has set it since. A trial that fails ends the run with
exit code 1 and the command that repeats it.
"""

from __future__ import annotations

import argparse
import errno
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from attrs import asdict, define, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.hardware.config_space import device_control, max_read_request
from agent.hardware.functions import vf_addresses
from agent.machine import DcbState
from agent.report.records import HOST
from agent.spec.addresses import FIRST_TABLE
from tests.sim.engine.restoring_specs import MACS, PFS, random_document, spec_of
from tests.sim.kernel import NET, Kernel, no_fault
from tests.sim.killed import Killed
from tests.sim.passes import nic
from tests.sim.two_nics import NAME0, NAME1, PF0, PF1

ERRNOS = (errno.EINVAL, errno.EBUSY, errno.EOPNOTSUPP, errno.ENOSPC)
LATE = ("spoofchk", "trust", "vlan", "max_tx_rate")
# What follows from other values, or is nobody's setting.
DERIVED = ("/uevent", "/address", "/ifindex", "base_reachable_time")


@define
class Trial:
    """One node, with random values before Trackbed, and what happens to it."""

    seed: int
    path: Path
    kernel: Kernel = field(factory=Kernel)
    originals: Originals = field(factory=Originals)
    failures: Failures = field(factory=Failures)
    now: float = 0.0
    overdue: bool = False
    told: list[str] = field(factory=list)
    before: dict[str, object] = field(factory=dict)
    random: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311  no secret
        for node, (address, name) in enumerate(PFS.items()):
            self.kernel.add_nic(address, name, MACS[address], node=node)
            self.kernel.rdma.add(address, f"roce{node}", name)
            self.kernel.rdma.dcb[name] = DcbState(frozenset())
            self._add_files(name)
        self.kernel.tree.put("/sys/module/nvme_core/parameters/io_timeout", "30")
        self.kernel.add_virtual("veth0", queues=3)
        if self.random.random() < 0.5:
            self.kernel.sriov.able |= PFS.keys()
        # VFs stay when they leave the spec: they are there before.
        self.restart()
        self.passes({"nics": [nic(f"n{n}", pf, vfs={"count": 2}) for n, pf in enumerate(PFS)]}, 3)
        self.passes({"nics": []}, 5)
        self._administrate()
        self.path.unlink()
        self.restart()
        self.before = self.values()

    def _add_files(self, name: str) -> None:
        for role in ("roce_np", "roce_rp"):
            for priority in range(8):
                self.kernel.tree.put(f"{NET}/{name}/ecn/{role}/enable/{priority}", "0")

    def _administrate(self) -> None:
        """Values that an administrator has set before. The second NIC's driver is loaded again, so it has its own."""
        pick, kernel = self.random.choice, self.kernel
        netdev = kernel.netdev(PF0)
        kernel.netlink.set_link(netdev.ifindex, mtu=pick([1500, 4000, 9000]), up=pick([True, False]))
        kernel.netlink.set_link(netdev.ifindex, txqueuelen=pick([500, 1000]))
        for index in range(2):
            kernel.netlink.set_vf(
                netdev.ifindex, index, vlan=pick([0, 5]), spoofchk=pick([True, False]), trust=pick([True, False])
            )
        kernel.ethtool.set("rings", netdev.ifindex, {"rx": pick([256, 512]), "tx": pick([256, 1024])})
        kernel.ethtool.set("features", netdev.ifindex, {"tx-tcp-segmentation": pick([True, False])})
        if pick([True, False]):
            kernel.ethtool.two_modes.add(PF0)
            kernel.ethtool.set("channels", netdev.ifindex, pick([{"combined": 1}, {"rx": 1, "tx": 1, "combined": 0}]))
        for priority in range(8):
            kernel.tree.put(f"{NET}/{NAME0}/ecn/roce_np/enable/{priority}", pick(["0", "1"]))
        kernel.rdma.dcb[NAME0] = DcbState(frozenset(pick([(), (3,)])), frozenset(pick([(), ((26, 3), (46, 6))])))
        kernel.tree.put("/proc/sys/net/ipv6/conf/lo/disable_ipv6", pick(["0", "1"]))
        kernel.tree.put("/proc/sys/net/ipv4/conf/all/accept_redirects", pick(["0", "1"]))
        if pick([True, False]):
            kernel.netlink.add_address(netdev.ifindex, "192.0.2.11/24")

    # --- the agent ------------------------------------------------------------------------------------------

    def restart(self) -> None:
        self.originals, self.failures = Originals.load(self.path), Failures()

    def passes(self, document: dict[str, Any], number: int, events: bool = False) -> Pass | None:
        """Follow a spec for some passes."""
        spec = spec_of(document)
        result: Pass | None = None
        self.failures.forget()
        for _ in range(number):
            self.now += self.random.choice([1.0, 400.0])
            memory = Memory(partial(float, self.now), self.failures, self.originals)
            # A pass that follows events reads only some devices.
            after_events = events and result is not None and self.random.random() < 0.3
            scope = frozenset(self.random.sample([*PFS, HOST], 2)) if after_events else None
            try:
                result = converge(self.kernel.machine(), Goal(spec), memory, result.have if result else None, scope)
            except Killed:
                self.told.append("killed")
                self.restart()
                result = None
            self._catch_up()
        return result

    # --- what happens ---------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """The values that differ at the end."""
        for _ in range(self.random.randint(1, 6)):
            document = random_document(self.random, bool(self.kernel.sriov.able))
            self.told.append(f"spec {document}")
            with self.trouble(), self.pod():
                self.passes(document, self.random.randint(1, 3), events=True)
            if self.random.random() < 0.15:
                self._reload()
            if self.random.random() < 0.1:
                self._unplug()
            if self.random.random() < 0.2:
                self._meddle()
        self.kernel.sriov.catch_up()
        self.kernel.sriov.late.clear()
        last = self.passes({"nics": []}, 12)
        refused = {o.change.device for o in last.outcomes if o.change.field == "max_tx_rate"} if last else set()
        threads = {pf: f"{NET}/{name}/threaded" for pf, name in PFS.items()}
        refused |= {pf for pf, path in threads.items() if self.kernel.files.read(path) != self.before[path]}
        for pf in sorted(refused):
            # igb, and the kernel without a NAPI instance, refuse it while the PF is down, and the PF was down before. It is
            # kept until somebody brings the PF up.
            self.kernel.netlink.set_link(self.kernel.netdev(pf).ifindex, up=True)
            self.passes({"nics": []}, 3)
            self.kernel.netlink.set_link(self.kernel.netdev(pf).ifindex, up=False)
        now = self.values()
        return [
            f"{key}: {self.before[key]!r} -> {now[key]!r}"
            for key in self.before
            if now.get(key) != self.before[key] and key in now
        ]

    @contextmanager
    def trouble(self) -> Iterator[None]:
        """Writes are refused, late, or the last of the agent's."""
        share = self.random.choice([0.0, 0.0, 0.1, 0.4])
        kill = self.random.choice([None, None, self.random.randint(0, 30)])
        left = [kill]
        stubborn = self.random.choice(
            ["", "", "mtu=", "rings", "enable/4", "disable_ipv6", "hugepages", "max_tx_rate", "altname"]
        )
        able = bool(self.kernel.sriov.able)
        noted = self._noted()
        self.kernel.sriov.late = set(self.random.sample(LATE, self.random.choice([0, 0, 1, 4]))) if able else set()
        self.told.append(
            f"  refused {share}, always {stubborn!r}, killed after {kill}, late {sorted(self.kernel.sriov.late)}"
        )

        def fault(operation: str, where: str, value: str) -> OSError | None:
            nonlocal noted
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    left[0] = None
                    self._tear(noted)
                    raise Killed
            noted = self._noted()
            refused = self.random.random() < share or (stubborn and stubborn in f"{operation} {where} {value}")
            return OSError(self.random.choice(ERRNOS), "refused") if refused else None

        self.kernel.fault = fault
        try:
            yield
        finally:
            self.kernel.fault = no_fault

    def _noted(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _tear(self, before: bytes) -> None:
        """Of what the file of originals has got since the last write, the killed worker wrote only a part."""
        now = self._noted()
        if now.startswith(before):
            self.path.write_bytes(now[: self.random.randint(len(before), len(now))])

    @contextmanager
    def pod(self) -> Iterator[None]:
        """A pod has a VF. When it ends, the VF is back, and down."""
        vf = vf_addresses(self.kernel.files, PF0)[0]
        if self.random.random() > 0.2:
            yield
            return
        name = self.kernel.netdev(vf).name
        self.told.append(f"a pod has {vf}")
        self.kernel.move_away(vf)
        yield
        self.kernel.come_back(vf, name)
        self.before.pop(f"{vf} up", None)

    def _catch_up(self) -> None:
        """What is set late takes effect after one more pass at most."""
        self.overdue = not self.overdue and self.random.random() < 0.5
        if not self.overdue:
            self.kernel.sriov.catch_up()

    def _reload(self) -> None:
        self.told.append(f"the driver of {PF1} is loaded again")
        self.kernel.reload_driver(PF1)
        self._add_second()

    def _add_second(self) -> None:
        self.kernel.files.write(f"/sys/bus/pci/devices/{PF1}/sriov_numvfs", "2")
        self._add_files(NAME1)
        self.kernel.rdma.add(PF1, "roce1", NAME1)
        self.kernel.rdma.dcb[NAME1] = DcbState(frozenset())

    def _unplug(self) -> None:
        """The second NIC is gone while the node follows one more spec."""
        self.told.append(f"{PF1} is away")
        self.kernel.remove_nic(PF1)
        self.passes(random_document(self.random, bool(self.kernel.sriov.able)), 2)
        self.kernel.add_nic(PF1, NAME1, MACS[PF1], node=1)
        self._add_second()

    def _meddle(self) -> None:
        """Another program sets a value. What it is in the end is not compared."""
        what = self.random.choice(["mtu", "somaxconn", "rx"])
        self.told.append(f"another program sets {what}")
        if what == "mtu":
            self.kernel.netlink.set_link(self.kernel.netdev(PF0).ifindex, mtu=3000)
            self.before.pop(f"{PF0} mtu", None)
        elif what == "somaxconn":
            self.kernel.files.write("/proc/sys/net/core/somaxconn", "777")
            self.before.pop("/proc/sys/net/core/somaxconn", None)
        else:
            self.kernel.ethtool.set("rings", self.kernel.netdev(PF0).ifindex, {"rx": 2048})
            self.before.pop(f"{PF0} rings rx", None)

    # --- values ---------------------------------------------------------------------------------------------

    def values(self) -> dict[str, object]:
        """The present value of everything that the specs set, by a name for it."""
        kernel, values = self.kernel, dict[str, object]()
        for pf, name in PFS.items():
            for function in (pf, *vf_addresses(kernel.files, pf).values()):
                if kernel.has_netdev(function):
                    values |= {f"{function} {what}": value for what, value in self._of_netdev(function)}
            for vf in kernel.vfs(pf):
                values |= {f"{pf} VF {vf.index} {name}": value for name, value in asdict(vf).items() if name != "mac"}
            values[f"{pf} read request"] = max_read_request((device_control(kernel.files, pf) or (0, 0))[1])
            values[f"{pf} DCB"] = kernel.rdma.dcb[name]
            values[f"{pf} CM"] = kernel.rdma.cm_defaults(f"roce{list(PFS).index(pf)}", 1)
        values |= {
            path: text.lstrip("0") if path.endswith("_cpus") else text
            for path, text in kernel.tree.files.items()
            if path.startswith(("/proc/sys/", "/sys/module/", NET)) or "/hugepages/" in path
            if not any(each in path for each in DERIVED)
        }
        tables = {254, *range(FIRST_TABLE, FIRST_TABLE + 2)}
        values["routes"], values["rules"] = kernel.netlink.routes(tables), kernel.netlink.rules()
        values["netns"] = kernel.rdma.netns_mode()
        return values

    def _of_netdev(self, function: str) -> Iterator[tuple[str, object]]:
        kernel, link = self.kernel, self.kernel.netdev(function)
        yield from (("mtu", link.mtu), ("txqueuelen", link.txqueuelen), ("up", link.up), ("altnames", link.altnames))
        yield "addresses", kernel.netlink.addresses().get(link.ifindex, ())
        yield "coalescing", kernel.ethtool.settings("coalescing", link.ifindex)
        for kind in ("channels", "rings"):
            numbers = kernel.ethtool.settings(kind, link.ifindex)
            yield from ((f"{kind} {name}", number.value) for name, number in numbers.items())
        for name, feature in kernel.ethtool.settings("features", link.ifindex).items():
            yield f"feature {name}", (feature.value, feature.requested)
        irqs = [n for n in kernel.files.names("/proc/irq") if n.isdigit()]
        affinities = {n: kernel.files.read(f"/proc/irq/{n}/smp_affinity_list") for n in irqs}
        there = kernel.tree.folders.get(f"/sys/bus/pci/devices/{function}/msi_irqs", ())
        yield "affinities", sorted(affinities[n] for n in there if n in affinities)


def differing(seed: int) -> tuple[list[str], list[str]]:
    """What differs at the end of a trial, and what happened."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(seed, Path(folder) / ORIGINALS)
        return trial.run(), trial.told


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.engine.restoring_trials", description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="that of the first trial; each next one has the next")
    given = parser.parse_args()
    for seed in range(given.seed, given.seed + given.trials):
        wrong, told = differing(seed)
        if wrong:
            click.echo("\n".join([*told, *wrong]))
            click.echo(f"again: python -m tests.sim.engine.restoring_trials --trials 1 --seed {seed}")
            return 1
    click.echo(f"{given.trials} trials from seed {given.seed} on: each value was as before")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
