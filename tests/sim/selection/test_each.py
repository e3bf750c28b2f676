"""An entry with `select.each`: each function is a numbered NIC, and none is changed while the numbers may be wrong."""

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.report.records import Condition
from agent.report.verdict import is_ready
from agent.spec.addresses import FIRST_TABLE
from agent.spec.node import NodeSpec
from cli.as_spec import derive_spec
from cli.inspection import inspect, render
from tests.sim.kernel import Kernel
from tests.sim.passes import settle, spec_of
from tests.sim.seams import seen

FIRST, SECOND, THIRD = PFS = ("0000:21:00.0", "0000:41:00.0", "0000:c1:00.0")
MACS = {FIRST: "02:00:00:00:01:00", SECOND: "02:00:00:00:02:00", THIRD: "02:00:00:00:03:00"}
EACH = {"vendor": "8086", "device": "10c9", "each": True}
RAILS = {"name": "rail{index}", "select": EACH, "altnames": ["rail{index}"], "mtu": 9000}


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    # Neither the order in which they appeared nor their names are that of their addresses.
    for name, address in (("ens1", THIRD), ("ens2", FIRST), ("ens3", SECOND)):
        kernel.add_nic(address, name, MACS[address])
    kernel.writes.clear()
    return kernel


def spec(*nics: dict[str, Any], **more: Any) -> NodeSpec:
    return spec_of(*nics, irqs={"irqbalance": "untouched"}, **more)


def rails(**more: Any) -> dict[str, Any]:
    return {**RAILS, "select": {**EACH, **more}}


def nic_conditions(result: Pass) -> list[Condition]:
    return [c for c in result.conditions if c.type == "NicsPresent"]


def names(result: Pass) -> dict[str, tuple[str, int | None]]:
    return {address: (nic.nic.name, nic.index) for address, nic in result.want.nics.items()}


ALL = {FIRST: ("rail0", 0), SECOND: ("rail1", 1), THIRD: ("rail2", 2)}


def altnames(kernel: Kernel) -> dict[str, tuple[str, ...]]:
    return {address: kernel.netdev(address).altnames for address in PFS}


def test_each_function_is_a_nic_in_the_order_of_the_addresses(kernel: Kernel) -> None:
    result = settle(kernel, spec({**RAILS, "vfs": {"count": 2}}))
    assert is_ready(result.conditions)
    assert names(result) == ALL
    assert altnames(kernel) == {FIRST: ("rail0",), SECOND: ("rail1",), THIRD: ("rail2",)}
    assert {kernel.netdev(address).mtu for address in PFS} == {9000}


@pytest.mark.parametrize(
    ("bounds", "reason", "bound"),
    [({"min": 4}, "TooFewNics", "at least 4"), ({"max": 2}, "TooManyNics", "at most 2")],
    ids=str,
)
def test_too_few_or_too_many_are_named_and_left_alone(
    kernel: Kernel, bounds: dict[str, int], reason: str, bound: str
) -> None:
    wanted = spec(rails(**bounds))
    assert dry_run(kernel.machine(), wanted).errors
    (condition,) = nic_conditions(result := settle(kernel, wanted))
    assert (condition.status, condition.reason) == ("False", reason)
    assert (
        f"matches 3 functions ({FIRST} (ens2), {SECOND} (ens3), {THIRD} (ens1)), and {bound} must match"
        in condition.message
    )
    assert not is_ready(result.conditions)
    assert (names(result), kernel.writes) == ({}, [])


def test_none_at_all_is_too_few_unless_they_are_optional(kernel: Kernel) -> None:
    none = {**RAILS, "select": {"vendor": "15b3", "each": True}}
    (condition,) = nic_conditions(settle(kernel, spec(none)))
    assert (condition.reason, condition.severity) == ("TooFewNics", "required")
    assert f"at least 1 must match; this node has {FIRST}" in condition.message
    assert is_ready(settle(kernel, spec({**none, "required": False})).conditions)


STORAGE = {"name": "storage", "select": {"mac": MACS[SECOND]}}


@pytest.mark.parametrize("nics", [(RAILS, STORAGE), (STORAGE, RAILS)], ids=["each-first", "each-last"])
def test_a_function_that_another_entry_means_is_claimed_twice(kernel: Kernel, nics: Iterable[dict[str, Any]]) -> None:
    (condition,) = nic_conditions(result := settle(kernel, spec(*nics)))
    assert (condition.status, condition.reason) == ("False", "NicClaimedTwice")
    assert f"NICs rail{{index}} and storage all select {SECOND}" in condition.message
    assert "in select.without of rail{index}" in condition.remedy
    assert (names(result), kernel.writes) == ({}, [])


def test_a_function_named_in_without_belongs_to_the_other_entry(kernel: Kernel) -> None:
    result = settle(kernel, spec(rails(without=["storage"], min=2, max=2), STORAGE))
    assert is_ready(result.conditions)
    assert names(result) == {FIRST: ("rail0", 0), SECOND: ("storage", None), THIRD: ("rail1", 1)}


def test_two_entries_with_each_that_overlap_are_left_alone(kernel: Kernel) -> None:
    other = {"name": "port{index}", "select": {"driver": "igb", "each": True}}
    conditions = nic_conditions(result := settle(kernel, spec(RAILS, other)))
    assert [(c.reason, pf in c.message) for c, pf in zip(conditions, PFS, strict=True)] == [
        ("NicClaimedTwice", True)
    ] * 3
    assert (names(result), kernel.writes) == ({}, [])


def test_a_function_that_hangs_keeps_its_number_and_the_others_are_configured(kernel: Kernel) -> None:
    machine = evolve(kernel.machine(), hung=frozenset({SECOND}))
    (condition,) = nic_conditions(result := settle(machine, spec(RAILS)))
    assert (condition.status, condition.reason) == ("Unknown", "DeviceHung")
    assert f"{SECOND} (NIC rail1)" in condition.message
    assert names(result) == {FIRST: ALL[FIRST], THIRD: ALL[THIRD]}
    assert altnames(kernel) == {FIRST: ("rail0",), SECOND: (), THIRD: ("rail2",)}


def test_a_function_that_cannot_be_read_keeps_its_number(kernel: Kernel) -> None:
    def broken(_: str, where: str) -> None:
        if where == f"/sys/bus/pci/devices/{SECOND}/msi_irqs":
            raise OSError(errno.EIO, "Input/output error", where)

    (condition,) = nic_conditions(result := settle(seen(kernel.machine(), broken), spec(RAILS)))
    assert (condition.status, condition.reason) == ("Unknown", "DeviceUnreadable")
    assert f"{SECOND} (NIC rail1) cannot be read" in condition.message
    assert names(result) == {FIRST: ALL[FIRST], THIRD: ALL[THIRD]}


def test_while_a_match_is_uncertain_no_function_is_numbered(kernel: Kernel) -> None:
    kernel.unreadable.add(f"/sys/bus/pci/devices/{SECOND}/vendor")
    (condition,) = nic_conditions(result := settle(kernel, spec(RAILS)))
    assert (condition.status, condition.reason) == ("Unknown", "DeviceUnreadable")
    assert f"({SECOND}: " in condition.message
    assert (names(result), kernel.writes) == ({}, [])


def test_numbers_do_not_change_while_a_driver_is_away(kernel: Kernel) -> None:
    wanted = spec({**RAILS, "select": {"driver": "igb", "each": True}})
    assert names(settle(kernel, wanted)) == ALL
    kernel.unbind(SECOND)
    kernel.writes.clear()
    (condition,) = nic_conditions(result := settle(kernel, wanted))
    assert (condition.status, condition.reason) == ("Unknown", "NicsUnknown")
    assert f"({SECOND}: no driver)" in condition.message
    assert (names(result), kernel.writes) == ({}, [])
    kernel.bind(SECOND, "ens3", MACS[SECOND])
    assert names(settle(kernel, wanted)) == ALL


def test_with_looser_bounds_names_move_on_when_a_card_goes(kernel: Kernel) -> None:
    now = [0.0]
    memory = Memory(lambda: now[0])
    assert is_ready(converge(kernel.machine(), Goal(spec(RAILS)), memory).conditions)
    kernel.remove_nic(FIRST)
    converge(kernel.machine(), Goal(spec(RAILS)), memory)
    # The kernel refuses a name that another netdev has not given back yet; the next try succeeds.
    now[0] += 60
    assert is_ready(converge(kernel.machine(), Goal(spec(RAILS)), memory).conditions)
    assert [kernel.netdev(address).altnames for address in (SECOND, THIRD)] == [("rail0",), ("rail1",)]


def test_probes_name_each_nic_and_count_all_of_them(kernel: Kernel) -> None:
    kernel.rdma.add(FIRST, "rocep33s0", "ens2")
    wanted = spec({**RAILS, "rdma": {"link_layer": "Ethernet"}}, rdma={"at_least": 2})
    result = settle(kernel, wanted)
    (lacking,) = [c for c in result.conditions if c.type == "RdmaDevices"]
    assert all(each in lacking.message for each in ("1 of 3", "at least 2", "rail1", "rail2"))
    kernel.rdma.add(THIRD, "rocep193s0", "ens1")
    assert is_ready(settle(kernel, wanted).conditions)


def test_a_required_nic_of_each_must_have_its_character_devices(kernel: Kernel) -> None:
    for address, netdev in ((FIRST, "ens2"), (SECOND, "ens3"), (THIRD, "ens1")):
        kernel.rdma.add(address, f"roce_{netdev}", netdev, umad=address != SECOND)
    wanted = spec({**RAILS, "rdma": {}})
    (lacking,) = [c for c in settle(kernel, wanted).conditions if c.type == "RdmaCharDevices"]
    assert lacking.status == "False" and "umad of roce_ens3" in lacking.message
    kernel.tree.remove("/dev/infiniband/rdma_cm")
    (lacking,) = [c for c in settle(kernel, wanted).conditions if c.type == "RdmaCharDevices"]
    assert "rdma_cm" in lacking.message


def test_each_rail_has_the_addresses_of_its_number(kernel: Kernel) -> None:
    addresses = [{"network": "10.{rail}.0.0/16", "gateway": "10.{rail}.255.254"}]
    wanted = {**rails(without=["storage"], min=2, max=2), "rail": 4, "addresses": addresses}
    result = settle(kernel, spec(wanted, STORAGE, node_number=7))
    assert is_ready(result.conditions)
    have = kernel.netlink.addresses()
    assert {address: have.get(kernel.netdev(address).ifindex, ()) for address in PFS} == {
        FIRST: ("10.4.0.7/16",),
        SECOND: (),
        THIRD: ("10.5.0.7/16",),
    }
    assert {address: nic.nic.rail for address, nic in result.want.nics.items()} == {FIRST: 4, SECOND: None, THIRD: 5}
    assert len(kernel.machine().netlink.routes(frozenset({FIRST_TABLE + 4, FIRST_TABLE + 5}))) == 4
    settle(kernel, spec(wanted, STORAGE, node_number=7))
    assert dry_run(kernel.machine(), spec(wanted, STORAGE, node_number=7)).changes == ()


def test_a_domain_of_five_digits_comes_after_those_of_four() -> None:
    pfs = ("e5f2:00:02.0", "10000:01:00.0", "10002:01:00.0")
    kernel = Kernel()
    for index, address in enumerate(pfs):
        kernel.add_nic(address, f"ens{index}", f"02:00:00:00:01:0{index}")
    result = settle(kernel, spec({**RAILS, "vfs": {"count": 2}}))
    assert is_ready(result.conditions)
    assert names(result) == {address: (f"rail{index}", index) for index, address in enumerate(pfs)}
    assert [nic.select.pci for nic in derive_spec(kernel.machine(), "n1", ()).spec.nics] == sorted(pfs)


# --- what is shown -----------------------------------------------------------------------------------------


def test_inspection_says_which_nic_a_function_is(kernel: Kernel) -> None:
    wanted = spec({**RAILS, "select": {**EACH, "without": ["storage"]}, "vfs": {"count": 1}}, STORAGE)
    settle(kernel, wanted)
    shown = inspect(kernel.machine(), wanted)
    assert {f.address: f.nic for f in shown.functions} == {FIRST: "rail0", SECOND: "storage", THIRD: "rail1"}
    assert [vf.nic for f in shown.functions for vf in f.vfs] == ["rail0", "rail1"]
    assert "NIC rail1  driver igb" in render(shown)
    assert {f.nic for f in inspect(kernel.machine()).functions} == {None}


def test_a_running_node_is_written_down_with_its_nics_names(kernel: Kernel) -> None:
    wanted = spec(RAILS)
    settle(kernel, wanted)
    derived = derive_spec(kernel.machine(), "n1", (), wanted)
    assert {nic.select.pci: nic.name for nic in derived.spec.nics} == {FIRST: "rail0", SECOND: "rail1", THIRD: "rail2"}
    assert derived.remaining == ()


def test_a_netdev_with_another_nic_s_name_is_named_by_its_address(kernel: Kernel) -> None:
    derived = derive_spec(kernel.machine(), "n1", (), spec({"name": "ens1", "select": {"pci": FIRST}}))
    assert {nic.select.pci: nic.name for nic in derived.spec.nics} == {
        FIRST: "ens1",
        SECOND: "ens3",
        THIRD: "0000-c1-00.0",
    }


def test_the_example_of_the_docs(kernel: Kernel) -> None:
    page = (Path(__file__).parents[3] / "docs/inventory/nics.md").read_text()
    text = page.partition("## One entry for all NICs of a kind")[2].partition("```python\n")[2].partition("```")[0]
    data: dict[str, Any] = {}
    exec(text, data)  # noqa: S102  our own page
    rail, storage = data["nics"]
    assert rail["name"] == "rail{index}"
    here = {"vendor": "8086", "device": "10c9", "min": 2, "max": 2}
    storage["select"] = {"mac": MACS[FIRST]}
    result = settle(kernel, spec({**rail, "select": {**rail["select"], **here}}, storage))
    assert {name for name, _ in names(result).values()} == {"rail0", "rail1", storage["name"]}
