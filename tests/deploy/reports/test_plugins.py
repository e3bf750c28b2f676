"""Public reports about device plugins, NCCL and network managers, tried by their triggers on the deploy's facts."""

from typing import Any

import pytest

from agent.spec.node import from_mapping
from tasks import nccl
from tasks.kubernetes.manifests.configurations import shared_rdma, sriov
from tasks.kubernetes.manifests.device_plugins import DevicePlugins, Networks, SharedRdma, Sriov
from tasks.kubernetes.manifests.discovered import Discovered, discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.conftest import Node, files
from tests.deploy.hardware import (
    CONNECTX,
    EFA,
    IB,
    RAIL0,
    RAIL1,
    SECOND,
    SELECTED,
    UVERBS,
    function,
    hardware,
    has,
    nic,
    rdma,
)
from tests.deploy.kubernetes.test_device_plugins import documents

SHARED = {"shared": from_mapping({"node_name": "a"}), "exclusive": from_mapping(
    {"node_name": "a", "rdma": {"netns_mode": "exclusive"}}
)}  # fmt: skip
IRDMA = nic(
    "rail2", function("0000:61:00.0", "8086:1592", "ens3f0", rdma("irdma0", transport="iWARP", chars=(UVERBS,)))
)
CHELSIO = nic(
    "rail3", function("0000:71:00.4", "1425:6401", "ens4f4", rdma("cxgb4_0", transport="iWARP", chars=(UVERBS,)))
)
X550 = nic("rail2", function("0000:3b:00.0", "8086:1563", "eno1", driver="ixgbe"))
WITHOUT_RDMA = nic(
    "rail2",
    function("0000:c4:00.0", "15b3:1021", "ens5f0", vfs=[function("0000:c4:00.5", "15b3:101e", "ens5f0v4", index=4)]),
)
IN_SPEC_EFA = nic("rail4", EFA)
VF_OF_E810 = function("0000:61:01.0", "8086:1889", "ens3f0v0", rdma("irdma1"), index=0, driver="iavf")
IAVF = nic("rail5", function("0000:61:00.0", "8086:1592", "ens3f0", driver="ice", total_vfs=8, vfs=[VF_OF_E810]))


def node(*functions: Any, mode: str = "shared") -> Discovered:
    return discover(hardware(*functions), SHARED[mode], SELECTED)


def selectors(*nodes: Discovered) -> Any:
    made = shared_rdma(SharedRdma(), {str(number): each for number, each in enumerate(nodes)})
    return made["configList"][0]["selectors"] if made else None


@pytest.mark.parametrize(
    "unfit",
    [
        pytest.param(IRDMA, id="k8s-rdma-shared-dev-plugin-113"),
        pytest.param(CHELSIO, id="k8s-rdma-shared-dev-plugin-44"),
        pytest.param(IN_SPEC_EFA, id="hyperpod-cli-367"),
        pytest.param(X550, id="k8s-rdma-shared-dev-plugin-103"),
        pytest.param(WITHOUT_RDMA, id="spiderpool-4753"),
    ],
)
def test_a_device_that_the_shared_plugin_refuses_is_in_no_configuration(unfit: Any) -> None:
    """The plugin takes no device without umad. Its resource would be empty, and pods would wait for ever."""
    assert selectors(node(unfit)) is None
    assert "rdma-shared-device-plugin.yaml" not in manifests(DevicePlugins("made"), {"a": node(unfit)})
    assert selectors(node(RAIL0, unfit)) == {"vendors": ["15b3"], "deviceIDs": ["101b"]}


def test_a_vf_of_another_driver_than_its_pf_s_is_selected_by_its_own() -> None:
    """The configuration had the drivers of mlx5 for any card (k8s-rdma-shared-dev-plugin 108)."""
    assert "drivers" not in selectors(node(IAVF))
    (pool,) = sriov(Sriov(), {"a": node(IAVF)})
    assert (pool.selectors["drivers"], pool.selectors["devices"]) == (["iavf"], ["1889"])


@pytest.mark.parametrize(
    "mode", [pytest.param("exclusive", id="k8s-rdma-shared-dev-plugin-87"), pytest.param("shared", id="dranet-71")]
)
def test_the_shared_plugin_is_refused_where_it_would_not_start(mode: str) -> None:
    nodes = {"a": node(RAIL0, RAIL1, mode=mode)}
    if mode == "shared":
        assert "rdma-shared-device-plugin.yaml" in manifests(DevicePlugins("made"), nodes)
        return
    with pytest.raises(ValueError, match=r"a has rdma\.netns_mode exclusive, and k8s-rdma-shared-dev-plugin does not"):
        manifests(DevicePlugins("made"), nodes)


def test_a_port_that_a_new_kernel_renamed_is_selected_by_its_new_name() -> None:
    """ens7f0 became ens7f0np0 (openshift-docs 60041)."""

    def names(pf: str) -> Any:
        renamed = {**RAIL0, "netdevs": [{"name": pf, "mtu": 9000, "ifindex": 2}]}
        return [pool.selectors["pfNames"] for pool in sriov(Sriov(), {"a": node(renamed)})]

    assert (names("ens7f0"), names("ens7f0np0")) == ([["ens7f0#0"]], [["ens7f0np0#0"]])


def test_the_networks_of_infiniband_have_no_sriov_cni() -> None:
    """sriov-cni sets MAC addresses, and rebinding a VF makes its RDMA device anew (rdma-cni 21)."""
    made = manifests(DevicePlugins("made", networks=Networks("10.56.217.0/24")), {"a": node(IB)})
    assert '"type": "host-device"' in made["networks.yaml"]
    assert '"type": "sriov"' not in made["networks.yaml"]


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        pytest.param(("mlx5_1", "mlx5_11"), "=mlx5_1,mlx5_11", id="nccl-236"),
        pytest.param(("rocep33s0", "rocep65s0"), "=rocep33s0,rocep65s0", id="rdma-core-487"),
        pytest.param(("mlx5_bond_0", "mlx5_bond_0"), "=mlx5_bond_0", id="nccl-1538"),
        pytest.param(("bnxt_re0", "bnxt_re1"), "=bnxt_re0,bnxt_re1", id="nccl-1412"),
    ],
)
def test_nccl_uses_exactly_the_devices_of_the_spec_s_nics(names: tuple[str, str], listed: str) -> None:
    storage = function("0000:51:00.0", "15b3:101b", "ens3f0", rdma("mlx5_10"))
    rails = [{**each, "rdma": [rdma(name)], "vfs": []} for each, name in zip((RAIL0, RAIL1), names, strict=True)]
    text = nccl.text(nccl.Nccl(network_type=1), hardware(*rails, storage))
    assert f"NCCL_IB_HCA={listed}\n" in text


def test_nccl_s_sockets_use_the_netdev_of_the_default_route_and_none_with_a_longer_name() -> None:
    others = ("netdev bond0", "netdev bond02", "route 10 bond0")
    seen = hardware(nic("rail0", CONNECTX), nic("rail1", SECOND), others=others)
    assert "NCCL_SOCKET_IFNAME==bond0\n" in nccl.text(nccl.Nccl(network_type=1), seen)


@pytest.mark.parametrize(
    ("given", "addresses", "said"),
    [
        pytest.param(None, ("dummy0",), "no address", id="nccl-1053"),
        pytest.param("swp2", ("dummy0",), "no address", id="nccl-1053-given"),
        pytest.param(None, ("dummy0", "swp2"), "IFNAME==swp2\n", id="another-default-route"),
        pytest.param(None, ("dummy0", "swp1", "swp2"), "IFNAME==swp1\n", id="the-first"),
        pytest.param("dummy0", ("dummy0",), "IFNAME==dummy0\n", id="of-the-dummy"),
    ],
)
def test_nccl_s_sockets_have_a_netdev_with_an_address(given: str | None, addresses: tuple[str, ...], said: str) -> None:
    """Of a node whose routes are learnt by links without addresses (BGP unnumbered)."""
    lines = [*(f"netdev {name}" for name in ("dummy0", "swp1", "swp2")), "route 10 swp1", "route 20 swp2"]
    seen = hardware(nic("rail0", CONNECTX), others=(*lines, *(f"address {name}" for name in addresses)))
    try:
        answer = nccl.text(nccl.Nccl(network_type=1, interface=given), seen)
    except ValueError as error:
        answer = str(error)
    assert said in answer


@pytest.mark.parametrize(
    ("layout", "value"),
    [pytest.param("rails", 0, id="nccl-2097"), pytest.param("rail-optimized", 2, id="nccl-tests-150")],
)
def test_rings_stay_on_a_rail_where_rails_are_not_connected(layout: Any, value: int) -> None:
    seen = hardware(nic("rail0", CONNECTX), nic("rail1", SECOND))
    assert f"NCCL_CROSS_NIC={value}\n" in nccl.text(nccl.Nccl(network_type=1, layout=layout), seen)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("sriov-device-plugin.yaml", id="sriov-network-device-plugin-586"),
        pytest.param("rdma-shared-device-plugin.yaml", id="network-operator-2989"),
    ],
)
def test_a_plugin_does_not_start_where_the_kubelet_has_its_folders_elsewhere(file: str) -> None:
    """If the pod made the folder, the kubelet would not look there: no resource, and nothing that says why."""
    made = manifests(DevicePlugins("made"), {"a": node(RAIL0)})[file]
    (pod,) = (each["spec"]["template"]["spec"] for each in documents(made) if each["kind"] == "DaemonSet")
    folders = [volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume]
    kubelet_s = {each["path"]: each["type"] for each in folders if each["path"].startswith("/var/lib/kubelet/")}
    assert kubelet_s == {f"/var/lib/kubelet/{name}": "Directory" for name in ("device-plugins", "plugins_registry")}


@pytest.mark.parametrize(
    ("given", "named"),
    [pytest.param({}, True, id="nccl-1298"), pytest.param({"topology": "/opt/topo.xml"}, False, id="nccl-1008")],
)
def test_a_topology_of_the_image_is_not_lost_without_a_word_and_its_graph_is_not_kept(
    node: Node, given: dict[str, str], named: bool
) -> None:
    node.data = {"nccl": {"network_type": 1, **given}}
    image_s = "NCCL_TOPO_FILE=/opt/topo.xml\nNCCL_GRAPH_FILE=/opt/graph.xml\n"
    result = node.deploy(nccl.configure, {**has(CONNECTX, SECOND), **files(**{nccl.PATH: image_s})})
    (made,) = result.uploads.values()
    assert (b"TOPO" in made, b"GRAPH" in made) == (not named, False)
    assert any("give nccl.topology '/opt/topo.xml'" in line for line in result.log) == named
