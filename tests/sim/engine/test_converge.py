"""Whole passes on the simulated kernel: what they change, what they leave alone, and what they report."""

import errno
import os
from functools import partial

import pytest

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import converge
from agent.engine.dry_run import dry_run
from agent.engine.retry import LAST_RETRY, Failures
from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from agent.state.wanted import derived_mac
from tests.sim.engine.passes import spec
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import rail0, settle, spec_of
from tests.sim.refusing import refusing
from tests.sim.two_nics import MAC0, PF0


def test_one_pass_makes_a_fresh_machine_match_the_spec(kernel: Kernel) -> None:
    result = settle(kernel, spec())
    assert is_ready(result.conditions), result.conditions
    pf = kernel.netlink.link("enp33s0")
    assert pf is not None
    assert (pf.mtu, pf.up, len(pf.vfs)) == (9000, True, 7)
    assert [vf.mac for vf in pf.vfs] == [derived_mac(MAC0, index) for index in range(7)]
    assert all(vf.trust for vf in pf.vfs)
    assert [vf.vlan for vf in pf.vfs] == [0, 0, 100, 0, 0, 0, 0]
    for index, address in vf_addresses(kernel.files, PF0).items():
        link = kernel.netdev(address)
        assert (link.mac, link.mtu, link.up) == (derived_mac(MAC0, index), 9000, True)
    assert not dry_run(kernel.machine(), spec()).changes


def test_the_last_round_leaves_its_events_to_the_next_pass(kernel: Kernel) -> None:
    """A pass that took an event without reading the device again would lose it."""
    wanted = rail0(vfs={"count": 7, "defaults": {"vlan": 9}})
    settle(kernel, wanted)
    pf = kernel.netdev(PF0).ifindex
    events: set[str] = set()

    def set_other_vlan(index: int) -> None:
        kernel.fault = no_fault
        kernel.netlink.set_vf(pf, index, vlan=77)
        events.add(f"{PF0}#{index}")
        kernel.fault = drift

    def drift(operation: str, where: str, value: str) -> OSError | None:
        if operation == "set_vf":
            set_other_vlan((int(value.split()[0]) + 1) % 7)
        return None

    def new_events() -> frozenset[str]:
        named = frozenset(events)
        events.clear()
        return named

    set_other_vlan(0)
    settle(kernel, wanted, callbacks=Callbacks(new_events=new_events))
    (drifted,) = [index for index, vf in enumerate(kernel.vfs(PF0)) if vf.vlan == 77]
    assert f"{PF0}#{drifted}" in events


def test_a_dry_run_writes_nothing_and_names_changes_that_depend_on_others(kernel: Kernel) -> None:
    planned = dry_run(kernel.machine(), spec())
    assert kernel.writes == []
    assert not planned.errors
    assert ("vfs", PF0, 0, 7) in [(c.kind, c.target, c.before, c.after) for c in planned.changes]
    assert ("irqs", PF0, "known after vfs") in [(c.kind, c.target, c.after) for c in planned.changes]


def test_a_change_that_the_driver_refuses_is_unsupported_and_not_tried_again_at_once(kernel: Kernel) -> None:
    kernel.fault = refusing(errno.EOPNOTSUPP, "set_vf", "'trust': True")
    failures = Failures()
    result = settle(kernel, spec(), failures=failures)
    assert {o.result for o in result.outcomes if o.change.field == "trust"} == {"unsupported"}
    assert failures.next_try() == LAST_RETRY
    assert not is_ready(result.conditions)
    kernel.writes.clear()
    settle(kernel, spec(), result, failures=failures)
    assert not kernel.writes


@pytest.mark.parametrize("slow", [True, False], ids=["no-carrier", "carrier-for-a-second"])
def test_a_vf_that_does_not_keep_its_carrier_is_set_down_less_and_less_often(kernel: Kernel, slow: bool) -> None:
    failures = Failures()
    result = settle(kernel, spec(), failures=failures)
    vf = vf_addresses(kernel.files, PF0)[3]
    now, flaps = 0.0, []
    memory = Memory(lambda: now, failures)
    for second in range(600):
        now = 100.0 + second
        kernel.carriers.lose(vf, slow)
        kernel.writes.clear()
        failures.hasten(None)
        converge(kernel.machine(), Goal(spec()), memory, result.have, frozenset({PF0}))
        flaps += [second] * sum("up=False" in value for _, value in kernel.writes)
    # It never counts as undone by another program, which would end the tries for an hour.
    quick = range(10, 49, 2) if slow else range(8, 63, 3)
    assert flaps == [5, *quick, *([53, 63, 83, 123, 203, 363] if slow else [68, 79, 100, 141, 222, 383])]
    kernel.carriers.regain(vf)
    assert is_ready(settle(kernel, spec(), result, failures=failures).conditions)


def test_a_vf_that_a_pod_returns_during_a_pass_gets_its_values_back_in_that_pass(kernel: Kernel) -> None:
    settle(kernel, spec())
    vf = vf_addresses(kernel.files, PF0)[2]
    name, pf = kernel.netdev(vf).name, kernel.netdev(PF0)
    kernel.move_away(vf)
    kernel.netlink.set_vf(pf.ifindex, 2, vlan=200)
    # Something to repair: the pass reads again after it.
    kernel.netlink.set_vf(pf.ifindex, 0, trust=False)

    def new_events() -> frozenset[str]:
        if not kernel.has_netdev(vf):
            kernel.come_back(vf, name)
        return frozenset({PF0})

    # The clock stands still: no time has passed since the pass has looked for owners.
    result = settle(kernel, spec(), callbacks=Callbacks(new_events=new_events))
    assert kernel.vfs(PF0)[2].vlan == 100
    assert kernel.netdev(vf).up
    assert result.as_wanted


def test_a_vf_in_use_is_not_set_down_even_without_carrier(kernel: Kernel) -> None:
    failures = Failures()
    result = settle(kernel, spec(), failures=failures)
    vf = vf_addresses(kernel.files, PF0)[3]
    kernel.routed.add(kernel.netdev(vf).name)
    kernel.carriers.lose(vf)
    kernel.writes.clear()
    for now in (100.0, 200.0):
        outcomes = settle(kernel, spec(), result, now=now, failures=failures).outcomes
    assert [o.result for o in outcomes] == ["deferred"]
    assert kernel.writes == []


def test_a_difference_is_announced_before_the_first_write(kernel: Kernel) -> None:
    result = settle(kernel, spec())
    kernel.files.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "0")
    kernel.writes.clear()
    written_before: list[int] = []
    settle(
        kernel,
        spec(),
        result,
        frozenset({PF0}),
        Callbacks(announce=lambda change: written_before.append(len(kernel.writes))),
    )
    assert written_before == [0]


def test_the_old_vfs_are_restored_if_the_new_number_cannot_be_created(kernel: Kernel) -> None:
    result = settle(kernel, spec())
    kernel.fault = refusing(errno.ENOSPC, "sriov_numvfs 5")
    result = settle(kernel, spec(5), result)
    (failed,) = [o for o in result.outcomes if o.result == "failed"]
    assert "out of MSI-X vectors" in failed.error
    assert kernel.files.read(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs") == "7"


def test_a_driver_that_makes_fewer_vfs_is_named_and_asked_once(kernel: Kernel) -> None:
    """As bnxt does for lack of rings (bnxt_sriov_enable): the kernel takes fewer for a success (sriov_numvfs_store)."""
    kernel.sriov.room[PF0] = 3
    result = settle(kernel, spec(5))
    (failed,) = [outcome for outcome in result.outcomes if outcome.result == "failed"]
    assert failed.error.startswith("the driver has made 3 of 5 VFs: ")
    path = f"/sys/bus/pci/devices/{PF0}/sriov_numvfs"
    assert [text for where, text in kernel.writes if where == path] == ["5"]
    assert len(kernel.vfs(PF0)) == 3


def test_a_driver_that_makes_no_vf_need_not_lack_room(kernel: Kernel) -> None:
    """bnxt_sriov_configure returns 0 while the PF is down or its firmware is being reset."""
    kernel.sriov.room[PF0] = 0
    (failed,) = [outcome for outcome in settle(kernel, spec(5)).outcomes if outcome.result == "failed"]
    assert failed.error.startswith("there are 0 VFs, not 5, ")


def test_the_vfs_of_before_are_made_again_if_the_driver_makes_none_and_says_nothing(kernel: Kernel) -> None:
    """bnxt_sriov_configure returns the number that was asked for, also if bnxt_sriov_enable has failed."""
    settle(kernel, spec(3))
    kernel.sriov.room[PF0] = 0
    kernel.writes.clear()
    settle(kernel, spec(5))
    path = f"/sys/bus/pci/devices/{PF0}/sriov_numvfs"
    assert [text for where, text in kernel.writes if where == path] == ["0", "5", "3"]


def test_a_driver_that_makes_fewer_vfs_is_not_soon_asked_again(kernel: Kernel) -> None:
    """Each further try resets the VFs that there are. So an event does not hasten it."""
    kernel.sriov.room[PF0] = 3
    failures = Failures()
    path = f"/sys/bus/pci/devices/{PF0}/sriov_numvfs"
    for now, written in ((0.0, ["5"]), (0.25, []), (59.0, []), (60.0, ["0", "5"]), (179.0, [])):
        kernel.writes.clear()
        failures.hasten(frozenset({PF0}))
        converge(kernel.machine(), Goal(spec(5)), Memory(partial(float, now), failures))
        assert [text for where, text in kernel.writes if where == path] == written
    assert failures.next_try() == 60.0 + 120.0


def test_a_change_that_failed_and_is_deferred_since_is_no_reason_for_another_pass(kernel: Kernel) -> None:
    """The end of its wait would be in the past for as long as it is deferred, and one pass would follow the other."""
    kernel.sriov.room[PF0] = 3
    failures = Failures()
    for now in (0.0, 1.0):
        converge(kernel.machine(), Goal(spec(5)), Memory(partial(float, now), failures))
    assert failures.next_try() == 60.0
    kernel.routed.add(kernel.netdev(PF0).name)
    result = settle(kernel, spec(5), now=61.0, failures=failures)
    assert [outcome.result for outcome in result.outcomes if outcome.change.kind == "vfs"] == ["deferred"]
    assert failures.next_try() is None
    kernel.routed.clear()
    settle(kernel, spec(5), now=70.0, failures=failures)
    assert failures.next_try() == 70.0 + 120.0


def test_a_change_that_mode_observe_defers_after_its_grace_period_is_no_reason_for_another_pass(kernel: Kernel) -> None:
    wanted = spec_of(mode="observe", sysctls={"net.core.nothing": "1"})
    failures = Failures()
    results = []
    for now in (0.0, 60.0):
        result = converge(kernel.machine(), Goal(wanted), Memory(partial(float, now), failures))
        results += [outcome.result for outcome in result.outcomes]
    assert results == ["blocked", "deferred"]
    assert failures.next_try() is None


def test_if_the_vfs_before_cannot_be_made_again_either_the_message_says_both(kernel: Kernel) -> None:
    result = settle(kernel, spec())

    def no_vfs(operation: str, where: str, value: str) -> OSError | None:
        number = errno.ENOSPC if value == "5" else errno.ENOMEM
        return OSError(number, os.strerror(number)) if where.endswith("sriov_numvfs") and value != "0" else None

    kernel.fault = no_vfs
    (failed,) = [outcome for outcome in settle(kernel, spec(5), result).outcomes if outcome.result == "failed"]
    assert "out of MSI-X vectors" in failed.error
    assert failed.error.endswith(" cannot be made again (Cannot allocate memory)")


def test_the_interrupts_of_a_function_without_a_netdev_are_pinned(kernel: Kernel) -> None:
    kernel.add_erdma("0000:61:00.0", node=1)
    wanted = spec_of({"name": "erdma0", "select": {"vendor": "1ded", "device": "107f"}})
    assert is_ready(settle(kernel, wanted).conditions)
    assert kernel.files.read("/proc/irq/90/smp_affinity_list") == "2-3"
    assert kernel.files.read("/proc/irq/91/smp_affinity_list") == "2"


def test_devices_named_by_events_between_two_rounds_are_read_in_the_second(kernel: Kernel) -> None:
    """A pass receives each event once, so it must read the device again after the event."""
    settled = settle(kernel, spec())
    vf = vf_addresses(kernel.files, PF0)[3]
    kernel.netlink.set_vf(kernel.netdev(PF0).ifindex, 3, trust=False)
    events = [frozenset({f"{PF0}#3"}), frozenset[str]()]

    def new_events() -> frozenset[str]:
        if len(events) == 2:
            kernel.netlink.set_link(kernel.netdev(vf).ifindex, mtu=1500)
        return events.pop(0) if events else frozenset()

    result = settle(kernel, spec(), settled, frozenset({PF0}), Callbacks(new_events=new_events))
    assert is_ready(result.conditions)
    assert kernel.netdev(vf).mtu == 9000
