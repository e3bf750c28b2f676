"""Public reports about RDMA devices, their GIDs and the subsystem's network namespaces, tried by their triggers."""

import errno
from typing import Any

import pytest

from agent.hardware.functions import vf_addresses
from agent.hardware.rdma import Reader
from agent.report.records import Condition
from agent.report.verdict import is_ready
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.readiness import Node
from tests.sim.refusing import refusing
from tests.sim.two_nics import IPOIB, NAME0, PF0

DEVICE = "rocep33s0"
LINK_LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:0001"
V4 = "0000:0000:0000:0000:0000:ffff:0a00:000b"
V4_LINK_LOCAL = "0000:0000:0000:0000:0000:ffff:a9fe:0a01"
ZERO = ":".join(["0000"] * 8)
ULA = "fd93:0000:0000:0000:0000:0000:0000:0001"
OF_PF = nic("rail0", PF0, rdma={"gid_type": "RoCE v2"})


@pytest.fixture
def kernel(kernel: Kernel) -> Kernel:
    kernel.rdma.add(PF0, DEVICE, NAME0)
    return kernel


def conditions(kernel: Kernel, *nics: Any, **more: Any) -> dict[str, Condition]:
    return Node(kernel, more={"nics": list(nics), **more}).look()


def gids(kernel: Kernel, *given: tuple[str, ...]) -> None:
    for index, (gid, kind, *netdev) in enumerate(given):
        kernel.rdma.set_gid(DEVICE, index, gid, kind, *(netdev or [NAME0]))


@pytest.mark.parametrize(
    ("table", "wanted", "good"),
    [
        pytest.param([(LINK_LOCAL, "RoCE v1"), (LINK_LOCAL, "RoCE v2")], {"gid_ipv4": True}, False, id="nccl-769"),
        pytest.param([(LINK_LOCAL, "RoCE v2")], {"gid_ipv4": True}, False, id="nccl-426"),
        pytest.param([(LINK_LOCAL, "RoCE v2"), (ULA, "RoCE v2")], {}, True, id="uccl-803"),
        pytest.param([(LINK_LOCAL, "RoCE v2"), (ULA, "RoCE v2")], {"gid_ipv4": True}, False, id="nccl-1131"),
        pytest.param([(LINK_LOCAL, "RoCE v2")] * 5 + [(V4, "RoCE v2")], {"gid_ipv4": True}, True, id="nccl-2157"),
        pytest.param([(LINK_LOCAL, "RoCE v2"), (V4, "RoCE v1")], {"gid_ipv4": True}, False, id="ucx-7785"),
        pytest.param([(V4_LINK_LOCAL, "RoCE v2")], {"gid_ipv4": True}, False, id="torchcomms-2945"),
        pytest.param([(LINK_LOCAL, "RoCE v2"), (V4, "RoCE v2")], {"gid_ipv4": True}, True, id="mooncake-2747"),
        pytest.param([(V4, "RoCE v1")], {}, False, id="ydb-29878"),
        pytest.param(
            [(LINK_LOCAL, "RoCE v1"), (LINK_LOCAL, "RoCE v2"), (V4, "RoCE v1"), (V4, "RoCE v2")],
            {"gid_ipv4": True},
            True,
            id="rocshmem-215",
        ),
        pytest.param([(LINK_LOCAL, "RoCE v2"), (V4, "RoCE v2", "vlan7")], {"gid_ipv4": True}, True, id="ucx-5996"),
        pytest.param([(ZERO, "RoCE v2")], {}, False, id="ucx-3786"),
        ([("N/A", "RoCE v2")], {"gid_ipv4": True}, False),
        pytest.param([(ZERO, "IB/RoCE v1")] * 6 + [(V4, "RoCE v2")], {"gid_ipv4": True}, True, id="nccl-1587"),
        pytest.param([(ZERO, "RoCE v2")] * 4 + [(LINK_LOCAL, "RoCE v2"), (V4, "RoCE v2")], {}, True, id="nccl-1573"),
        ([(LINK_LOCAL, "RoCE v2"), (V4, "RoCE v2")], {"gid_ipv6": True}, False),
        ([(LINK_LOCAL, "RoCE v2"), (V4, "RoCE v2"), (ULA, "RoCE v2")], {"gid_ipv6": True}, True),
        ([(LINK_LOCAL, "RoCE v2"), (ULA, "RoCE v1")], {"gid_ipv6": True}, False),
        ([(V4, "RoCE v2"), (LINK_LOCAL, "RoCE v2"), (ULA, "RoCE v2")], {"gid_ipv4": True, "gid_ipv6": True}, True),
        ([(ULA, "RoCE v2"), (V4_LINK_LOCAL, "RoCE v2")], {"gid_ipv4": True, "gid_ipv6": True}, False),
        ([(V4, "RoCE v2"), (LINK_LOCAL, "RoCE v2")], {"gid_ipv4": True, "gid_ipv6": True}, False),
    ],
)
def test_a_port_has_the_gid_that_the_fabric_routes(
    kernel: Kernel, table: list[tuple[str, ...]], wanted: dict[str, Any], good: bool
) -> None:
    gids(kernel, *table)
    seen = conditions(kernel, {**OF_PF, "rdma": {"gid_type": "RoCE v2", **wanted}})
    assert (seen["RdmaPorts"].status == "True") is good, seen["RdmaPorts"]
    assert is_ready(seen.values()) is good


@pytest.mark.parametrize(
    ("layer", "node_type", "gid_type"),
    [
        pytest.param("Unknown", "7: unspecified", "RoCE v2", id="nvsentinel-1750"),
        ("InfiniBand", "1: CA", "RoCE v2"),
        ("Ethernet", "1: CA", "IB"),
    ],
)
def test_a_type_of_gid_that_a_port_cannot_have_is_said_to_be_so(layer: str, node_type: str, gid_type: str) -> None:
    """EFA has ports without a link layer."""
    kernel = Kernel()
    kernel.add_nic(PF0, "", "02:00:00:00:01:00", driver="efa", ids=("020000", "1d0f", "efa1"))
    kernel.rdma.add(PF0, "rdmap33s0", None, node_type=node_type, link_layer=layer)
    nic = {"name": "rail0", "select": {"pci": PF0}}
    assert is_ready(conditions(kernel, {**nic, "rdma": {}}).values())
    message = conditions(kernel, {**nic, "rdma": {"gid_type": gid_type}})["RdmaPorts"].message
    assert f"no {gid_type} GID (its link layer is {layer}: leave gid_type out)" in message


def test_a_vf_that_comes_back_without_its_rdma_device_is_named(kernel: Kernel) -> None:
    """In exclusive mode the device stays in the pod's namespace (kubernetes-sigs/dranet 177)."""
    kernel.rdma.rxe, kernel.rdma.mode = True, "exclusive"
    nic = {"name": "rail0", "select": {"pci": PF0}, "vfs": {"count": 2}, "rdma": {"pf": False, "vfs": True}}
    node = Node(kernel, more={"nics": [nic], "rdma": {"netns_mode": "exclusive"}})
    assert node.look()["RdmaDevices"].status == "True"
    vf = vf_addresses(kernel.files, PF0)[1]
    (device,) = Reader(kernel.files).of(vf)
    kernel.move_away(vf)
    kernel.rdma.delete(device)
    assert node.look()["RdmaDevices"].status == "True"
    kernel.rdma.rxe = False
    kernel.come_back(vf, "eth1")
    lacking = node.look()["RdmaDevices"]
    assert (lacking.status, lacking.reason, lacking.severity) == ("False", "DeviceMissing", "required")
    assert f"{PF0}#1" in lacking.message
    kernel.rdma.add(vf, device, kernel.netdev(vf).name)
    assert node.look()["RdmaDevices"].status == "True"


@pytest.mark.parametrize(
    ("mode", "refused"),
    [
        pytest.param("exclusive", errno.EBUSY, id="rdma-cni-39"),
        pytest.param("shared", errno.EBUSY, id="k8s-rdma-shared-dev-plugin-84"),
    ],
)
def test_a_mode_that_the_kernel_refuses_now_names_the_module_parameter(kernel: Kernel, mode: str, refused: int) -> None:
    kernel.rdma.mode = "shared" if mode == "exclusive" else "exclusive"
    kernel.rdma.other_netns = True
    kernel.fault = refusing(refused, "netns_mode")
    node = Node(kernel, more={"nics": [], "rdma": {"netns_mode": mode}})
    assert not is_ready(node.look().values())
    assert node.last is not None
    (outcome,) = [each for each in node.last.outcomes if each.result != "applied"]
    assert "ib_core" in f"{outcome.error} {outcome.remedy} {outcome.change.remedy}"


def roce_vfs(**vfs: Any) -> tuple[Kernel, Node]:
    kernel = Kernel()
    kernel.add_nic(PF0, NAME0, "02:00:00:00:01:00", driver="mlx5_core")
    kernel.rdma.made_of_vfs[PF0] = {"prefix": "mlx5_"}
    nic = {"name": "rail0", "select": {"pci": PF0}, "vfs": {"count": 2, **vfs}, "rdma": {"pf": False, "vfs": True}}
    return kernel, Node(kernel, more={"nics": [nic]})


def node_guids(kernel: Kernel) -> set[str]:
    devices = kernel.files.names("/sys/class/infiniband")
    return {kernel.files.read(f"/sys/class/infiniband/{device}/node_guid") for device in devices}


NO_GUID = "0000:0000:0000:0000"


@pytest.mark.parametrize(
    "autoprobe",
    [pytest.param("1", id="sriov-network-operator-267"), pytest.param("0", id="openshift-sriov-network-operator-219")],
)
def test_vfs_on_ethernet_have_node_guids(autoprobe: str) -> None:
    kernel, node = roce_vfs()
    kernel.tree.put(f"/sys/bus/pci/devices/{PF0}/sriov_drivers_autoprobe", autoprobe)
    seen = node.look()
    assert seen["RdmaNodeGuids"].status == "True"
    assert len(node_guids(kernel)) == 2
    assert NO_GUID not in node_guids(kernel)


def test_a_device_without_a_node_guid_is_named_with_the_remedy() -> None:
    kernel, node = roce_vfs(derive_macs=False)
    lacking = node.look()["RdmaNodeGuids"]
    assert node_guids(kernel) == {NO_GUID}
    assert (lacking.status, lacking.reason, lacking.severity) == ("False", "NodeGuidMissing", "warn")
    assert f"mlx5_0 ({PF0}#0), mlx5_1 ({PF0}#1): no node GUID" in lacking.message


def test_an_infiniband_card_whose_rdma_driver_is_not_loaded_is_named_with_the_remedy() -> None:
    """The initramfs has mlx5_core and no mlx5_ib, and without it there is no IPoIB netdev (rdma-core 818)."""
    kernel = Kernel()
    kernel.add_nic(PF0, "", "02:00:00:00:01:00", driver="mlx5_core", ids=("020700", "15b3", "1021"))
    node = Node(kernel, more={"nics": [nic("rail0", PF0, rdma={})]})
    seen = node.look()
    assert "load the RDMA driver of mlx5_core" in seen["RdmaDevices"].message
    assert node.last is not None
    assert any("load its RDMA driver and ib_ipoib" in each.remedy for each in node.last.outcomes)
    kernel.unbind(PF0)
    kernel.rdma.made[PF0] = [{"name": "mlx5_0", "netdev": None, "link_layer": "InfiniBand"}]
    kernel.bind(PF0, "ibp33s0", IPOIB, "mlx5_core")
    assert is_ready(node.look().values())


def test_each_rdma_module_that_is_not_loaded_is_named(kernel: Kernel) -> None:
    """A node without the service that loads them (openshift/sriov-network-operator 20)."""
    kernel.rdma.delete(DEVICE)
    kernel.rdma.add(PF0, DEVICE, NAME0, uverbs=False, umad=False)
    kernel.tree.remove("/dev/infiniband")
    message = conditions(kernel, {**OF_PF, "rdma": {}})["RdmaCharDevices"].message
    assert all(f"load {module}" in message for module in ("ib_uverbs", "ib_umad", "rdma_ucm"))


def test_a_vf_on_infiniband_without_guid_gets_one_and_its_port_waits_for_the_subnet_manager() -> None:
    """Its node GUID is 0, and its port stays in INIT (network-operator 1646)."""
    kernel = Kernel()
    kernel.rdma.made_of_vfs[PF0] = {"prefix": "mlx5_", "link_layer": "InfiniBand"}
    kernel.add_nic(PF0, "ibp33s0", IPOIB, driver="mlx5_core")
    kernel.rdma.add(PF0, "mlx5_9", None, link_layer="InfiniBand")
    nic = {"name": "rail0", "select": {"pci": PF0}, "vfs": {"count": 1}, "rdma": {"vfs": True}}
    node = Node(kernel, more={"nics": [nic]})
    assert is_ready(node.look().values())
    kernel.tree.put("/sys/class/infiniband/mlx5_0/node_guid", NO_GUID)
    node.now += 60
    assert is_ready(node.look().values())
    assert kernel.files.read("/sys/class/infiniband/mlx5_0/node_guid") != NO_GUID
    kernel.tree.put("/sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT")
    node.now += 60
    assert "it waits for a subnet manager" in node.look()["RdmaPorts"].message


def test_a_device_below_an_auxiliary_device_is_its_netdev_s(kernel: Kernel) -> None:
    """It is no child of the PCI function, as irdma was to have it (rdma-core 1248)."""
    kernel.rdma.delete(DEVICE)
    assert "no RDMA device" in conditions(kernel, OF_PF)["RdmaDevices"].message
    kernel.rdma.add(None, DEVICE, NAME0)
    kernel.tree.link(f"/sys/class/infiniband/{DEVICE}/device", "../../../ice.roce.0")
    gids(kernel, (V4, "RoCE v2"))
    assert is_ready(conditions(kernel, OF_PF).values())
