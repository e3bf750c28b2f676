"""The condition of each probe for what it reads."""

import pytest

from agent.hardware.functions import vf_addresses
from agent.report.records import Condition
from agent.report.verdict import is_ready, passes_first
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.readiness import Node
from tests.sim.two_nics import IPOIB, PF0

STATISTICS = "/sys/class/net/enp33s0/statistics"


@pytest.fixture
def node() -> Node:
    return Node.with_two_nics()


def with_vfs(node: Node, **defaults: object) -> str:
    """The node has three VFs; the second one's address."""
    vfs = {"count": 3, "defaults": defaults}
    node.more = {"nics": [nic("rail0", PF0, vfs=vfs)]}
    node.look()
    return vf_addresses(node.kernel.files, PF0)[1]


def a_minute_later(node: Node) -> dict[str, Condition]:
    """What an agent says that has started a minute ago."""
    fresh = Node(node.kernel, more=node.more)
    fresh.look()
    fresh.now += 60
    return fresh.look()


def state(condition: Condition) -> tuple[str, str, str]:
    return condition.status, condition.reason, condition.severity


def test_a_node_without_gpus_runtime_or_kubelet_is_ready(node: Node) -> None:
    conditions = node.look()
    assert is_ready(conditions.values())
    assert "GpusPresent" not in conditions
    assert {type: c.reason for type, c in conditions.items() if c.stage == "cluster"} == {
        "ContainerMemlock": "NoRuntime",
        "DevicePlugins": "NoKubelet",
    }


def test_a_driver_that_is_not_the_installed_one_is_named(node: Node) -> None:
    assert node.look()["KernelModules"].reason == "NothingToCompare"
    node.now += 300
    node.kernel.tree.put("/sys/module/igb/srcversion", "AAAA")
    node.kernel.host.installed["igb"] = "AAAA"
    node.kernel.host.installed["mlx5_core"] = "CCCC"
    assert node.look()["KernelModules"].reason == "AsInstalled"
    node.kernel.host.installed["igb"] = "BBBB"
    node.now += 300
    node.kernel.tree.put("/sys/module/bnxt_re/srcversion", "AAAA")
    node.kernel.host.installed["bnxt_re"] = "BBBB"
    condition = node.look()["KernelModules"]
    assert state(condition) == ("False", "ModulesStale", "warn")
    for module in ("bnxt_re", "igb"):
        assert f"{module} (loaded AAAA, installed BBBB)" in condition.message


def test_a_vf_whose_driver_creates_no_netdev_is_named_after_half_a_minute(node: Node) -> None:
    """iavf creates it late, when its PF has answered, and perhaps never."""
    lost = with_vfs(node)
    node.kernel.move_away(vf_addresses(node.kernel.files, PF0)[2])
    node.kernel.lose_netdev(lost)
    fresh = Node(node.kernel, more=node.more)
    assert fresh.look()["VfNetdevs"].status == "True"
    fresh.now += 29
    assert fresh.look()["VfNetdevs"].status == "True"
    fresh.now += 1
    conditions = fresh.look()
    assert state(conditions["VfNetdevs"]) == ("False", "NetdevMissing", "warn")
    assert conditions["VfNetdevs"].message.endswith(f"has the netdevs of {PF0}#1 (igbvf)")
    node.kernel.rdma.add(lost, "ibp33s0v1", None, link_layer="InfiniBand")
    assert state(fresh.look()["VfNetdevs"]) == ("True", "AllCreated", "warn")


@pytest.mark.parametrize("bound", ["ifcvf", "vp-vdpa", "octep_vdpa", "pci-stub"])
def test_a_vf_with_a_driver_that_creates_no_netdev_need_not_have_one(node: Node, bound: str) -> None:
    vf = with_vfs(node, trust=True)
    node.kernel.lose_netdev(vf)
    node.kernel.set_driver(vf, bound)
    node.kernel.sriov.set(PF0, node.kernel.netdev(PF0), 1, trust=False)
    conditions = a_minute_later(node)
    assert state(conditions["VfNetdevs"]) == ("True", "AllCreated", "warn")
    assert is_ready(conditions.values())
    # Nobody has its vDPA device open, so it is not handed over.
    assert node.kernel.vfs(PF0)[1].trust is True


def test_a_kernel_that_shows_no_other_namespace_gives_no_warning_of_vfs_in_pods(node: Node) -> None:
    """Before Linux 5.2."""
    node.kernel.move_away(with_vfs(node))
    node.kernel.hides_namespaces = True
    assert state(a_minute_later(node)["VfNetdevs"]) == ("True", "AllCreated", "warn")


def test_a_node_without_vfs_has_no_condition_of_their_netdevs(node: Node) -> None:
    assert "VfNetdevs" not in node.look()


def test_rising_errors_are_a_warning_until_ten_minutes_after_the_last(node: Node) -> None:
    node.kernel.tree.put(f"{STATISTICS}/rx_crc_errors", "7")
    assert node.look()["ErrorCounters"].status == "True", "what was before is nobody's fault now"
    node.kernel.tree.put(f"{STATISTICS}/rx_crc_errors", "9")
    node.now += 60
    condition = node.look()["ErrorCounters"]
    assert state(condition) == ("False", "ErrorsRising", "warn")
    assert "enp33s0 rx_crc_errors +2" in condition.message
    for _ in range(11):
        node.now += 60
        condition = node.look()["ErrorCounters"]
    assert condition.status == "True"


@pytest.mark.parametrize(
    ("counter", "most"),
    [
        ("symbol_error", 65535),
        ("port_rcv_errors", 65535),
        ("link_downed", 255),
        ("link_error_recovery", 255),
        ("local_link_integrity_errors", 15),
        ("excessive_buffer_overrun_errors", 15),
    ],
)
def test_a_counter_that_is_full_is_not_taken_for_one_that_does_not_rise(node: Node, counter: str, most: int) -> None:
    """A bad cable fills InfiniBand's counters of 4 to 16 bits within minutes, and they show nothing from then on."""
    node.kernel.rdma.add(PF0, "mlx5_0", None, link_layer="InfiniBand")
    path = f"/sys/class/infiniband/mlx5_0/ports/1/counters/{counter}"
    node.kernel.tree.put(path, str(most - 1))
    assert node.look()["ErrorCounters"].status == "True"
    node.kernel.tree.put(path, str(most))
    for _ in range(12):
        node.now += 60
        condition = node.look()["ErrorCounters"]
    assert state(condition) == ("False", "ErrorsRising", "warn")
    assert f"mlx5_0/1 {counter} is full ({most}: clear it by perfquery -R)" in condition.message
    node.kernel.tree.put(path, "0")
    node.now += 60
    assert node.look()["ErrorCounters"].status == "True"


@pytest.mark.parametrize(
    "counter",
    ["packet_seq_err", "rx_roce_errors", "tcpRetransSegs", "ip6InTruncatedPkts", "ip4RetransSegs", "rx_err_pkt"],
)
def test_errors_that_an_rdma_driver_counts_by_its_own_names_are_a_warning(node: Node, counter: str) -> None:
    node.kernel.rdma.add(PF0, "rocep33s0", "enp33s0")
    path = f"/sys/class/infiniband/rocep33s0/ports/1/hw_counters/{counter}"
    node.kernel.tree.put(path, "7")
    assert node.look()["ErrorCounters"].status == "True"
    node.kernel.tree.put(path, "9")
    node.now += 60
    assert f"rocep33s0/1 {counter} +2" in node.look()["ErrorCounters"].message


def test_a_driver_s_reload_sets_counters_back_and_is_no_error(node: Node) -> None:
    node.kernel.tree.put(f"{STATISTICS}/rx_errors", "1000")
    node.look()
    node.kernel.tree.put(f"{STATISTICS}/rx_errors", "0")
    node.now += 60
    assert node.look()["ErrorCounters"].status == "True"


def test_an_unsynchronised_clock_is_a_warning(node: Node) -> None:
    node.kernel.host.disciplined = False
    assert state(node.look()["ClockSynchronised"]) == ("False", "NotSynchronised", "warn")
    node.kernel.host.disciplined = True
    node.now += 60
    assert node.look()["ClockSynchronised"].status == "True"
    # While it is synchronised it is read seldom: it shows only after hours that nobody sets it any more.
    node.kernel.host.disciplined = False
    node.now += 60
    assert node.look()["ClockSynchronised"].status == "True"
    node.now += 900
    assert node.look()["ClockSynchronised"].status == "False"


def test_a_clock_whose_state_is_unknown_yet_is_read_again_soon(node: Node) -> None:
    node.kernel.host.disciplined = None
    condition = node.look()["ClockSynchronised"]
    assert (condition.status, condition.reason, condition.severity) == ("Unknown", "ProbeFailed", "warn")
    assert condition.message.endswith("timedated: Connection refused")
    node.kernel.host.disciplined = True
    node.now += 60
    assert node.look()["ClockSynchronised"].status == "True"


GPU = "/proc/driver/nvidia/gpus/0000:{}:00.0/information"


def test_missing_gpus_or_peer_memory_do_not_hold_the_kubelet_back(node: Node) -> None:
    node.more = {"gpus": {"count": 2, "peer_memory": True}}
    conditions = node.look()
    assert state(conditions["GpusPresent"]) == ("False", "DriverMissing", "required")
    assert not is_ready(conditions.values())
    assert passes_first(conditions.values()), "the kubelet may start: a GPU's driver may come in a container"
    node.kernel.tree.put("/sys/module/nvidia/version", "570.1")
    node.kernel.tree.put(GPU.format("1b"), "Model: H200")
    node.now += 60
    assert "has 1 GPU (0000:1b:00.0), the spec wants 2" in node.look()["GpusPresent"].message
    node.kernel.tree.put(GPU.format("43"), "Model: H200")
    node.now += 60
    assert node.look()["GpusPresent"].reason == "PeerMemoryMissing"
    node.kernel.tree.put("/sys/module/nvidia_peermem/refcnt", "0")
    node.now += 60
    assert is_ready(node.look().values())


def test_a_kubelet_without_its_socket_for_two_checks_is_not_ready(node: Node) -> None:
    node.look()
    node.kernel.host.processes.add("kubelet")
    assert node.look()["DevicePlugins"].status == "True", "it may be starting"
    node.now += 60
    conditions = node.look()
    assert state(conditions["DevicePlugins"]) == ("False", "NoSocket", "required")
    assert passes_first(conditions.values())
    node.kernel.tree.put("/var/lib/kubelet/device-plugins/kubelet.sock", "")
    node.now += 60
    assert is_ready(node.look().values())


def unnamed(node: Node, *names: str) -> None:
    """PF0's driver requests interrupts whose names are not those of queues, as mana did once."""
    node.kernel.interrupts.free(PF0)
    node.kernel.interrupts.request_all(PF0, names or ["mana_intr"] * 3)


def test_a_nic_of_whose_interrupts_none_is_recognised_as_a_queue_s_is_named(node: Node) -> None:
    assert state(node.look()["QueueInterrupts"]) == ("True", "Recognised", "warn")
    unnamed(node)
    conditions = node.look()
    assert state(conditions["QueueInterrupts"]) == ("False", "NotRecognised", "warn")
    assert "enp33s0 has carrier and 3 interrupts" in conditions["QueueInterrupts"].message
    assert conditions["QueueInterrupts"].message.endswith("so none is pinned (mana_intr)")
    assert is_ready(conditions.values())


def test_rdma_s_completion_vectors_hide_no_queues_that_are_not_recognised(node: Node) -> None:
    node.look()
    node.kernel.set_driver(PF0, "ice")
    unnamed(node, "ice-misc", "eth-queue-a", *(f"irdma-{PF0}-CEQ-{number}" for number in range(2)))
    told = node.look()["QueueInterrupts"]
    assert (told.reason, "2 interrupts" in told.message) == ("NotRecognised", True)


@pytest.mark.parametrize(("state", "names"), [("down", []), ("up", ["enp33s0"])])
def test_a_netdev_that_is_down_or_has_a_single_interrupt_need_not_have_those_of_queues(
    node: Node, state: str, names: list[str]
) -> None:
    node.wanted_state = state
    node.look()
    unnamed(node, *names)
    assert node.look()["QueueInterrupts"].status == "True"


def test_an_infiniband_function_need_not_have_the_interrupts_of_queues() -> None:
    node = Node(Kernel())
    node.kernel.add_nic(PF0, "ibp33s0", IPOIB)
    node.more = {"nics": [nic("rail0", PF0)]}
    node.look()
    unnamed(node)
    conditions = node.look()
    assert conditions["Carrier"].status == "True"
    assert conditions["QueueInterrupts"].status == "True"


@pytest.mark.parametrize("pin", [True, False])
def test_without_pinning_nobody_asks_which_interrupts_are_queues(node: Node, pin: bool) -> None:
    node.more = {"irqs": {"pin": pin}, "rps": {"enable": True}}
    assert ("QueueInterrupts" in node.look()) is pin
