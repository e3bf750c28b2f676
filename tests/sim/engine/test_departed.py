"""A NIC that left the spec gets its values back, unless it may be a NIC of the spec that is missing."""

import errno
from functools import partial
from typing import Any

import pytest
from attrs import evolve

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.hardware.config_space import device_control, max_read_request
from agent.machine import Machine
from agent.report.records import Condition
from agent.report.verdict import is_ready
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import settle, spec_of
from tests.sim.refusing import refusing
from tests.sim.seams import seen
from tests.sim.selection.test_selectors import DSN, VPD
from tests.sim.two_nics import MAC0, MAC1, NAME0, NAME1, PF0, PF1


def follow(
    kernel: Kernel, originals: Originals, *nics: dict[str, Any], passes: int = 3, machine: Machine | None = None
) -> Pass:
    spec, failures = spec_of(*nics), Failures()
    for number in range(passes):
        memory = Memory(partial(float, 1000 * number), failures, originals)
        result = converge(machine or kernel.machine(), Goal(spec), memory)
    return result


def nic(name: str, select: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "select": select, **more}


A, B = nic("a", {"pci": PF0}, mtu=9000, altnames=["storage"]), nic("b", {"pci": PF1})


def waits(result: Pass) -> Condition | None:
    """The condition about values that are not restored yet."""
    return next((c for c in result.conditions if (c.type, c.reason) == ("OriginalsKept", "NicMissing")), None)


OTHERS = [
    {"pci": "0000:99:00.0"},
    {"mac": "02:00:00:00:77:77"},
    {"vendor": "15b3", "device": "101e"},
    {"netdev": NAME0, "pci": "0000:99:00.0"},
    {"serial": "00-11-22-33-44-55-66-77"},
    {"vendor": "15b3", "each": True},
]


@pytest.mark.parametrize("select", OTHERS, ids=str)
@pytest.mark.parametrize("required", [False, True])
def test_a_nic_that_left_the_spec_is_restored_though_another_one_is_missing(
    kernel: Kernel, originals: Originals, select: dict[str, Any], required: bool
) -> None:
    kernel.give_serials(PF0, DSN, VPD)
    name = "other-{index}" if "each" in select else "other"
    other = nic(name, select, required=required)
    follow(kernel, originals, A, B)
    assert kernel.netdev(PF0).mtu == 9000
    result = follow(kernel, originals, B, other)
    assert (kernel.netdev(PF0).mtu, kernel.netdev(PF0).altnames) == (1500, ())
    assert waits(result) is None


UNDECIDED = [
    {"netdev": "eth7"},
    {"driver": "ice"},
    {"vendor": "8086", "driver": "ice"},
    {"vendor": "8086", "netdev": "eth7"},
]


@pytest.mark.parametrize("select", UNDECIDED, ids=str)
def test_a_device_that_may_be_the_missing_nic_is_left_alone_and_that_is_said(
    kernel: Kernel, originals: Originals, select: dict[str, Any]
) -> None:
    follow(kernel, originals, A, B)
    result = follow(kernel, originals, B, nic("other", select, required=False))
    assert kernel.netdev(PF0).mtu == 9000
    condition = waits(result)
    assert condition is not None
    assert (condition.status, condition.severity) == ("False", "warn")
    assert f"{PF0} may be NIC other" in condition.message
    assert is_ready(result.conditions)
    result = follow(kernel, originals, B)
    assert (kernel.netdev(PF0).mtu, waits(result)) == (1500, None)


@pytest.mark.parametrize("select", UNDECIDED, ids=str)
def test_an_entry_that_was_missing_beside_a_nic_is_not_that_nic(
    kernel: Kernel, originals: Originals, select: dict[str, Any]
) -> None:
    other = nic("other", select, required=False)
    follow(kernel, originals, A, B, other)
    result = follow(kernel, originals, B, other)
    assert (kernel.netdev(PF0).mtu, waits(result)) == (1500, None)


def test_too_few_nics_of_an_entry_are_no_nics_that_left(kernel: Kernel, originals: Originals) -> None:
    entry = nic("rail{index}", {"driver": "igb", "each": True, "min": 2}, mtu=9000)
    follow(kernel, originals, entry)
    kernel.remove_nic(PF1)
    result = follow(kernel, originals, entry)
    assert kernel.netdev(PF0).mtu == 9000
    assert waits(result) is not None


def test_a_nic_without_a_netdev_may_have_the_missing_mac(kernel: Kernel, originals: Originals) -> None:
    by_mac = nic("m", {"mac": MAC0}, max_read_request=4096)
    follow(kernel, originals, by_mac)
    kernel.lose_netdev(PF0)
    result = follow(kernel, originals, by_mac)
    assert max_read_request((device_control(kernel.files, PF0) or (0, 0))[1]) == 4096
    assert waits(result) is not None


def test_a_nic_whose_vf_would_have_another_s_address_has_not_left(kernel: Kernel, originals: Originals) -> None:
    follow(kernel, originals, A, B)
    vfs = {"count": 1, "groups": [{"index": "0", "mac": MAC1}]}
    result = follow(kernel, originals, {**A, "vfs": vfs}, B)
    assert any(c.reason == "AddressGivenTwice" for c in result.conditions)
    assert kernel.netdev(PF0).mtu == 9000


def test_passes_for_events_do_not_hasten_a_restoring_that_is_refused(kernel: Kernel, originals: Originals) -> None:
    follow(kernel, originals, A, B)
    kernel.fault = refusing(errno.EINVAL, "mtu=1500")
    goal, failures = Goal(spec_of(B)), Failures()
    last: Pass | None = None
    kernel.writes.clear()
    for second in range(100):
        memory = Memory(partial(float, second), failures, originals)
        scope = frozenset({PF1}) if last is not None and second % 2 else None
        last = converge(kernel.machine(), goal, memory, last.have if last else None, scope)
    assert 5 <= sum("mtu=1500" in value for _, value in kernel.writes) <= 9


def test_a_pf_that_left_goes_down_after_its_other_values_are_restored(kernel: Kernel, originals: Originals) -> None:
    """Without a link a driver may refuse them."""
    follow(kernel, originals, A, B)
    kernel.fault = refusing(errno.EINVAL, "mtu=1500")
    follow(kernel, originals, B)
    assert (kernel.netdev(PF0).mtu, kernel.netdev(PF0).up) == (9000, True)
    kernel.fault = no_fault
    follow(kernel, originals, B)
    assert (kernel.netdev(PF0).mtu, kernel.netdev(PF0).up) == (1500, False)


@pytest.mark.parametrize("missing", [None, {"netdev": "eth7"}], ids=["nothing missing", "undecided"])
def test_an_alternative_name_moves_from_a_nic_that_left_in_one_pass(
    kernel: Kernel, originals: Originals, missing: dict[str, Any] | None
) -> None:
    follow(kernel, originals, A, B)
    others = [nic("other", missing, required=False)] if missing else []
    result = follow(kernel, originals, {**B, "altnames": ["storage"]}, *others, passes=1)
    assert is_ready(result.conditions), result.conditions
    assert (kernel.netdev(PF0).altnames, kernel.netdev(PF1).altnames) == ((), ("storage",))


def test_a_name_that_another_program_gave_stays_and_its_netdev_is_named(kernel: Kernel, originals: Originals) -> None:
    kernel.netlink.add_altname(kernel.netdev(PF0).ifindex, "storage")
    result = follow(kernel, originals, {**B, "altnames": ["storage"]})
    (failed,) = [outcome for outcome in result.outcomes if outcome.result == "failed"]
    remedy = f"ip link property del dev {NAME0} altname storage"
    assert failed.error.startswith(f"{NAME0} has it, too") and failed.error.endswith(remedy)
    result = follow(kernel, originals, {**B, "altnames": [NAME0]})
    assert [o.error for o in result.outcomes] == [f"another netdev is called {NAME0}; give another altname"]
    assert kernel.netdev(PF1).name == NAME1


def untouchable(kernel: Kernel, what: str) -> Machine:
    """A machine whose PF0 hangs or cannot be read."""
    if what == "hung":
        return evolve(kernel.machine(), hung=frozenset({PF0}))
    kernel.unreadable.add(f"/sys/bus/pci/devices/{PF0}/vendor")
    return kernel.machine()


@pytest.mark.parametrize("what", ["hung", "unreadable"])
@pytest.mark.parametrize("later", [[B], [nic("a", {"pci": PF0}), B]], ids=["left the spec", "without its settings"])
def test_of_a_device_that_must_not_be_touched_nothing_is_read_to_restore_its_values(
    kernel: Kernel, originals: Originals, what: str, later: list[dict[str, Any]]
) -> None:
    follow(kernel, originals, {**A, "max_read_request": 4096, "rings": {"rx": 1024}}, B)
    machine = untouchable(kernel, what)

    def reads(known: Originals) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []
        follow(kernel, known, *later, machine=seen(machine, lambda *call: calls.append(call)))
        # The driver answers a request for one link.
        assert what != "hung" or ("netlink.link", NAME0) not in calls
        return calls

    kernel.writes.clear()
    assert reads(originals) == reads(Originals())
    assert kernel.netdev(PF0).mtu == 9000
    assert kernel.writes == []


def test_what_was_kept_is_not_lost_while_a_kind_cannot_be_read(kernel: Kernel, originals: Originals) -> None:
    entries, flows = "/proc/sys/net/core/rps_sock_flow_entries", f"/sys/class/net/{NAME0}/queues/rx-0/rps_flow_cnt"

    def pass_with(nics: list[dict[str, Any]], rfs: bool) -> None:
        spec = spec_of(*nics, rfs={"enable": rfs})
        settle(kernel, spec, originals=originals)

    pass_with([A, B], rfs=True)
    assert kernel.tree.read(flows) != "0"
    kernel.unreadable.add(entries)
    pass_with([B], rfs=False)
    kernel.unreadable.clear()
    pass_with([B], rfs=False)
    assert (kernel.tree.read(flows), kernel.tree.read(entries)) == ("0", "0")


@pytest.mark.parametrize("what", ["hung", "unreadable"])
def test_no_name_is_taken_from_a_device_that_is_not_touched(kernel: Kernel, originals: Originals, what: str) -> None:
    follow(kernel, originals, A, B)
    machine = untouchable(kernel, what)
    kernel.writes.clear()
    result = follow(kernel, originals, {**B, "altnames": ["storage"]}, machine=machine)
    assert [where for where, _ in kernel.writes if where == NAME0] == []
    assert [o.change.target for o in result.outcomes if o.result == "failed"] == [PF1]
