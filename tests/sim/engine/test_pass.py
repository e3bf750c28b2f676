"""One pass: what it reads and announces to read, how often it tries a change, and the conditions that it gives."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import ROUNDS, Pass, converge, judged
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import HASTENED_RETRY, Failures
from agent.hardware.functions import vf_addresses
from agent.kinds import ordered
from agent.kinds.irqs import PLACED
from agent.report.records import HOST, Change, Condition
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from agent.state.scope import Scope, own
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import applied, condition, settle, spec_of
from tests.sim.seams import seen
from tests.sim.selection.test_selectors import DSN, VPD
from tests.sim.two_nics import PF0, PF1

KINDS = [(kind.NAME, "read") for kind in ordered()]
VFS = {"count": 3, "defaults": {"mtu": 1400}}


def nic(pf: str, **more: object) -> dict[str, object]:
    return {"name": "rail0" if pf == PF0 else "rail1", "select": {"pci": pf}, "mtu": 9000, **more}


BOTH = spec_of(nic(PF0), nic(PF1))


def drift(kernel: Kernel, *functions: str) -> None:
    for function in functions:
        kernel.netlink.set_link(kernel.netdev(function).ifindex, mtu=1500)


def mtus(kernel: Kernel, *functions: str) -> list[int]:
    return [kernel.netdev(function).mtu for function in functions]


def refusing(*pfs: str) -> Callable[[str, str, str], OSError | None]:
    """A fault: the links of these PFs cannot be set."""
    names = {PF0: "enp33s0", PF1: "enp65s0"}

    def fault(operation: str, where: str, value: str) -> OSError | None:
        refused = operation == "set_link" and where in {names[pf] for pf in pfs}
        return OSError(errno.EBUSY, "Device or resource busy") if refused else None

    return fault


# --- What it reads --------------------------------------------------------------------------------------------


def test_a_pass_says_what_it_reads_next(kernel: Kernel) -> None:
    said: list[tuple[str, str]] = []
    doing = Callbacks(doing=lambda what, mode: said.append((what, mode)))
    last = settle(kernel, BOTH, callbacks=doing)
    assert {mode for what, mode in said if what == "links"} == {"read", "write"}
    said.clear()
    settle(kernel, BOTH, last, callbacks=doing)
    assert said == [("devices", "read"), *KINDS, ("probes", "read")]


def test_a_pass_also_says_what_it_reads_of_a_device_that_left(kernel: Kernel, originals: Originals) -> None:
    said: list[tuple[str, str]] = []
    settle(kernel, BOTH, originals=originals)
    doing = Callbacks(doing=lambda what, mode: said.append((what, mode)))
    settle(kernel, spec_of(nic(PF0)), callbacks=doing, originals=originals)
    read = [(what, mode) for what, mode in said if mode != "write" and what != "users"]
    assert read == [("devices", "read"), *KINDS, *KINDS, ("probes", "read")]


def test_after_an_event_of_a_vf_only_that_vf_is_read(kernel: Kernel) -> None:
    wanted = spec_of(nic(PF0, vfs=VFS))
    last = settle(kernel, wanted)
    functions = list(vf_addresses(kernel.files, PF0).values())
    drift(kernel, *functions)
    settle(kernel, wanted, last, frozenset({f"{PF0}#1"}))
    assert mtus(kernel, *functions) == [1500, 1400, 1500]


@pytest.mark.parametrize(
    ("scope", "looked_up"),
    [({PF0}, True), ({own(PF0)}, True), ({own(PF0), f"{PF0}#1", HOST}, True), ({f"{PF0}#1", HOST, own(PF1)}, False)],
)
def test_after_an_event_of_a_pf_its_netdev_is_looked_up(kernel: Kernel, scope: set[str], looked_up: bool) -> None:
    off = {"enable": False}
    wanted = spec_of(nic(PF0), nic(PF1), irqs={"pin": False}, rps=off, xps=off)
    last = settle(kernel, wanted)
    kernel.unbind(PF0)
    kernel.bind(PF0, "enp33s0", "02:00:00:00:09:09")
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=9000, up=True)
    result = settle(kernel, wanted, last, frozenset(scope))
    assert applied(result) == 0, "a second round would look again at what was written"
    links = {function.address: function.link for function in result.have.functions}
    assert links.keys() == {PF0, PF1}
    pf = links[PF0]
    assert pf is not None
    assert (pf.permanent_mac == "02:00:00:00:09:09") is looked_up


@pytest.mark.parametrize(("scope", "seen"), [({own(PF0)}, False), ({own(PF0), PF0}, True), ({PF0}, True)])
def test_another_device_at_an_address_is_seen_after_an_event(kernel: Kernel, scope: set[str], seen: bool) -> None:
    """A netdev's event says nothing of the device, so what its device keeps for life is not read again."""
    last = settle(kernel, BOTH)
    kernel.tree.put(f"/sys/bus/pci/devices/{PF0}/vendor", "0x15b3")
    functions = settle(kernel, BOTH, last, frozenset(scope)).have.functions
    assert ("15b3" in {function.vendor for function in functions}) is seen


def test_a_pf_that_is_gone_when_its_event_is_handled_is_missing(kernel: Kernel) -> None:
    last = settle(kernel, BOTH)
    kernel.remove_nic(PF1)
    result = settle(kernel, BOTH, last, frozenset({own(PF1)}))
    assert [function.address for function in result.have.functions] == [PF0]
    assert [condition.status for condition in result.want.missing] == ["False"]


@pytest.mark.parametrize("named", [PF0, own(PF0), f"{PF0}#1"])
def test_a_device_that_could_not_be_read_is_read_again_after_any_event_of_it(kernel: Kernel, named: str) -> None:
    wanted = spec_of(nic(PF0, vfs=VFS))
    settle(kernel, wanted)
    kernel.unreadable.add(f"/sys/bus/pci/devices/{PF0}/numa_node")
    last = settle(kernel, wanted)
    kernel.unreadable.clear()
    drift(kernel, PF0)
    assert is_ready(settle(kernel, wanted, last, frozenset({named})).conditions)
    assert mtus(kernel, PF0) == [9000]


def test_a_device_that_can_be_read_again_during_a_pass_is_put_right_in_it(kernel: Kernel) -> None:
    settle(kernel, BOTH)
    drift(kernel, PF0, PF1)
    kernel.unreadable.add(f"/sys/bus/pci/devices/{PF0}/numa_node")

    def new_events() -> Scope:
        kernel.unreadable.clear()
        return frozenset({own(PF0)})

    assert is_ready(settle(kernel, BOTH, callbacks=Callbacks(new_events=new_events)).conditions)
    assert mtus(kernel, PF0, PF1) == [9000, 9000]


def test_if_events_are_lost_meanwhile_everything_is_read(kernel: Kernel) -> None:
    last = settle(kernel, BOTH)
    drift(kernel, PF0, PF1)
    settle(kernel, BOTH, last, frozenset({PF0}), Callbacks(new_events=lambda: None))
    assert mtus(kernel, PF0, PF1) == [9000, 9000]


def test_a_nic_is_found_by_its_serial_number_in_each_kind_of_reading(kernel: Kernel) -> None:
    kernel.give_serials(PF0, DSN, VPD)
    wanted = spec_of({**nic(PF0), "select": {"serial": "MT2231X001"}})
    last = settle(kernel, wanted)
    for lost in (False, True):
        drift(kernel, PF0)
        events = Callbacks(new_events=lambda lost=lost: None if lost else frozenset())  # type: ignore[misc]
        last = settle(kernel, wanted, last, frozenset({PF0}), events)
        assert is_ready(last.conditions), last.conditions
        assert mtus(kernel, PF0) == [9000]


def test_a_device_that_left_gets_its_values_back_in_a_full_pass(kernel: Kernel, originals: Originals) -> None:
    left = spec_of(nic(PF0))
    settle(kernel, BOTH, originals=originals)
    kernel.routed.add("enp65s0")
    last = settle(kernel, left, originals=originals)
    kernel.routed.clear()
    last = settle(kernel, left, last, frozenset({PF0, HOST}), originals=originals)
    assert mtus(kernel, PF0, PF1) == [9000, 9000]
    settle(kernel, left, last, originals=originals)
    assert mtus(kernel, PF0, PF1) == [9000, 1500]


# --- How often it tries ---------------------------------------------------------------------------------------


def test_after_the_last_round_what_was_written_counts_as_failed_and_is_tried_again_soon(kernel: Kernel) -> None:
    wanted, written = spec_of(nic(PF0, vfs=VFS)), list[str]()
    last = settle(kernel, wanted)
    functions = list(vf_addresses(kernel.files, PF0).values())
    names = [kernel.netdev(function).name for function in functions]

    def undo(operation: str, where: str, value: str) -> None:
        """Each time the agent sets the MTU of one VF, another program changes the MTU of the next VF."""
        if operation == "set_link" and "mtu=1400" in value:
            written.append(where)
            kernel.fault = no_fault
            drift(kernel, functions[(names.index(where) + 1) % len(functions)])
            kernel.fault = undo

    failures = Failures()
    drift(kernel, functions[0])
    kernel.fault = undo
    events = Callbacks(new_events=lambda: frozenset({PF0}))
    result = settle(kernel, wanted, last, frozenset({PF0}), events, now=100.0, failures=failures)
    assert len(written) == ROUNDS
    assert [outcome.result for outcome in result.outcomes] == ["applied"] * ROUNDS + ["failed"]
    failed = result.outcomes[-1]
    assert condition(result, "Converged").reason == "Failed" and failed.error in condition(result, "Converged").message
    assert failed.error and failed.remedy
    assert failures.next_try() is not None


def test_a_failure_is_forgotten_once_its_change_is_no_longer_planned(kernel: Kernel) -> None:
    failures = Failures()
    kernel.fault = refusing(PF1)
    settle(kernel, BOTH, failures=failures)
    assert failures.next_try() is not None
    settle(kernel, spec_of(nic(PF0)), failures=failures)
    assert failures.next_try() is None


@pytest.mark.parametrize(("driver", "soonest"), [("mlx5_core", 40.0 + HASTENED_RETRY), ("igb", 44.0)])
def test_an_event_has_a_failed_change_tried_again_soon_and_not_at_once_if_it_flaps_no_link(
    kernel: Kernel, driver: str, soonest: float
) -> None:
    """A write that fails may cause an event. If each event caused a write at once, this would never end.

    igb takes the link down for an MTU. If it did so once a second until it has the memory, nobody could use the link.
    """
    kernel.set_driver(PF0, driver)
    settle(kernel, BOTH)
    drift(kernel, PF0)
    kernel.fault = refusing(PF0)
    failures = Failures()
    for now in range(0, 50, 10):
        settle(kernel, BOTH, now=now, failures=failures)
    assert failures.next_try() == 44.0
    failures.hasten(frozenset({PF1}))
    assert failures.next_try() == 44.0
    failures.hasten(frozenset({PF0}))
    assert failures.next_try() == soonest


# --- What it concludes ----------------------------------------------------------------------------------------


def test_converged_is_true_if_the_node_is_as_wanted(kernel: Kernel) -> None:
    result = settle(kernel, BOTH)
    assert (condition(result, "Converged"), result.as_wanted) == (Condition("Converged", "True", "AsWanted"), True)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_the_first_change_that_is_not_made_is_named(kernel: Kernel, required: bool, count: int) -> None:
    pfs = (PF0, PF1)[:count]
    settle(kernel, BOTH)
    drift(kernel, *pfs)
    kernel.fault = refusing(*pfs)
    result = settle(kernel, spec_of(*(nic(pf, required=required) for pf in pfs)))
    failed = [outcome for outcome in result.outcomes if outcome.result == "failed"]
    more = f" (and {len(failed) - 1} more)"
    message = f"{failed[0].change}: {failed[0].error}{more if len(failed) > 1 else ''}"
    wanted = Condition("Converged", "True", "OptionalDiffers", message, remedy=failed[0].remedy)
    said = evolve(condition(result, "Converged"), faults=())
    assert said == (evolve(wanted, status="False", reason="Failed") if required else wanted)
    assert {fault.target for fault in condition(result, "Converged").faults} == {*pfs}
    assert failed[0].remedy and len(failed) == count


@pytest.mark.parametrize("required", [True, False])
def test_an_unreadable_device_makes_unready_only_if_it_is_required(kernel: Kernel, required: bool) -> None:
    """What failed before it could not be read counts no more than that."""
    settle(kernel, BOTH)
    drift(kernel, PF0)
    kernel.fault = refusing(PF0)
    kernel.unreadable.add("/sys/class/net/enp33s0/queues/rx-0/rps_cpus")
    result = settle(kernel, spec_of(nic(PF0, required=required), nic(PF1)))
    assert {o.change.kind for o in result.outcomes if o.change.device == PF0} == {"links", "devices"}
    assert condition(result, "Converged").reason == ("Failed" if required else "OptionalDiffers")
    assert is_ready(result.conditions) is not required


def test_a_required_change_is_named_before_one_that_is_not(kernel: Kernel) -> None:
    settle(kernel, BOTH)
    drift(kernel, PF0, PF1)
    kernel.fault = refusing(PF0, PF1)
    result = settle(kernel, spec_of(nic(PF0, required=False), nic(PF1)))
    assert condition(result, "Converged").reason == "Failed"
    assert PF1 in condition(result, "Converged").message and "more" not in condition(result, "Converged").message


def test_in_observe_mode_no_condition_is_required(kernel: Kernel) -> None:
    result = settle(kernel, spec_of(nic(PF0, vfs=VFS), mode="observe"))
    assert kernel.writes == []
    assert {outcome.result for outcome in result.outcomes} == {"deferred", "blocked"}
    first, *others = result.outcomes
    message = f"{first.change}: {first.error} (and {len(others)} more)"
    said = Condition("Converged", "False", "Observing", message, remedy=first.remedy, severity="warn")
    assert evolve(condition(result, "Converged"), faults=()) == said
    assert first.remedy and is_ready(result.conditions)
    assert {condition.severity for condition in result.conditions} == {"warn"}
    assert {condition.severity for condition in settle(kernel, BOTH).conditions} > {"warn"}


def test_changes_that_are_blocked_only_by_a_newer_spec_wait(kernel: Kernel) -> None:
    old, new = (spec_of(nic(PF0, vfs={"count": count})) for count in (7, 8))
    settle(kernel, old)
    result = settle(kernel, new, verified=old)
    assert {outcome.result for outcome in result.waiting} == {"blocked"}
    assert is_ready(result.conditions) and not result.as_wanted
    assert result.baseline_want.spec == old
    drift(kernel, PF0)
    kernel.fault = refusing(PF0)
    assert not is_ready(settle(kernel, new, verified=old).conditions), "the older spec asks for the MTU, too"


def test_a_change_that_fails_does_not_wait_although_only_a_newer_spec_asks_for_it(kernel: Kernel) -> None:
    settle(kernel, BOTH)
    kernel.fault = refusing(PF0)
    result = settle(kernel, spec_of(nic(PF0, mtu=4000), nic(PF1)), verified=BOTH)
    assert result.waiting == ()
    assert condition(result, "Converged").reason == "Failed"


def test_once_nothing_waits_the_probes_compare_with_the_newer_spec(kernel: Kernel) -> None:
    settle(kernel, BOTH)
    newer = spec_of(nic(PF0))
    result = settle(kernel, newer, verified=BOTH)
    assert (result.waiting, result.baseline_want, result.baseline_have) == ((), result.want, result.have)
    assert result.want.spec == newer


def test_the_caller_decides_how_probes_are_asked(kernel: Kernel) -> None:
    answer = Condition("Asked", "True", "ByTheCaller")
    result = settle(kernel, BOTH, callbacks=Callbacks(judge=lambda want, have: [answer]))
    assert [condition.type for condition in result.conditions] == ["Converged", "Uncontended", "Asked"]


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_judging_a_pass_again_changes_only_the_answers_of_the_probes(kernel: Kernel, tmp_path: Path, mode: str) -> None:
    (tmp_path / ORIGINALS).mkdir()
    originals = Originals.load(tmp_path / ORIGINALS, keep=False)
    old, new = (spec_of(nic(PF0, vfs={"count": count}), mode=mode) for count in (7, 8))
    first = Condition("First", "True", "A")
    result = settle(
        kernel, new, callbacks=Callbacks(judge=lambda want, have: [first]), verified=old, originals=originals
    )
    asked: list[tuple[Wanted, Snapshot]] = []

    def judge(want: Wanted, have: Snapshot) -> list[Condition]:
        asked.append((want, have))
        return [Condition("Second", "False", "B"), Condition("First", "Unknown", "C")]

    again = judged(result, judge)
    assert asked == [(result.baseline_want, result.baseline_have)]
    assert result.baseline_want.spec == old
    engine = ("Converged", "Uncontended", "OriginalsKept")
    assert [(c.type, c.reason) for c in again.conditions[3:]] == [("Second", "B"), ("First", "C")]
    assert again.conditions[:3] == result.conditions[:3]
    assert tuple(condition.type for condition in again.conditions[:3]) == engine
    assert evolve(again, conditions=()) == evolve(result, conditions=())
    assert {condition.severity for condition in again.conditions} == (
        {"warn"} if mode == "observe" else {"required", "warn"}
    )


def placed(kernel: Kernel, *writes: str) -> bool:
    return any(path == PLACED for path, _ in kernel.writes)


def test_the_placement_is_stored_once_the_node_is_as_wanted(kernel: Kernel) -> None:
    kernel.fault = refusing(PF1)
    settle(kernel, BOTH)
    assert not placed(kernel)
    kernel.fault = no_fault
    settle(kernel, BOTH)
    assert placed(kernel)


def test_in_observe_mode_nothing_is_stored(kernel: Kernel) -> None:
    settle(kernel, BOTH)
    kernel.tree.remove(PLACED)
    kernel.writes.clear()
    settle(kernel, spec_of(nic(PF0), nic(PF1), mode="observe"))
    assert kernel.writes == []


# --- VFs that the kernel deletes -------------------------------------------------------------------------------

LOCKED = ("netlink.link", "sriov_numvfs")
"""Reads that may wait until the kernel has deleted all VFs: they take rtnetlink's lock, or the PF's own."""


def calls_until_announced(kernel: Kernel, wanted: NodeSpec, last: Pass, scope: Scope) -> list[str]:
    """What a pass reads before it announces a change, and then the change, if it announces one."""
    calls: list[str] = []
    announced: list[int] = []

    def announce(change: Change) -> None:
        announced.append(len(calls))
        calls.append(str(change))

    machine = seen(kernel.machine(), lambda method, arguments: calls.append(f"{method} {arguments}"))
    converge(machine, Goal(wanted), Memory(lambda: 0.0), last.have, scope, Callbacks(announce=announce))
    return calls[: announced[0] + 1] if announced else calls


def begin_to_delete(kernel: Kernel, indexes: range = range(3)) -> None:
    """sriov_del_vfs: the links to the first VFs are gone; all netdevs and numbers are still there."""
    for index in indexes:
        kernel.tree.unlink(f"/sys/bus/pci/devices/{PF0}/virtfn{index}")


@pytest.mark.parametrize("scope", [None, frozenset({PF0}), frozenset({own(PF0)}), frozenset({f"{PF0}#0"})])
@pytest.mark.parametrize(("lost", "left"), [(range(1), 2), (range(3), 0), ("PF", 0)], ids=str)
def test_that_vfs_are_gone_is_announced_before_a_lock_is_waited_for(
    kernel: Kernel, scope: Scope, lost: range | str, left: int
) -> None:
    wanted = spec_of(nic(PF0, vfs=VFS), nic(PF1))
    last = settle(kernel, wanted, settle(kernel, wanted))
    if isinstance(lost, range):
        begin_to_delete(kernel, lost)
    else:
        kernel.remove_nic(PF0)
    *before, change = calls_until_announced(kernel, wanted, last, scope)
    assert change == f"vfs {PF0} count: {left} -> 3"
    assert not [call for call in before if any(word in call for word in LOCKED)]


@pytest.mark.parametrize(
    ("more", "of_nic"), [({"mode": "observe"}, {}), ({}, {"required": False}), ({}, {"vfs": {"count": 0}})]
)
def test_vfs_that_are_not_required_may_go_without_an_announcement(
    kernel: Kernel, more: dict[str, object], of_nic: dict[str, object]
) -> None:
    wanted = spec_of(nic(PF0, vfs=VFS), nic(PF1))
    last = settle(kernel, wanted, settle(kernel, wanted))
    begin_to_delete(kernel)
    calls = calls_until_announced(kernel, spec_of(nic(PF0, **({"vfs": VFS} | of_nic)), nic(PF1), **more), last, None)
    assert not any(call.startswith(f"vfs {PF0} count: 0") for call in calls)


def test_vfs_that_wait_to_be_made_are_not_announced_as_lost(kernel: Kernel) -> None:
    settle(kernel, spec_of(nic(PF0, vfs=VFS)))
    kernel.routed.add("enp33s0")
    wanted = spec_of(nic(PF0, vfs={**VFS, "count": 5}))
    last = settle(kernel, wanted)
    assert condition(last, "Converged").reason == "Deferred"
    assert not any(call.startswith(f"vfs {PF0}") for call in calls_until_announced(kernel, wanted, last, None))
