"""The engine on the simulated kernel: what it reaches, what it leaves alone, what it says."""

import errno
import os

import pytest

from agent.engine.converge import Pass, converge
from agent.engine.dry_run import preview
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.machine import Machine
from agent.report.records import Disruption, is_ready
from agent.spec.node import NodeSpec, from_mapping
from agent.state.wanted import derived_mac
from tests.sim.kernel import Kernel, no_fault

PF0, PF1 = "0000:21:00.0", "0000:41:00.0"
MAC0, MAC1 = "02:00:00:00:01:00", "02:00:00:00:01:01"


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_nic(PF0, "enp33s0", MAC0, node=0)
    kernel.add_nic(PF1, "enp65s0", MAC1, node=1)
    return kernel


def spec(count: int = 7, **more: object) -> NodeSpec:
    vfs = {"count": count, "defaults": {"trust": True}, "groups": [{"index": "2", "vlan": 100, "spoofchk": False}]}
    nics = [
        {"name": "rail0", "select": {"mac": MAC0}, "mtu": 9000, "vfs": vfs},
        {"name": "rail1", "select": {"pci": PF1}, "vfs": {"count": 2}},
    ]
    return from_mapping({"node_name": "n1", "nics": nics, **more})


def settle(machine: Machine, wanted: NodeSpec, last: Pass | None = None, failures: Failures | None = None) -> Pass:
    return converge(machine, wanted, last.have if last else None, None, failures or Failures(), lambda: 0.0)


def test_a_fresh_machine_becomes_what_the_spec_says_in_one_pass(kernel: Kernel) -> None:
    found = settle(kernel.machine(), spec())
    assert is_ready(found.conditions), found.conditions
    pf = kernel.link("enp33s0")
    assert pf is not None
    assert (pf.mtu, pf.up, len(pf.vfs)) == (9000, True, 7)
    assert [vf.mac for vf in pf.vfs] == [derived_mac(MAC0, index) for index in range(7)]
    assert all(vf.trust for vf in pf.vfs)
    assert [vf.vlan for vf in pf.vfs] == [0, 0, 100, 0, 0, 0, 0]
    for index, address in vf_addresses(kernel, PF0).items():
        link = kernel.netdev(address)
        assert (link.mac, link.mtu, link.up) == (derived_mac(MAC0, index), 9000, True)
    assert not preview(kernel.machine(), spec()).changes


def test_a_second_pass_writes_nothing(kernel: Kernel) -> None:
    found = settle(kernel.machine(), spec())
    kernel.writes.clear()
    again = settle(kernel.machine(), spec(), found)
    assert kernel.writes == []
    assert again.outcomes == ()


def test_what_is_not_read_again_is_not_called_true(kernel: Kernel) -> None:
    """Whatever is put right, somebody breaks the next one: a pass is bounded, and its last write is unverified."""
    wanted = from_mapping(
        {
            "node_name": "n1",
            "nics": [{"name": "a", "select": {"pci": PF0}, "vfs": {"count": 7, "defaults": {"vlan": 9}}}],
        }
    )
    settle(kernel.machine(), wanted)
    pf = kernel.netdev(PF0).ifindex
    kernel.set_vf(pf, 0, vlan=77)

    def meddle(operation: str, where: str, value: str) -> OSError | None:
        if operation == "set_vf":
            kernel.fault = no_fault
            kernel.set_vf(pf, (int(value.split()[0]) + 1) % 7, vlan=77)
            kernel.fault = meddle
        return None

    kernel.fault = meddle
    found = settle(kernel.machine(), wanted)
    assert [vf.vlan for vf in kernel.vfs(PF0)].count(77) == 1
    assert not is_ready(found.conditions)
    kernel.fault = no_fault
    assert is_ready(settle(kernel.machine(), wanted).conditions)


def test_queues_are_pinned_to_the_nic_s_node_and_spread(kernel: Kernel) -> None:
    settle(kernel.machine(), spec())
    for pf, cpus in ((PF0, {"0", "1"}), (PF1, {"2", "3"})):
        taken = [
            kernel.read(f"/proc/irq/{number}/smp_affinity_list")
            for address in [pf, *vf_addresses(kernel, pf).values()]
            for number in kernel.names(f"/sys/bus/pci/devices/{address}/msi_irqs")
            if "-" in kernel.read(f"/sys/kernel/irq/{number}/actions")
        ]
        assert set(taken) == cpus
        assert abs(taken.count(min(cpus)) - taken.count(max(cpus))) <= 2


def test_a_preview_touches_nothing_and_says_what_comes_later(kernel: Kernel) -> None:
    planned = preview(kernel.machine(), spec())
    assert kernel.writes == []
    assert not planned.errors
    assert ("vfs", PF0, 0, 7) in [(c.kind, c.target, c.before, c.after) for c in planned.changes]
    assert ("irqs", PF0, "known after vfs") in [(c.kind, c.target, c.after) for c in planned.changes]


def test_deleted_vfs_come_back_as_they_were(kernel: Kernel) -> None:
    found = settle(kernel.machine(), spec())
    before = kernel.link("enp33s0")
    kernel.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "0")
    found = converge(kernel.machine(), spec(), found.have, frozenset({PF0}), Failures(), lambda: 0.0)
    assert is_ready(found.conditions)
    assert kernel.link("enp33s0") == before


@pytest.mark.parametrize("happening", ["reload", "remove"])
def test_a_nic_that_comes_back_is_made_whole(kernel: Kernel, happening: str) -> None:
    found = settle(kernel.machine(), spec())
    if happening == "reload":
        kernel.reload_driver(PF0)
    else:
        kernel.remove_nic(PF0)
        found = settle(kernel.machine(), spec(), found)
        missing = [c for c in found.conditions if c.type == "NicsPresent"]
        assert [(c.status, c.reason) for c in missing] == [("False", "NicMissing")]
        assert "rail0" in missing[0].message
        kernel.add_nic(PF0, "enp33s0", MAC0, node=0)
    found = settle(kernel.machine(), spec(), found)
    assert is_ready(found.conditions)
    assert not preview(kernel.machine(), spec()).changes


def test_a_pf_that_udev_is_not_through_with_gets_no_vfs_yet(kernel: Kernel) -> None:
    kernel.udev_lags(PF0)
    found = settle(kernel.machine(), spec())
    assert not is_ready(found.conditions)
    assert kernel.read(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs") == "0"
    kernel.udev_catches_up(PF0)
    found = converge(kernel.machine(), spec(), found.have, frozenset({PF0}), Failures(), lambda: 0.0)
    assert is_ready(found.conditions)


def test_a_netdev_that_comes_after_its_function_still_gives_the_vfs_their_addresses(kernel: Kernel) -> None:
    kernel.unbind(PF1)
    found = settle(kernel.machine(), spec())
    assert not is_ready(found.conditions)
    kernel.bind(PF1, "enp65s0", MAC1)
    found = converge(kernel.machine(), spec(), found.have, frozenset({PF1}), Failures(), lambda: 0.0)
    assert is_ready(found.conditions)
    told = kernel.link("enp65s0")
    assert told is not None
    assert [vf.mac for vf in told.vfs] == [derived_mac(MAC1, index) for index in range(2)]


def only(vfs: object = None) -> NodeSpec:
    nic = {"name": "rail0", "select": {"pci": PF0}, **({"vfs": vfs} if vfs else {})}
    return from_mapping({"node_name": "n1", "nics": [nic]})


def test_a_pf_whose_driver_made_no_netdev_is_not_ready(kernel: Kernel) -> None:
    """A firmware that died, a driver that gave up: it stays bound, and no network namespace has the netdev."""
    settle(kernel.machine(), only())
    kernel.lose_netdev(PF0)
    found = settle(kernel.machine(), only())
    assert not is_ready(found.conditions)
    (blocked,) = found.outcomes
    assert (blocked.change.kind, blocked.change.target, blocked.result) == ("links", PF0, "blocked")
    assert "its netdev is not there (driver: igb)" in blocked.error


def test_a_pf_that_a_container_has_is_as_it_should_be_unless_vfs_are_lacking(kernel: Kernel) -> None:
    settle(kernel.machine(), only())
    kernel.move_away(PF0)
    assert is_ready(settle(kernel.machine(), only()).conditions)
    found = settle(kernel.machine(), only({"count": 3}))
    assert not is_ready(found.conditions)
    (blocked,) = found.outcomes
    assert "the PF has no netdev here" in blocked.error


def test_infiniband_needs_a_netdev_for_its_vfs_alone(kernel: Kernel) -> None:
    kernel.lose_netdev(PF0)
    kernel.rdma.add(PF0, "ibp33s0", None, link_layer="InfiniBand")
    assert is_ready(settle(kernel.machine(), only()).conditions)
    found = settle(kernel.machine(), only({"count": 4}))
    assert not is_ready(found.conditions)
    assert "load ib_ipoib" in found.conditions[0].message


@pytest.mark.parametrize(
    "path",
    [
        f"/sys/bus/pci/devices/{PF0}/numa_node",
        f"/sys/bus/pci/devices/{PF0}/sriov_totalvfs",
        "/sys/class/net/enp33s0/queues/rx-0/rps_cpus",
        "/sys/devices/system/cpu/cpu0/topology/core_cpus_list",
        "/sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list",
    ],
)
def test_a_file_with_nothing_in_it_is_as_good_as_none(kernel: Kernel, path: str) -> None:
    kernel.tree.put(path, "")
    assert is_ready(settle(kernel.machine(), only()).conditions)


@pytest.mark.parametrize(
    "path",
    [
        "/sys/devices/system/cpu/online",
        "/sys/devices/system/cpu/isolated",
        "/sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list",
        "/sys/devices/system/node/node0/cpulist",
        "/sys/devices/system/node/node0/distance",
    ],
)
def test_a_file_with_something_else_than_belongs_there_is_an_error_that_names_it(kernel: Kernel, path: str) -> None:
    kernel.tree.put(path, "N/A")
    with pytest.raises(OSError, match=r"'N/A' is nothing that belongs there") as refused:
        settle(kernel.machine(), only())
    assert refused.value.filename == path


@pytest.mark.parametrize(
    "path",
    [
        f"/sys/bus/pci/devices/{PF0}/numa_node",
        f"/sys/bus/pci/devices/{PF0}/sriov_numvfs",
        "/sys/class/net/enp33s0/queues/rx-0/rps_cpus",
    ],
)
def test_a_file_of_a_device_with_something_else_than_belongs_there_is_named(kernel: Kernel, path: str) -> None:
    kernel.tree.put(path, "N/A")
    found = settle(kernel.machine(), only())
    (missing,) = [condition for condition in found.conditions if condition.type == "NicsPresent"]
    assert (missing.status, missing.reason) == ("Unknown", "DeviceUnreadable")
    assert "'N/A' is nothing that belongs there" in missing.message and path in missing.message


def test_more_vfs_than_the_device_has_is_refused_with_the_remedy_and_nothing_is_written(kernel: Kernel) -> None:
    planned = preview(kernel.machine(), spec(8))
    assert len(planned.errors) == 1
    assert "has 7 VFs at most, the spec wants 8" in planned.errors[0]
    assert "lower vfs.count to 7" in planned.errors[0]
    found = settle(kernel.machine(), spec(8))
    assert not is_ready(found.conditions)
    assert not any(path.endswith(f"{PF0}/sriov_numvfs") for path, _ in kernel.writes)


def test_a_nic_that_is_not_there_is_named_with_what_is(kernel: Kernel) -> None:
    wanted = from_mapping({"node_name": "n1", "nics": [{"name": "rail9", "select": {"pci": "0000:99:00.0"}}]})
    (error,) = preview(kernel.machine(), wanted).errors
    assert "rail9 (pci=0000:99:00.0) is not there" in error
    assert "enp33s0" in error


def test_two_functions_for_one_selector_is_an_error_that_names_them(kernel: Kernel) -> None:
    wanted = from_mapping({"node_name": "n1", "nics": [{"name": "any", "select": {"vendor": "8086"}}]})
    (error,) = preview(kernel.machine(), wanted).errors
    assert PF0 in error
    assert PF1 in error


def test_vfs_in_use_are_not_reset(kernel: Kernel) -> None:
    found = settle(kernel.machine(), spec())
    kernel.move_away(vf_addresses(kernel, PF0)[3])
    kernel.writes.clear()
    found = settle(kernel.machine(), spec(5), found)
    (deferred,) = [outcome for outcome in found.outcomes if outcome.result == "deferred"]
    assert deferred.change.disruption is Disruption.VF_RESET
    assert deferred.change.affected == (f"another network namespace ({PF0}#3)",)
    assert kernel.writes == []


def test_a_netdev_with_the_default_route_keeps_its_link(kernel: Kernel) -> None:
    kernel.set_link(kernel.netdev(PF0).ifindex, up=True)
    kernel.routed.add("enp33s0")
    found = settle(kernel.machine(), spec())
    assert {o.result for o in found.outcomes if o.change.target == PF0 and o.change.kind == "vfs"} == {"deferred"}
    assert kernel.netdev(PF0).mtu == 1500


def test_what_a_driver_refuses_is_unsupported_and_not_tried_again_at_once(kernel: Kernel) -> None:
    def fault(operation: str, where: str, value: str) -> OSError | None:
        refused = operation == "set_vf" and "trust" in value and "'trust': True" in value
        return OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) if refused else None

    kernel.fault = fault
    failures = Failures()
    found = settle(kernel.machine(), spec(), failures=failures)
    assert {o.result for o in found.outcomes if o.change.field == "trust"} == {"unsupported"}
    assert not is_ready(found.conditions)
    kernel.writes.clear()
    settle(kernel.machine(), spec(), found, failures)
    assert not kernel.writes


def test_a_vf_without_carrier_is_brought_up_again_after_its_time_to_settle(kernel: Kernel) -> None:
    failures = Failures()
    found = settle(kernel.machine(), spec(), failures=failures)
    kernel.lose_carrier(vf_addresses(kernel, PF0)[3])
    kernel.writes.clear()
    now = 100.0

    def look() -> Pass:
        return converge(kernel.machine(), spec(), found.have, frozenset({PF0}), failures, lambda: now)

    assert not is_ready(look().conditions)
    failures.hasten(None)
    now += 2
    assert not is_ready(look().conditions)
    assert kernel.writes == []
    now += 4
    assert is_ready(look().conditions)
    assert len(kernel.writes) >= 2


def test_a_vf_in_use_keeps_its_link_even_without_carrier(kernel: Kernel) -> None:
    failures = Failures()
    found = settle(kernel.machine(), spec(), failures=failures)
    vf = vf_addresses(kernel, PF0)[3]
    kernel.routed.add(kernel.netdev(vf).name)
    kernel.lose_carrier(vf)
    kernel.writes.clear()
    for now in (100.0, 200.0):
        outcomes = converge(kernel.machine(), spec(), found.have, None, failures, lambda now=now: now).outcomes  # type: ignore[misc]
    assert [o.result for o in outcomes] == ["deferred"]
    assert kernel.writes == []


def test_a_difference_is_announced_before_the_first_write(kernel: Kernel) -> None:
    found = settle(kernel.machine(), spec())
    kernel.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "0")
    kernel.writes.clear()
    written_before: list[int] = []
    converge(
        kernel.machine(),
        spec(),
        found.have,
        frozenset({PF0}),
        Failures(),
        lambda: 0.0,
        announce=lambda change: written_before.append(len(kernel.writes)),
    )
    assert written_before == [0]


def test_a_failed_count_leaves_the_vfs_that_were_there(kernel: Kernel) -> None:
    found = settle(kernel.machine(), spec())

    def fault(operation: str, where: str, value: str) -> OSError | None:
        return OSError(errno.ENOSPC, "no space") if where.endswith("sriov_numvfs") and value == "5" else None

    kernel.fault = fault
    found = settle(kernel.machine(), spec(5), found)
    (failed,) = [o for o in found.outcomes if o.result == "failed"]
    assert "out of MSI-X vectors" in failed.error
    assert kernel.read(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs") == "7"


def test_running_irqbalance_makes_the_node_not_ready(kernel: Kernel) -> None:
    kernel.host.processes.add("irqbalance")
    found = settle(kernel.machine(), spec())
    assert [c.reason for c in found.conditions if c.status == "False"] == ["IrqbalanceRunning"]
    assert is_ready(settle(kernel.machine(), spec(irqs={"irqbalance": "untouched"})).conditions)


def test_a_function_without_a_netdev_has_its_interrupts_placed(kernel: Kernel) -> None:
    kernel.add_erdma("0000:61:00.0", node=1)
    wanted = from_mapping(
        {"node_name": "n1", "nics": [{"name": "erdma0", "select": {"vendor": "1ded", "device": "107f"}}]}
    )
    assert is_ready(settle(kernel.machine(), wanted).conditions)
    assert kernel.read("/proc/irq/90/smp_affinity_list") == "2-3"
    assert kernel.read("/proc/irq/91/smp_affinity_list") == "2"


def test_what_happens_between_two_rounds_is_read_in_the_second(kernel: Kernel) -> None:
    """An event that is taken in the middle of a pass comes once: what was read before it does not answer for it."""
    settled = settle(kernel.machine(), spec())
    vf = vf_addresses(kernel, PF0)[3]
    kernel.set_vf(kernel.netdev(PF0).ifindex, 3, trust=False)
    events = [frozenset({f"{PF0}#3"}), frozenset[str]()]

    def heard() -> frozenset[str]:
        if len(events) == 2:
            kernel.set_link(kernel.netdev(vf).ifindex, mtu=1500)
        return events.pop(0) if events else frozenset()

    found = converge(kernel.machine(), spec(), settled.have, frozenset({PF0}), Failures(), lambda: 0.0, heard=heard)
    assert is_ready(found.conditions)
    assert kernel.netdev(vf).mtu == 9000
