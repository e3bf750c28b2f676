"""Conflicts that only the machine shows: the NICs concerned are named and left alone, whatever their order."""

from typing import Any

import pytest

from agent.engine.dry_run import dry_run
from agent.report.records import Condition
from agent.state.wanted import derived_mac
from tests.sim.kernel import Kernel
from tests.sim.passes import settle, spec_of

PF, OTHER, THIRD = "0000:21:00.0", "0000:22:00.0", "0000:23:00.0"
MAC, OTHER_MAC, THIRD_MAC = "02:00:00:00:01:00", "02:00:00:00:02:00", "02:00:00:00:03:00"


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_nic(PF, "enp33s0", MAC)
    kernel.add_nic(OTHER, "enp34s0", OTHER_MAC)
    kernel.add_nic(THIRD, "enp35s0", THIRD_MAC)
    kernel.writes.clear()
    return kernel


def nic(name: str, select: dict[str, str], **vfs: Any) -> dict[str, Any]:
    return {"name": name, "select": select, "mtu": 9000, "vfs": {"count": 2, **vfs}}


def group(mac: str) -> list[dict[str, str]]:
    return [{"index": "1", "mac": mac}]


def nic_conditions(kernel: Kernel, *nics: dict[str, Any]) -> list[Condition]:
    """The conditions of the NICs. They are the same in each order of the NICs, and the dry run refuses the spec."""
    each_order = []
    for ordered in (nics, nics[::-1]):
        spec = spec_of(*ordered, irqs={"irqbalance": "untouched"})
        assert dry_run(kernel.machine(), spec).errors
        conditions = settle(kernel, spec).conditions
        each_order.append([c for c in conditions if c.type == "NicsPresent"])
    assert each_order[0] == each_order[1]
    return each_order[0]


def test_two_entries_for_one_function_are_refused_even_if_one_is_optional(kernel: Kernel) -> None:
    (condition,) = nic_conditions(kernel, nic("a", {"pci": PF}), {**nic("b", {"mac": MAC}), "required": False})
    assert condition.severity == "required"


@pytest.mark.parametrize("mac", [derived_mac(MAC, 0), derived_mac(MAC, 1)])
def test_an_address_that_is_given_to_one_vf_and_derived_for_another_is_refused(kernel: Kernel, mac: str) -> None:
    (condition,) = nic_conditions(kernel, nic("a", {"pci": PF}), nic("b", {"pci": OTHER}, groups=group(mac)))
    assert (condition.status, condition.reason) == ("False", "AddressGivenTwice")
    assert all(text in condition.message for text in ("NIC a and b", f"{PF}#", f"{OTHER}#1", mac))
    assert kernel.writes == []


@pytest.mark.parametrize(
    ("mac", "named"),
    [*((mac, mac) for mac in (MAC, OTHER_MAC, THIRD_MAC)), (derived_mac(MAC, 0), f"{PF}#0 and {PF}#1 would both have")],
)
def test_a_given_address_that_another_function_has_is_refused(kernel: Kernel, mac: str, named: str) -> None:
    (condition,) = nic_conditions(kernel, nic("a", {"pci": PF}, groups=group(mac)))
    assert condition.reason == "AddressGivenTwice"
    assert named in condition.message
    assert kernel.writes == []


def test_a_nic_without_a_conflict_is_configured(kernel: Kernel) -> None:
    nic_conditions(kernel, nic("a", {"pci": PF}), nic("b", {"mac": MAC}), nic("c", {"pci": THIRD}))
    link = kernel.machine().netlink.link("enp35s0")
    assert link is not None
    assert link.mtu == 9000
