"""Public reports about devices that are there and work no more: a GPU or a card that fell off the bus, a port with errors."""

import pytest

from agent.report.verdict import is_ready
from tests.sim.passes import nic
from tests.sim.readiness import Node
from tests.sim.two_nics import NAME0, PF0, PF1

GPU = "0000:b3:00.0"
CONFIG = "/sys/bus/pci/devices/{}/config"


@pytest.fixture
def node() -> Node:
    return Node.with_two_nics()


def fall_off(node: Node, address: str) -> None:
    """Let a device fall off the bus: the kernel keeps the device and its driver, and each register reads as ones."""
    node.kernel.config[CONFIG.format(address)] = bytearray(b"\xff" * 256)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        # The driver's probe fails, and no Xid is logged.
        pytest.param(False, "the driver has 0 GPUs (none), the spec wants 1", id="nvsentinel-155"),
        # In lspci it has the revision ff.
        pytest.param(True, f"{GPU} fell off the bus", id="kubevirt-gpu-device-plugin-93"),
    ],
)
def test_a_gpu_that_fell_off_the_bus_is_named(node: Node, listed: bool, message: str) -> None:
    node.more = {"gpus": {"count": 1}}
    node.kernel.tree.put("/sys/module/nvidia/version", "570.158.01")
    node.kernel.tree.put(f"/proc/driver/nvidia/gpus/{GPU}/information", "Model: L40")
    assert node.look()["GpusPresent"].status == "True"
    fall_off(node, GPU)
    if not listed:
        node.kernel.tree.remove(f"/proc/driver/nvidia/gpus/{GPU}")
    node.now += 60
    missing = node.look()["GpusPresent"]
    assert (missing.status, missing.reason, missing.message) == ("False", "GpusMissing", message)
    assert "fell off the bus" in missing.remedy


@pytest.mark.parametrize("way", [pytest.param("all at once", id="csit-1593"), "by an event"])
def test_a_nic_that_fell_off_the_bus_is_named_and_not_asked_any_more(node: Node, way: str) -> None:
    """Its netdev stays, and its driver answers requests with errors, or after minutes."""
    node.look()
    fall_off(node, PF0)
    node.kernel.hanging[PF0] = 0
    if way == "all at once":
        node.last = None
    conditions = node.look()
    assert not is_ready(conditions.values())
    present = conditions["NicsPresent"]
    assert (present.status, present.reason) == ("Unknown", "DeviceUnreadable")
    assert f"{PF0} (NIC rail0) cannot be read" in present.message
    assert "it does not answer on PCI" in present.message
    assert [fault.target for fault in conditions["DevicesAnswer"].faults] == [PF0]
    del node.kernel.hanging[PF0]
    node.kernel.config[CONFIG.format(PF0)] = node.kernel.config[CONFIG.format(PF1)]
    assert is_ready(node.look().values())


def test_a_nic_that_fell_off_the_bus_does_not_hide_the_others(node: Node) -> None:
    node.look()
    fall_off(node, PF0)
    node.kernel.hanging[PF0] = 0
    node.kernel.netlink.set_link(node.kernel.netdev(PF1).ifindex, mtu=1400)
    node.more = {"nics": [{"name": "rail{index}", "select": {"each": True, "vendor": "8086"}, "mtu": 1500}]}
    present = node.look()["NicsPresent"]
    assert f"{PF0} (NIC rail0) cannot be read" in present.message
    assert node.kernel.netdev(PF1).mtu == 1500


@pytest.mark.parametrize(
    ("device", "counter"),
    [
        pytest.param("bnxt_re0", "seq_err_naks_rcvd", id="omnistat-307"),
        pytest.param("ionic_0", "req_rx_pkt_seq_err", id="rocm-systems-5016"),
        pytest.param("rdmap16s27", "retrans_timeout_events", id="nvsentinel-1325"),
        pytest.param("rdmap16s27", "unresponsive_remote_events", id="awsome-distributed-ai-885"),
        ("mana_0", "requester_timeout"),
        ("mlx5_0", "packet_seq_err"),
    ],
)
def test_errors_of_a_port_count_by_the_names_that_its_driver_gives_them(node: Node, device: str, counter: str) -> None:
    node.kernel.tree.put(f"/sys/bus/pci/devices/{PF0}/infiniband/{device}/node_type", "1: CA")
    port = f"/sys/class/infiniband/{device}/ports/1"
    node.kernel.tree.put(f"{port}/counters/symbol_error", "N/A (no PMA)")
    path = f"{port}/hw_counters/{counter}"
    node.kernel.tree.put(path, "3")
    assert node.look()["ErrorCounters"].status == "True"
    node.kernel.tree.put(path, "5")
    node.now += 60
    rising = node.look()["ErrorCounters"]
    assert (rising.reason, rising.severity) == ("ErrorsRising", "warn")
    assert f"{device}/1 {counter} +2" in rising.message


def test_a_card_whose_driver_has_given_up_all_devices_is_named_from_the_first_pass_on(node: Node) -> None:
    """Its firmware died before the agent started: it is in lspci, with its driver, and has neither netdev nor RDMA device."""
    kernel = node.kernel
    kernel.lose_netdev(PF0)
    kernel.set_driver(PF0, "mlx5_core")
    node.more = {"nics": [nic("rail0", PF0, rdma={})]}
    conditions = node.look()
    assert not is_ready(conditions.values())
    assert conditions["NicsPresent"].status == "True"
    assert "mlx5_core" in conditions["Converged"].message
    assert "dmesg" in conditions["Converged"].remedy
    assert PF0 in conditions["RdmaDevices"].message


def test_a_roce_function_whose_netdev_is_in_a_pod_is_not_taken_for_one_without(node: Node) -> None:
    node.kernel.rdma.add(PF0, "bnxt_re0", NAME0)
    node.more = {"nics": [nic("rail0", PF0, mtu=9000, rdma={})]}
    assert is_ready(node.look().values())
    node.kernel.move_away(PF0)
    node.last = None
    conditions = node.look()
    assert conditions["Converged"].status == "True"
    assert conditions["RdmaDevices"].status == "True"
