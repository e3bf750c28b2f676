"""The DeviceClasses and ResourceClaimTemplates for the two DRA drivers."""

from typing import Any

import pytest
import yaml
from attrs import evolve

from agent.spec.node import from_mapping
from tasks.kubernetes.manifests.device_plugins import SRIOV_DRIVER, DevicePlugins, Dra, Networks
from tasks.kubernetes.manifests.discovered import Discovered, discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.hardware import GPUS, function, hardware, nic, nics, rdma
from tests.deploy.kubernetes.kubernetes_api import faults

DRANET = DevicePlugins("made", shared_rdma=None, sriov=None, nvidia=None, dra=Dra("dra.net"))
SRIOV = evolve(DRANET, dra=Dra(SRIOV_DRIVER), networks=Networks("10.56.217.0/24"))
FILE = "device-classes.yaml"


def vf(address: str, index: int, driver: str = "mlx5_core", transport: str = "RoCE") -> dict[str, Any]:
    """A VF with a netdev and an RDMA device, or one of vfio-pci."""
    netdev = None if driver == "vfio-pci" else f"n{address[-4:].replace('.', 'v')}"
    devices = [rdma(f"mlx5_{address[-4:]}", transport=transport)] if netdev else []
    return function(address, "15b3:101e", netdev, *devices, driver=driver, index=index)


def card(name: str, bus: str, *vfs: dict[str, Any], transport: str = "RoCE", port: int = 0) -> dict[str, Any]:
    """A NIC of the spec."""
    netdev = f"ens{int(bus, 16)}f{port}"
    pf = function(f"0000:{bus}:00.{port}", "15b3:1021", netdev, rdma(f"mlx5_{bus}", transport=transport), vfs=list(vfs))
    return nic(name, pf)


def node(*cards: dict[str, Any], gpus: bool = False, mode: str | None = None) -> Discovered:
    spec = from_mapping({"node_name": "a", "nics": nics(*cards), "rdma": {"netns_mode": mode}})
    return discover(hardware(*cards, others=GPUS if gpus else ()), spec, {})


RAILS = (card("rail0", "18", vf("0000:18:00.1", 0), vf("0000:18:00.2", 1)), card("rail1", "40", vf("0000:40:00.1", 0)))


def objects(wanted: DevicePlugins, **nodes: Discovered) -> dict[tuple[str, str], Any]:
    """The objects by kind and name."""
    made = list(yaml.safe_load_all(manifests(wanted, nodes)[FILE]))
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in made}
    assert len(by_name) == len(made)
    return by_name


def expressions(wanted: DevicePlugins, **nodes: Discovered) -> dict[str, str]:
    """What each class compares the address with, in one line."""
    found = {}
    for (kind, name), each in objects(wanted, **nodes).items():
        if kind == "DeviceClass":
            (selector,) = each["spec"]["selectors"]
            found[name] = " ".join(selector["cel"]["expression"].partition("pciAddress,")[2][:-1].split())
    return found


def test_nothing_is_rendered_unless_it_is_wanted_and_some_node_has_vfs() -> None:
    without = evolve(DRANET, dra=None)
    assert FILE not in manifests(without, {"a": node(*RAILS)})
    assert FILE not in manifests(DRANET, {"a": node(card("rail0", "18"))})
    assert FILE in manifests(DRANET, {"a": node(*RAILS)})
    assert FILE in manifests(DRANET, {"a": node(*RAILS)})["kustomization.yaml"]


@pytest.mark.parametrize("wanted", [DRANET, SRIOV])
def test_a_class_selects_the_vfs_of_its_rail_on_all_nodes(wanted: DevicePlugins) -> None:
    other = node(card("rail0", "19", vf("0000:19:00.1", 0)))
    assert expressions(wanted, a=node(*RAILS), b=other) == {
        "vf-rail0": 'address >= "0000:18:00.1" && address <= "0000:18:00.2" || address == "0000:19:00.1"',
        "vf-rail1": 'address == "0000:40:00.1"',
        "vf": 'address >= "0000:18:00.1" && address <= "0000:18:00.2" || address == "0000:19:00.1" || '
        'address == "0000:40:00.1"',
    }


def test_no_function_that_is_unwanted_is_in_a_range() -> None:
    # The VFs of two ports in turn; one of them is for virtual machines, and the NIC at bus 2b is in no spec.
    even = card("rail0", "2a", vf("0000:2a:00.2", 0), vf("0000:2a:00.4", 1), vf("0000:2a:00.6", 2, "vfio-pci"))
    odd = card("rail1", "2a", vf("0000:2a:00.3", 0), vf("0000:2a:00.5", 1), port=1)
    third = card("rail2", "2c", vf("0000:2c:00.1", 0))
    strange = {**card("x", "2b"), "nic": None}
    assert expressions(DRANET, a=node(even, odd, third, strange)) == {
        "vf-rail0": 'address == "0000:2a:00.2" || address == "0000:2a:00.4"',
        "vf-rail1": 'address == "0000:2a:00.3" || address == "0000:2a:00.5"',
        "vf-rail2": 'address == "0000:2c:00.1"',
        "vf": 'address >= "0000:2a:00.2" && address <= "0000:2a:00.5" || address == "0000:2c:00.1"',
    }


def test_the_expression_for_a_thousand_vfs_is_shorter_than_kubernetes_takes() -> None:
    cards = [
        card(f"rail{n}", f"{n + 16:02x}", *(vf(f"0000:{n + 16:02x}:{1 + i // 8:02x}.{i % 8}", i) for i in range(127)))
        for n in range(8)
    ]
    made = objects(DRANET, a=node(*cards))
    (selector,) = made["DeviceClass", "vf"]["spec"]["selectors"]
    assert len(selector["cel"]["expression"]) < 1024


def test_templates_claim_a_vf_of_any_rail_one_of_each_and_a_gpu_with_one_near_it() -> None:
    made = objects(DRANET, a=node(*RAILS, gpus=True))
    specs = {name: each["spec"]["spec"]["devices"] for (kind, name), each in made.items() if kind != "DeviceClass"}
    requests = {
        name: {each["name"]: each["exactly"]["deviceClassName"] for each in devices["requests"]}
        for name, devices in specs.items()
    }
    both = {"gpu": "gpu.nvidia.com", "vf": "vf"}
    assert requests == {
        "vf": {"vf": "vf"},
        "vf-of-each-rail": {"rail0": "vf-rail0", "rail1": "vf-rail1"},
        "gpu-and-vf": both,
        "gpu-and-vf-numa": both,
    }
    assert specs["gpu-and-vf"]["constraints"] == [{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]
    assert specs["gpu-and-vf-numa"]["constraints"] == [{"matchAttribute": "resource.kubernetes.io/numaNode"}]
    # One rail and no GPUs.
    assert {name for _, name in objects(DRANET, a=node(RAILS[0]))} == {"vf", "vf-rail0"}


def test_the_sriov_driver_gets_a_network_and_a_policy_for_these_vfs_alone() -> None:
    wanted = evolve(SRIOV, dra=Dra(SRIOV_DRIVER, namespace="training"))
    infiniband = card("rail2", "9a", vf("0000:9a:00.1", 0, transport="InfiniBand"), transport="InfiniBand")
    made = objects(wanted, a=node(*RAILS, infiniband, gpus=True))
    for (kind, name), each in made.items():
        assert each["metadata"].get("namespace") == {
            "DeviceClass": None,
            "SriovResourcePolicy": "dra-driver-sriov",
        }.get(kind, "training"), name
        if kind == "DeviceClass":
            (config,) = each["spec"]["config"]
            assert config["opaque"]["parameters"]["netAttachDefName"] == "vf"
    (config,) = made["SriovResourcePolicy", "trackbed"]["spec"]["configs"]
    assert config == {"resourceFilters": [{"pciAddresses": ["0000:18:00.1", "0000:18:00.2", "0000:40:00.1"]}]}
    assert '"type": "sriov"' in made["NetworkAttachmentDefinition", "vf"]["spec"]["config"]
    # That driver publishes no resource.kubernetes.io/numaNode.
    assert ("ResourceClaimTemplate", "gpu-and-vf-numa") not in made
    assert ("DeviceClass", "vf-rail2") not in made


def test_a_name_becomes_what_kubernetes_takes() -> None:
    made = objects(
        DRANET, a=node(card("Rail_0.A", "18", vf("0000:18:00.1", 0)), card("1", "40", vf("0000:40:00.1", 0)))
    )
    (requests,) = [
        each["spec"]["spec"]["devices"]["requests"] for (_, name), each in made.items() if name == "vf-of-each-rail"
    ]
    assert [each["name"] for each in requests] == ["1", "rail-0-a"]
    assert ("DeviceClass", "vf-rail-0-a") in made


def in_turn(first: int) -> Discovered:
    """A host with cards of two ports whose VFs take turns; 127 VFs of each."""
    vfs = [vf(f"0000:{first:02x}:{i // 8 + 1:02x}.{i % 8}", i // 2) for i in range(254)]
    bus = f"{first - 1:02x}"
    return node(card("rail0", bus, *vfs[::2]), card("rail1", bus, *vfs[1::2], port=1))


REFUSED: dict[str, tuple[DevicePlugins, dict[str, Discovered], str]] = {
    "two rails of one name": (
        DRANET,
        {"a": node(card("rail_0", "18", vf("0000:18:00.1", 0)), card("rail-0", "40", vf("0000:40:00.1", 0)))},
        "dra: NICs rail_0 and rail-0 both get the DeviceClass vf-rail-0",
    ),
    **{
        f"{what} at the address": (DRANET, {"a": node(*RAILS), "b": node(other)}, "would also select 0000:18:00.1 of b")
        for what, other in (
            ("another rail", card("rail1", "18", vf("0000:18:00.1", 0))),
            ("a VF for virtual machines", card("rail0", "18", vf("0000:18:00.1", 0, "vfio-pci"))),
            ("a PF", card("rail1", "18", port=1)),
        )
    },
    "a rail with a long name": (
        DRANET,
        {"a": node(card("r" * 64, "18", vf("0000:18:00.1", 0)))},
        "NIC r{64}: .* give the NIC a shorter name",
    ),
    "more ranges than a class can name": (
        DRANET,
        {name: in_turn(0x12 + 16 * n) for n, name in enumerate("abc")},
        "the VFs of rail0 have addresses in 381 ranges",
    ),
    "the SR-IOV driver without a network": (evolve(SRIOV, networks=None), {"a": node(*RAILS)}, "give networks"),
    "the SR-IOV driver in the exclusive mode": (
        SRIOV,
        {"a": node(*RAILS, mode="exclusive")},
        "give rdma.netns_mode shared",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_driver_cannot_serve_is_refused(case: str) -> None:
    wanted, nodes, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        manifests(wanted, nodes)


@pytest.mark.parametrize("wanted", [DRANET, SRIOV])
def test_every_object_of_a_core_kind_is_valid_in_the_api_s_schema(wanted: DevicePlugins) -> None:
    made = objects(wanted, a=node(*RAILS, gpus=True))
    core = [each for each in made.values() if each["apiVersion"] == "resource.k8s.io/v1"]
    assert len(core) == 3 + 4 - (wanted is SRIOV)
    assert {each["metadata"]["name"]: faults(each) for each in core if faults(each)} == {}
