"""Passes over devices that are missing or not ready yet, or whose files are malformed."""

import pytest

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from tests.sim.engine.passes import spec
from tests.sim.kernel import Kernel
from tests.sim.passes import condition, rail0, settle
from tests.sim.two_nics import PF0


def test_vfs_are_not_created_before_udev_has_processed_the_pf(kernel: Kernel) -> None:
    kernel.udev.lags(PF0)
    result = settle(kernel, spec())
    assert not is_ready(result.conditions)
    assert kernel.files.read(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs") == "0"
    kernel.udev.catches_up(PF0)
    result = settle(kernel, spec(), result, frozenset({PF0}))
    assert is_ready(result.conditions)


@pytest.mark.parametrize("runs", [True, False], ids=["udev-runs", "udev-does-not-run"])
@pytest.mark.parametrize("function", ["pf", "vf"])
def test_the_event_of_a_netdev_that_udev_has_missed_is_sent_again(kernel: Kernel, function: str, runs: bool) -> None:
    failures = Failures()
    result = settle(kernel, spec(), failures=failures)
    netdev = PF0 if function == "pf" else vf_addresses(kernel.files, PF0)[3]
    kernel.udev.lags(netdev)
    kernel.udev.runs = runs
    kernel.writes.clear()
    now = 100.0
    memory = Memory(lambda: now, failures)
    (held,) = converge(kernel.machine(), Goal(spec()), memory, result.have, frozenset({PF0})).outcomes
    assert held.remedy.startswith("wait 30 s, ")
    ready, sent = [], []
    for second in range(400):
        now = 100.0 + second
        result = converge(kernel.machine(), Goal(spec()), memory, result.have, frozenset({PF0}))
        ready.append(is_ready(result.conditions))
        sent += [second] * len(kernel.writes)
        assert {*kernel.writes} <= {(f"/sys/class/net/{kernel.netdev(netdev).name}/uevent", "add")}
        kernel.writes.clear()
    # The waits grow, since each event is more work for a late udev.
    assert sent == ([30] if runs else [30, 60, 120, 240])
    assert ready == [runs and second >= 30 for second in range(400)]


def test_a_pf_in_a_container_is_ready_unless_vfs_must_be_created(kernel: Kernel) -> None:
    settle(kernel, rail0())
    kernel.move_away(PF0)
    assert is_ready(settle(kernel, rail0()).conditions)
    result = settle(kernel, rail0(vfs={"count": 3}))
    assert not is_ready(result.conditions)
    (blocked,) = result.outcomes
    assert "no netdev in the host's network" in blocked.error


def test_an_infiniband_pf_needs_a_netdev_only_if_it_has_vfs(kernel: Kernel) -> None:
    kernel.lose_netdev(PF0)
    kernel.rdma.add(PF0, "ibp33s0", None, link_layer="InfiniBand")
    assert is_ready(settle(kernel, rail0()).conditions)
    result = settle(kernel, rail0(vfs={"count": 4}))
    assert not is_ready(result.conditions)
    assert "load ib_ipoib" in result.conditions[0].remedy


@pytest.mark.parametrize(
    "settings",
    [
        {"mtu": 9000},
        {"state": "down"},
        {"addresses": ["192.0.2.3/24"], "rail": 0},
        {"channels": {"combined": 4}},
        {"roce": {"cm_tos": 106}},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_an_rdma_device_without_netdev_cannot_have_settings_of_one(kernel: Kernel, settings: dict[str, object]) -> None:
    """AWS's EFA never has a netdev, an InfiniBand function only with ib_ipoib."""
    kernel.lose_netdev(PF0)
    kernel.rdma.add(PF0, "rdmap33s0", None)
    result = settle(kernel, rail0(**settings))
    assert not is_ready(result.conditions)
    (blocked,) = result.outcomes
    assert (blocked.change.kind, blocked.change.target, blocked.result) == ("links", PF0, "blocked")
    name = next(iter(settings))
    assert blocked.error.startswith("its driver igb has created no netdev") and blocked.error.endswith(f": {name}")
    assert "ib_ipoib" in blocked.remedy


def test_an_rdma_device_whose_netdev_is_in_a_container_is_ready_with_settings_of_one(kernel: Kernel) -> None:
    kernel.rdma.add(PF0, "ibp33s0", None, link_layer="InfiniBand")
    kernel.move_away(PF0)
    given = rail0(mtu=4092)
    assert is_ready(settle(kernel, given).conditions)
    # Before Linux 5.2 no other namespace is shown.
    kernel.hides_namespaces = True
    assert is_ready(settle(kernel, given).conditions)


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
def test_an_empty_file_counts_as_missing(kernel: Kernel, path: str) -> None:
    kernel.tree.put(path, "")
    assert is_ready(settle(kernel, rail0()).conditions)


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
def test_malformed_content_of_a_host_file_is_an_error_that_names_the_file(kernel: Kernel, path: str) -> None:
    kernel.tree.put(path, "N/A")
    with pytest.raises(OSError, match=r"the file has an unexpected value: 'N/A'") as refused:
        settle(kernel, rail0())
    assert refused.value.filename == path


@pytest.mark.parametrize(
    "path",
    [
        f"/sys/bus/pci/devices/{PF0}/numa_node",
        f"/sys/bus/pci/devices/{PF0}/sriov_numvfs",
        "/sys/class/net/enp33s0/queues/rx-0/rps_cpus",
    ],
)
def test_malformed_content_of_a_device_file_is_reported_with_its_path(kernel: Kernel, path: str) -> None:
    kernel.tree.put(path, "N/A")
    result = settle(kernel, rail0())
    missing = condition(result, "NicsPresent")
    assert (missing.status, missing.reason) == ("Unknown", "DeviceUnreadable")
    assert "the file has an unexpected value: 'N/A'" in missing.message and path in missing.message
