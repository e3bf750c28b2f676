"""Another program undoes one value after each pass, for four hours: each kind of value is written equally seldom.

Full passes and those that an event causes take turns. What a write is must not depend on which of them makes it.
"""

import random
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from attrs import define, evolve, field

from agent.engine.contention import LIMIT, PAUSE
from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.hardware.functions import pci_of
from agent.kinds import by_name
from agent.kinds.host.irqbalance import LIST as BANNED
from agent.kinds.host.irqbalance import SCRIPT
from agent.machine import DcbState, QueueIrq
from agent.report.records import HOST, Change
from agent.report.verdict import is_ready
from agent.spec.node import from_mapping
from agent.spec.vf_attributes import ordered as vf_attributes
from agent.spec.vf_attributes.guids import GUIDS
from agent.state.scope import Scope, own
from tests.sim.kernel import Kernel

PF, NAME = "0000:21:00.0", "enp33s0"
VF = f"{PF}#0"
FOUR_HOURS = 4 * 3600.0
MOST = LIMIT + int(FOUR_HOURS // PAUSE)
"""How often a value is written in four hours: until it is left alone, and once after each pause."""

VF_VALUES = {
    "vlan": 5,
    "qos": 2,
    "vlan_protocol": "802.1ad",
    "trust": True,
    "spoofchk": False,
    "rss_query": True,
    "link_state": "enable",
    "max_tx_rate": 100,
    "min_tx_rate": 10,
    "mtu": 1400,
    "txqueuelen": 500,
    "rings": {"rx": 512},
    "coalescing": {"rx_usecs": 50},
    "offloads": {"rx-gro": False},
    "napi": {"irq_suspend_timeout": 1000000},
}
NIC: dict[str, Any] = {
    "name": "rail0",
    "rail": 0,
    "select": {"pci": PF},
    "mtu": 9000,
    "txqueuelen": 2000,
    "altnames": ["rdma0"],
    "addresses": ["192.0.2.11/24"],
    "channels": {"combined": 1},
    "rings": {"rx": 512},
    "coalescing": {"rx_usecs": 50},
    "offloads": {"rx-gro": False},
    "napi": {"gro_flush_timeout": 20000, "threaded": True},
    "max_read_request": 1024,
    "roce": {"trust": "dscp", "pfc": "3", "cm_tos": 106, "cm_mode": "RoCE v2"},
    "vfs": {"count": 3, "defaults": VF_VALUES, "groups": [{"index": "1", "driver": "vfio-pci"}]},
}
SPEC = from_mapping(
    {
        "node_name": "n1",
        "nics": [NIC],
        "irqs": {"irqbalance": "banned"},
        "rps": {"netdevs": [{"match": "cali*", "cpus": "2-3"}]},
        "rfs": {"enable": True},
        "sysctls": {"net.core.somaxconn": "1027"},
        "hugepages": [{"size": "2M", "count": 4}],
        "module_parameters": {"nfs": {"nfs4_disable_idmapping": "0"}},
        "rdma": {"netns_mode": "exclusive"},
    }
)


@define
class Node:
    """A machine with an agent, and a clock."""

    kernel: Kernel = field(factory=lambda: Kernel(cpus=4, nodes=1, vf_queues=2))
    failures: Failures = field(factory=Failures)
    originals: Originals = field(factory=Originals)
    now: float = 1000.0
    last: Pass | None = None

    def __attrs_post_init__(self) -> None:
        self.kernel.add_nic(PF, NAME, "02:00:00:00:01:00")
        self.kernel.linked[PF] = (None, QueueIrq(0, 0))
        self.kernel.load_vfio()
        self.kernel.sriov.able.add(PF)
        self.kernel.rdma.rxe = True
        self.kernel.rdma.dcb[NAME] = DcbState(frozenset())
        self.kernel.rdma.add(PF, "rocep33s0", NAME)
        self.kernel.add_virtual("cali1")
        self.kernel.host.processes.add("irqbalance")
        self.kernel.host.command_lines["irqbalance"] = ("/usr/sbin/irqbalance", f"--policyscript={SCRIPT}")

    def look(self, scope: Scope = None) -> Pass:
        memory = Memory(lambda: self.now, self.failures, self.originals)
        self.last = converge(self.kernel.machine(), Goal(SPEC), memory, self.last.have if self.last else None, scope)
        return self.last

    def undo(self, change: Change) -> None:
        """What another program does to a value that the agent has set; nothing if it was undone before."""
        kernel = self.kernel
        with suppress(OSError):
            match change.kind, change.field:
                case "bindings", "driver":
                    vf = pci_of(kernel.files, change.target)
                    kernel.unbind(vf)
                    if change.after == "vfio-pci":
                        kernel.files.write(f"/sys/bus/pci/devices/{vf}/driver_override", "\n")
                        kernel.files.write("/sys/bus/pci/drivers_probe", vf)
                case "bindings", "autoprobe":
                    kernel.files.write(f"/sys/bus/pci/devices/{PF}/sriov_drivers_autoprobe", "0")
                case "vfs", _:
                    kernel.files.write(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "0")
                case "vf_names", _:
                    index = kernel.netdev(pci_of(kernel.files, change.target)).ifindex
                    kernel.netlink.set_link(index, up=False)
                    kernel.netlink.rename(index, "stolen0")
                    kernel.netlink.set_link(index, up=True)
                case "irqbalance", _:
                    kernel.files.replace(BANNED, "")
                case "channels", _:
                    # The agent has set them before there were VFs: with these the driver refuses as many as before.
                    kernel.ethtool.set("channels", kernel.netdev(PF).ifindex, {"combined": 2})
                case _:
                    before = not change.after if change.before is None else change.before
                    by_name()[change.kind].apply(kernel.machine(), evolve(change, before=change.after, after=before))


@cache
def changes() -> dict[str, Change]:
    """One change of each field of each kind, of a PF and of a VF, by what it is called in the tests."""
    settled = Node().look()
    made = [outcome.change for outcome in settled.outcomes if outcome.result == "applied"]
    renamed = Change("vf_names", VF, "name", f"{NAME}v0", f"{NAME}v0")
    named: dict[str, Change] = {}
    for change in [*made, renamed]:
        of = "host" if change.target == HOST else "VF" if "#" in change.target else "PF"
        after = f" {change.after}" if change.field == "driver" else ""
        named.setdefault(f"{change.kind} {change.field}{after} of the {of}", change)
    return named


@define
class Seen:
    """What a test counts: writes of the value, and changes of the condition ``Uncontended`` and of readiness."""

    writes: int = 0
    uncontended: int = 0
    ready: int = 0


def contend(change: Change) -> Seen:
    chance = random.Random(1)  # noqa: S311  the same passes each time
    node, seen = Node(), Seen()
    before = node.look()
    end = node.now + FOUR_HOURS
    while node.now < end:
        if all(place(outcome.change) != place(change) for outcome in before.outcomes if outcome.result != "applied"):
            node.undo(change)
        node.now += chance.uniform(15, 60)
        scopes: tuple[Scope, ...] = (None, frozenset({change.device}))
        if change.device != HOST:
            scopes = (*scopes, frozenset({own(change.device), change.target} - {change.device}))
        result = node.look(chance.choice(scopes))
        seen.writes += sum(place(o.change) == place(change) for o in result.outcomes if o.result == "applied")
        seen.uncontended += status(before) != status(result)
        seen.ready += is_ready(before.conditions) != is_ready(result.conditions)
        before = result
    return seen


def place(change: Change) -> tuple[str, str, str]:
    return change.kind, change.target, change.field


def status(result: Pass) -> str:
    return next(condition.status for condition in result.conditions if condition.type == "Uncontended")


def test_every_kind_takes_part() -> None:
    assert {change.kind for change in changes().values()} == by_name().keys()
    fields = {change.field for change in changes().values() if change.kind == "vf_attributes"}
    assert fields == {attribute.name for attribute in vf_attributes()} - set(GUIDS)


QUICK = {"links mtu of the PF", "vf_attributes vlan of the VF", "bindings driver netdevice of the VF"}
"""Those that are tried in each run of the tests."""


@pytest.mark.parametrize(
    "called", [pytest.param(called, marks=() if called in QUICK else pytest.mark.slow) for called in changes()]
)
def test_a_value_that_another_program_undoes_is_written_seldom(called: str) -> None:
    seen = contend(changes()[called])
    required = changes()[called].required
    assert LIMIT <= seen.writes <= MOST
    # Once when it is left alone, and twice with the write after each pause.
    assert seen.uncontended <= 1 + 2 * (MOST - LIMIT)
    assert (seen.uncontended > 0) == required
    assert seen.ready <= seen.uncontended
