"""The NetworkAttachmentDefinitions: a macvlan on each rail, and the VFs of each pool."""

import json
from typing import Any

import pytest
import yaml
from attrs import evolve

from agent.spec.node import from_mapping
from tasks.kubernetes.manifests.device_plugins import DevicePlugins, Networks
from tasks.kubernetes.manifests.discovered import Discovered, discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.hardware import IB, INTEL, PASSED, RAIL0, RAIL1, SELECTED, hardware

PASSED_ON = {**INTEL, "vfs": [PASSED]}
ADDRESSES = {"type": "whereabouts", "range": "10.56.217.0/24"}
WANTED = DevicePlugins("made", networks=Networks("10.56.217.0/24"))
EXCLUSIVE = evolve(WANTED, shared_rdma=None)
RESOURCE = "k8s.v1.cni.cncf.io/resourceName"


def node(*functions: Any, mode: str | None = None) -> Discovered:
    nics = [{"name": "rail0", "select": {"pci": "0000:21:00.0"}}]
    spec = from_mapping({"node_name": "a", "nics": nics, "rdma": {"netns_mode": mode}})
    return discover(hardware(*functions), spec, SELECTED)


def networks(wanted: DevicePlugins = WANTED, **nodes: Discovered) -> dict[str, Any]:
    """The configurations by the networks' names, and with the resource that the pod needs."""
    made = manifests(wanted, nodes)["networks.yaml"]
    by_name = {}
    for each in yaml.safe_load_all(made):
        config = json.loads(each["spec"]["config"])
        assert config["cniVersion"] == "0.3.1"
        assert config["name"] == each["metadata"]["name"]
        by_name[config.pop("name")] = (config, each["metadata"].get("annotations", {}).get(RESOURCE))
        del config["cniVersion"]
    return by_name


def test_a_macvlan_on_each_rail_and_a_vf_of_each_pool() -> None:
    macvlan = {"type": "macvlan", "mode": "bridge", "mtu": 9000, "ipam": ADDRESSES}
    assert networks(a=node(RAIL0, PASSED_ON), b=node(RAIL1)) == {
        "macvlan-ens1f0": ({**macvlan, "master": "ens1f0"}, None),
        "macvlan-ens2f0": ({**macvlan, "master": "ens2f0"}, None),
        "sriov-vf-rdma": ({"type": "sriov", "ipam": ADDRESSES}, "sriov/vf_rdma"),
        "host-device-vf-rdma": ({"type": "host-device", "ipam": ADDRESSES}, "sriov/vf_rdma"),
        # No netdev, hence no address, and nothing for host-device to move.
        "sriov-vf-vfio": ({"type": "sriov"}, "sriov/vf_vfio"),
    }


def test_a_macvlan_s_mtu_is_the_smallest_of_its_masters() -> None:
    small = {**RAIL1, "netdevs": [{"name": "ens2f0", "mtu": 1500}]}
    ((config, _),) = networks(a=node(small), b=node(RAIL1)).values()
    assert config["mtu"] == 1500


@pytest.mark.parametrize(
    ("master", "kind", "made"),
    [
        ("bond0", "bond", ["macvlan-bond0"]),
        ("vrf1", "vrf", ["macvlan-ens1f0", "macvlan-ens2f0"]),
        ("ovs-system", "openvswitch", []),
        ("eth0", "", []),
    ],
)
def test_a_macvlan_is_on_a_bond_and_on_no_member_of_another(master: str, kind: str, made: list[str]) -> None:
    """Of a VRF a member keeps what it receives; hv_netvsc has no kind."""
    rails = [
        {**rail, "vfs": [], "netdevs": [{**rail["netdevs"][0], "master": master, "member_of": kind}]}
        for rail in (RAIL0, RAIL1)
    ]
    texts = manifests(WANTED, {"a": node(*rails)})
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(texts.get("networks.yaml", "")) if each]
    assert names == made
    pods = texts.get("macvlan-test-pods.yaml", "")
    assert ("macvlan-" in pods) == bool(made)


def test_netdevs_whose_networks_would_have_one_name_are_refused() -> None:
    odd = [{**rail, "netdevs": [{"name": name, "mtu": 9000}]} for rail, name in ((RAIL0, "rail_0"), (RAIL1, "Rail_0"))]
    with pytest.raises(ValueError, match="Rail_0 and rail_0 both get the network macvlan-rail-0"):
        networks(a=node(*odd))


def test_ipoib_has_no_macvlans() -> None:
    assert list(networks(a=node(RAIL1, {**IB, "vfs": []}))) == ["macvlan-ens2f0"]


def test_vfs_on_infiniband_are_a_resource_of_their_own_and_are_moved_by_host_device() -> None:
    nodes = {"a": node(RAIL0, IB)}
    made = networks(WANTED, **nodes)
    assert {name: resource for name, (_, resource) in made.items() if resource} == {
        "sriov-vf-rdma": "sriov/vf_rdma",
        "host-device-vf-rdma": "sriov/vf_rdma",
        "host-device-vf-ib": "sriov/vf_ib",
    }
    pods = yaml.safe_load_all(manifests(WANTED, nodes)["sriov-ib-test-pods.yaml"])
    for pod in pods:
        assert pod["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "default/host-device-vf-ib"}
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {"sriov/vf_ib": "1"}


def test_host_local_addresses_are_assigned_on_each_node() -> None:
    ((config, _),) = networks(evolve(WANTED, networks=Networks("10.0.0.0/24", "host-local")), a=node(RAIL1)).values()
    assert config["ipam"] == {"type": "host-local", "subnet": "10.0.0.0/24"}


def test_in_the_exclusive_mode_rdma_cni_moves_the_device_after_the_netdev() -> None:
    rendered = networks(EXCLUSIVE, a=node(RAIL0, PASSED_ON, mode="exclusive"))
    sriov, host_device = {"type": "sriov", "ipam": ADDRESSES}, {"type": "host-device", "ipam": ADDRESSES}
    assert rendered["sriov-vf-rdma"] == ({"plugins": [sriov, {"type": "rdma"}]}, "sriov/vf_rdma")
    assert rendered["host-device-vf-rdma"] == ({"plugins": [host_device, {"type": "rdma"}]}, "sriov/vf_rdma")
    assert rendered["sriov-vf-vfio"] == ({"type": "sriov"}, "sriov/vf_vfio")


def test_one_network_for_vfs_of_both_modes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sriov: a has rdma.netns_mode exclusive and b has not.*folders of their own"):
        networks(EXCLUSIVE, a=node(RAIL0, mode="exclusive"), b=node(RAIL0, mode="shared"))


def test_nodes_without_vfs_may_be_in_another_mode() -> None:
    rendered = networks(EXCLUSIVE, a=node(RAIL0, mode="exclusive"), b=node({**RAIL0, "vfs": []}))
    assert "plugins" in rendered["sriov-vf-rdma"][0]
