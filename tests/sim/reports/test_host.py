"""Public reports about interrupts, RPS, huge pages, locked memory and the kubelet, tried by their triggers."""

import re
from typing import Any

import pytest

from agent.engine.converge import Pass
from agent.hardware.placement import from_mask
from agent.report.verdict import is_ready
from agent.spec.ranges import parse_ranges
from tests.sim import hugepages, passes
from tests.sim.kernel import Kernel
from tests.sim.passes import nic, spec_of
from tests.sim.readiness import Node
from tests.sim.two_nics import NAME0, PF0, two_nics

NET = "/sys/class/net"
ON_NODE_0 = nic("rail0", PF0)


def settle(kernel: Kernel, last: Pass | None = None, nics: Any = (ON_NODE_0,), **more: Any) -> Pass:
    spec = spec_of(*nics, **more)
    return passes.settle(kernel, spec, last)


def cpus_of_queues(kernel: Kernel) -> set[int]:
    served = kernel.interrupts.affinities(PF0).items()
    return {cpu for (_, action), cpus in served if "-" in action for cpu in parse_ranges(cpus)}


@pytest.mark.parametrize(
    ("cpus", "isolated", "given", "among"),
    [
        pytest.param(128, "", {}, set(range(64)), id="ethernet-linux-ice-42"),
        pytest.param(512, "", {}, set(range(256)), id="irqbalance-246"),
        pytest.param(96, "", {}, set(range(48)), id="irqbalance-175"),
        pytest.param(16, "1-3,5-7", {}, {0, 4}, id="talos-11310"),
        pytest.param(8, "", {"exclude_cpus": "0"}, {1, 2, 3}, id="coreos-bugs-2135"),
        pytest.param(8, "0-3", {}, {4, 5, 6, 7}, id="seapath-868"),
        pytest.param(48, "1-23,25-47", {}, {0}, id="nri-plugins-669"),
    ],
)
def test_queues_are_served_by_cpus_of_the_nic_s_node_that_are_not_isolated(
    cpus: int, isolated: str, given: dict[str, Any], among: set[int]
) -> None:
    kernel = two_nics(cpus)
    kernel.interrupts.isolate(isolated)
    assert is_ready(settle(kernel, irqs=given).conditions)
    taken = cpus_of_queues(kernel)
    assert taken
    assert taken <= among


@pytest.mark.parametrize(
    ("nodes", "nic"),
    [
        pytest.param(34, 0, id="kubernetes-135541"),
        pytest.param(9, 0, id="xpu-perf-129"),
        # The firmware puts a device to the node of a GPU's memory.
        pytest.param(34, 10, id="vllm-39361"),
    ],
)
def test_queues_are_served_by_cpus_though_most_numa_nodes_have_none(nodes: int, nic: int) -> None:
    kernel = two_nics(8)
    for node in range(nodes):
        near = [10 if other == node else 40 if {other, node} == {1, 10} else 80 for other in range(nodes)]
        kernel.tree.put(f"/sys/devices/system/node/node{node}/distance", " ".join(map(str, near)))
        if node > 1:
            kernel.tree.put(f"/sys/devices/system/node/node{node}/cpulist", "")
    kernel.tree.put(f"/sys/bus/pci/devices/{PF0}/numa_node", str(nic))
    assert is_ready(settle(kernel).conditions)
    assert cpus_of_queues(kernel) <= (set(range(4, 8)) if nic else set(range(4)))


@pytest.mark.parametrize(
    "cpus",
    [
        pytest.param(128, id="tempesta-2684"),
        pytest.param(256, id="lis-next-507"),
        pytest.param(72, id="seastar-316"),
        pytest.param(96, id="vyos-1x-4215"),
    ],
)
def test_a_mask_of_more_than_32_cpus_is_written_as_the_kernel_shows_it(cpus: int) -> None:
    kernel = two_nics(cpus)
    result = settle(kernel, rps={"enable": True})
    assert is_ready(result.conditions)
    masks = [text for path, text in kernel.writes if path.endswith("ps_cpus")]
    assert masks
    assert all(re.fullmatch("[0-9a-f]{8}(,[0-9a-f]{8})+", each) for each in masks)
    kernel.writes.clear()
    assert is_ready(settle(kernel, result, rps={"enable": True}).conditions)
    assert kernel.writes == []
    shown = from_mask(kernel.files.read(f"{NET}/{NAME0}/queues/rx-0/rps_cpus"))
    assert shown <= set(range(cpus // 2))


@pytest.mark.parametrize(
    ("cpus", "online", "among"),
    [
        pytest.param(8, "0,2-7", {0, 2, 3}, id="irqbalance-161"),
        pytest.param(128, "0-51", set(range(52)), id="cluster-node-tuning-operator-518"),
        pytest.param(64, "0-3,6-63", {*range(4), *range(6, 32)}, id="firedancer-10430"),
        pytest.param(8, "0", {0}, id="irqbalance-125"),
    ],
)
def test_no_queue_is_served_by_a_cpu_that_is_off(cpus: int, online: str, among: set[int]) -> None:
    kernel = two_nics(cpus)
    for now in (online, f"0-{cpus - 1}", online):
        kernel.interrupts.set_online(now)
        assert is_ready(settle(kernel).conditions)
        taken = cpus_of_queues(kernel)
        assert taken
        assert taken <= (among if now == online else set(range(cpus // 2)))
        assert len(taken) > 1 or online == now == "0"


def test_a_queue_that_a_pod_s_netdev_gets_later_is_steered_too() -> None:
    """Its event comes before all of its queues (cluster-node-tuning-operator 650)."""
    kernel = two_nics(8)
    rps = {"netdevs": [{"match": "veth*"}]}
    kernel.add_virtual("veth1")
    result = settle(kernel, rps=rps)
    kernel.tree.put(f"{NET}/veth1/queues/rx-1/rps_cpus", "0")
    result = settle(kernel, result, rps=rps)
    masks = {kernel.files.read(f"{NET}/veth1/queues/rx-{queue}/rps_cpus") for queue in (0, 1)}
    assert {frozenset(from_mask(mask)) for mask in masks} == {frozenset(range(8))}


@pytest.mark.parametrize(
    "pools",
    [
        pytest.param([{"size": "2M", "count": 8}, {"size": "1G", "count": 1, "numa_node": 0}], id="kubernetes-80452"),
        pytest.param([{"size": "2M", "count": 32}], id="bottlerocket-4385"),
        pytest.param([{"size": "2M", "count": 16, "numa_node": 1}], id="talos-3046"),
    ],
)
def test_huge_pages_are_there_after_the_first_pass(kernel: Kernel, pools: list[dict[str, Any]]) -> None:
    assert is_ready(settle(kernel, hugepages=pools).conditions)
    for pool in pools:
        size = {"2M": 2048, "1G": 1048576}[pool["size"]]
        nodes = [pool["numa_node"]] if "numa_node" in pool else [0, 1]
        paths = [f"{hugepages.NODE}/node{node}/hugepages/hugepages-{size}kB/nr_hugepages" for node in nodes]
        assert sum(int(kernel.files.read(path)) for path in paths) == pool["count"]


def test_huge_pages_that_memory_lacks_at_first_are_there_later(kernel: Kernel) -> None:
    """The first write to a node's pool reserves fewer than it was told to (performance-addon-operators 279)."""
    pools = [{"size": "2M", "count": 20, "numa_node": 0}, {"size": "2M", "count": 4, "numa_node": 1}]
    kernel.memory = hugepages.Memory({2048: 12, 1048576: 0})
    short = settle(kernel, hugepages=pools)
    assert not is_ready(short.conditions)
    (failed,) = [each for each in short.outcomes if each.result == "failed"]
    assert "12 of 20 pages of 2M" in failed.error
    assert "hugepagesz=2M hugepages=N" in failed.remedy
    kernel.memory = hugepages.Memory({2048: 64, 1048576: 0})
    assert is_ready(settle(kernel, hugepages=pools).conditions)
    paths = [f"{hugepages.NODE}/node{node}/hugepages/hugepages-2048kB/nr_hugepages" for node in (0, 1)]
    assert [kernel.files.read(path) for path in paths] == ["20", "4"]


def test_a_size_that_a_kernel_with_pages_of_64_kb_does_not_have_is_named_with_those_it_has(kernel: Kernel) -> None:
    for folder in (hugepages.ALL, *(f"{hugepages.NODE}/node{node}/hugepages" for node in (0, 1))):
        kernel.tree.remove(f"{folder}/hugepages-1048576kB")
        for size in (524288, 16777216):
            kernel.tree.put(f"{folder}/hugepages-{size}kB/nr_hugepages", "0")
    result = settle(kernel, hugepages=[{"size": "2M", "count": 8}, {"size": "1G", "count": 2}])
    assert not is_ready(result.conditions)
    (blocked,) = [each for each in result.outcomes if each.result == "blocked"]
    assert "there are no huge pages of 1G (this machine has 16777216kB, 2048kB, 524288kB)" in blocked.error
    assert kernel.files.read(f"{hugepages.ALL}/hugepages-2048kB/nr_hugepages") == "8"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param([], [{"size": "2M", "count": 24}], id="kubernetes-72307"),
        pytest.param(
            [{"size": "2M", "count": 40}], [{"size": "2M", "count": 8, "numa_node": 1}], id="kubernetes-111757"
        ),
        pytest.param([{"size": "2M", "count": 8}], [{"size": "2M", "count": 16}], id="kubernetes-118559"),
    ],
)
def test_a_kubelet_that_has_counted_other_huge_pages_is_named_until_it_restarts(first: Any, then: Any) -> None:
    kernel = two_nics()
    node = Node(kernel, more={"hugepages": first})
    counted = node.look().get("KubeletHugepages")
    assert (counted.reason if counted else "") == ("Counted" if first else ""), "no condition without huge pages"
    kernel.host.kubelet_started = 1000.0
    node.more = {"hugepages": then}
    node.look()
    node.now += 60
    stale = node.look()["KubeletHugepages"]
    before = sum(pool["count"] for pool in first)
    assert (stale.status, stale.severity) == ("False", "warn")
    assert f"{before} of 2M, and there are" in stale.message
    assert stale.remedy.startswith("drain the Node")
    kernel.host.kubelet_started = 2000.0
    node.now += 60
    assert node.look()["KubeletHugepages"].reason == "Counted"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        pytest.param({"containerd": 65536}, "MemlockLimited", id="kubekey-2609"),
        pytest.param({"containerd": 8 << 20}, "MemlockLimited", id="cluster-api-provider-linode-860"),
        pytest.param({"dockerd": 8 << 20, "containerd": -1}, "MemlockLimited", id="qdrant-1885"),
        pytest.param({"containerd": -1}, "Unlimited", id="gardenlinux-170"),
    ],
)
def test_a_runtime_that_limits_locked_memory_is_named(kernel: Kernel, limits: dict[str, int], reason: str) -> None:
    kernel.host.locked_memory = limits
    condition = Node(kernel).look()["ContainerMemlock"]
    assert condition.reason == reason
    limited = [name for name, limit in limits.items() if limit >= 0]
    assert all(f"{name} {limits[name]} bytes" in condition.message for name in limited)


FOLDER = "/var/lib/kubelet/device-plugins"


@pytest.mark.parametrize(
    "process",
    [
        pytest.param("kubelet", id="k8s-rdma-shared-dev-plugin-118"),
        pytest.param("k3s-agent", id="k3s-451"),
        "k3s-server",
        "kubelite",
    ],
)
def test_a_kubelet_that_restarts_makes_the_node_unready_only_if_its_socket_stays_away(process: str) -> None:
    kernel = two_nics()
    kernel.host.processes.add(process)
    kernel.tree.put(f"{FOLDER}/kubelet.sock", "")
    node = Node(kernel)
    assert node.look()["DevicePlugins"].reason == "Served"
    kernel.tree.remove(f"{FOLDER}/kubelet.sock")
    node.now += 60
    assert node.look()["DevicePlugins"].status == "True"
    node.now += 60
    lost = node.look()["DevicePlugins"]
    assert (lost.status, lost.reason, lost.severity) == ("False", "NoSocket", "required")


def test_what_is_no_netdev_beside_the_netdevs_is_passed_over(kernel: Kernel) -> None:
    kernel.add_virtual("bond0")
    kernel.tree.put(f"{NET}/bonding_masters", "bond0\n")
    result = settle(kernel, rps={"netdevs": [{"match": "bond*"}]})
    assert is_ready(result.conditions)
    assert not [outcome for outcome in result.outcomes if outcome.result != "applied"]
    assert from_mask(kernel.files.read(f"{NET}/bond0/queues/rx-0/rps_cpus")) == frozenset(range(4))
