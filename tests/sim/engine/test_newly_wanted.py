"""A pass that reads only what events name, in which other NICs are wanted than before, or by other settings."""

from collections.abc import Callable
from typing import Any

import pytest

from agent.engine.converge import Pass
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from agent.state.scope import own
from agent.state.wanted import derived_mac
from tests.sim.kernel import Kernel
from tests.sim.passes import nic, settle, spec_of
from tests.sim.two_nics import MAC1, NAME0, NAME1, PF0, PF1

TAKEN = {"count": 1, "groups": [{"index": "0", "mac": derived_mac(MAC1, 0)}]}
"""A VF with the MAC that the first VF of PF1 gets."""


def spec(*nics: dict[str, object], **more: object) -> NodeSpec:
    return spec_of(*nics, irqs={"irqbalance": "untouched"}, **more)


def rename(kernel: Kernel, function: str, name: str) -> None:
    link = kernel.netdev(function)
    kernel.netlink.set_link(link.ifindex, up=False)
    kernel.netlink.rename(link.ifindex, name)
    kernel.netlink.set_link(link.ifindex, up=True)
    if link.name in kernel.netdev(function).altnames:
        kernel.netlink.remove_altname(link.ifindex, link.name)


def replace(kernel: Kernel) -> None:
    rename(kernel, PF0, "other")
    rename(kernel, PF1, NAME0)


def swap(kernel: Kernel) -> None:
    first, second = kernel.netdev(PF0).name, kernel.netdev(PF1).name
    rename(kernel, PF0, "free")
    rename(kernel, PF1, first)
    rename(kernel, PF0, second)


def read(result: Pass) -> dict[str, Any]:
    """The state of each kind but the interrupts, whose state has the placement that the pass before it has left."""
    return {kind: state for kind, state in result.have.states.items() if kind != "irqs"}


def rename_first(kernel: Kernel) -> None:
    rename(kernel, PF0, "other")


A = {"name": "a", "select": {"netdev": NAME0}}
EACH = {"name": "rail{index}", "select": {"vendor": "8086", "each": True}, "mtu": 9000}
LABELLED = {"count": 2, "defaults": {"vlan": 7, "txqueuelen": 500}}


@pytest.mark.parametrize(
    ("wanted", "happens", "named"),
    [
        (spec({**A, "required": False, "vfs": TAKEN}, nic("b", PF1, mtu=9000, vfs={"count": 1})), rename_first, PF0),
        (spec({**A, "required": False}, EACH), rename_first, PF0),
        (spec({**A, "mtu": 9000}), replace, PF0),
        (
            spec({**A, "mtu": 9000, "vfs": {"count": 2}}, {"name": "b", "select": {"netdev": NAME1}, "vfs": LABELLED}),
            swap,
            PF1,
        ),
        (spec({**A, "required": False}, nic("b", PF1), rps={"netdevs": [{"match": "oth*"}]}), rename_first, PF0),
    ],
    ids=[
        "a conflict about an address ends",
        "a conflict about a function ends",
        "another function is selected",
        "two NICs change places",
        "a netdev is no longer a NIC's, and is steered",
    ],
)
def test_what_is_wanted_only_now_is_read_in_the_same_pass(
    kernel: Kernel, wanted: NodeSpec, happens: Callable[[Kernel], None], named: str
) -> None:
    machine = kernel.machine()
    before = settle(machine, wanted)
    happens(kernel)
    result = settle(machine, wanted, before, frozenset({own(named)}))
    again = settle(machine, wanted, result)
    assert result.want.nics == again.want.nics
    assert read(result) == read(again)
    assert not again.outcomes
    assert is_ready(result.conditions) == is_ready(again.conditions)


def test_as_long_as_the_same_nics_are_wanted_only_what_is_named_is_read(kernel: Kernel) -> None:
    wanted = spec(nic("a", PF0, mtu=9000), nic("b", PF1, mtu=9000))
    before = settle(kernel.machine(), wanted)
    kernel.unreadable.add(f"/sys/bus/pci/devices/{PF1}/sriov_numvfs")
    failing = settle(kernel.machine(), wanted, before)
    assert PF1 not in failing.want.nics
    for pf in (PF0, PF1):
        kernel.netlink.set_link(kernel.netdev(pf).ifindex, mtu=1500)
    kernel.unreadable.clear()
    settle(kernel.machine(), wanted, failing, frozenset({own(PF0)}))
    assert (kernel.netdev(PF0).mtu, kernel.netdev(PF1).mtu) == (9000, 1500)
