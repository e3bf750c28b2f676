"""Which functions of a node are NICs of its spec and which are not, and which ones the plugins' selectors match."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.hardware.functions import vf_addresses
from agent.report.records import to_plain
from agent.spec.node import from_mapping
from cli.inspection import inspect
from tasks.hardware import NodeHardware
from tasks.kubernetes.manifests.configurations import shared_rdma, sriov
from tasks.kubernetes.manifests.device_plugins import SharedRdma, Sriov
from tasks.kubernetes.manifests.discovered import Discovered, discover, read_nodes, to_text
from tests.deploy.fake import deployed
from tests.deploy.hardware import CONNECTX, ERDMA, SECOND, VF, VIRTIO, function, hardware, has, nic, rdma
from tests.programs import failure
from tests.sim.kernel import Kernel
from tests.stand_ins import text_file

SPEC = from_mapping({"node_name": "a", "nics": [{"name": "rail0", "select": {"pci": "0000:21:00.0"}}]})
STORAGE = function("0000:c1:00.0", "15b3:101b", "ens9f0", rdma("mlx5_9"))
IDS = {"vendors": ["15b3"], "deviceIDs": ["101b"]}


def node(*functions: Any) -> Discovered:
    return discover(hardware(*functions), SPEC, {"rdma": "hca"})


RAILS = (nic("rail0", CONNECTX, vfs=[]), nic("rail1", SECOND))


def selected(**nodes: Discovered) -> Any:
    return shared_rdma(SharedRdma(), nodes)["configList"][0]["selectors"]


NAMED = {**IDS, "ifNames": ["ens1f0", "ens2f0"]}
OTHER = nic("fabric0", function("0000:61:00.0", "8086:1592", "ens3", rdma("irdma0")))
NAMELESS = nic("rail1", SECOND, netdevs=[])
SELECTED: dict[str, tuple[dict[str, Discovered], dict[str, Any]]] = {
    "no other card has the PCI IDs": ({"a": node(*RAILS, VIRTIO), "b": node(RAILS[0], ERDMA)}, IDS),
    "a storage card of the same PCI ID": ({"a": node(*RAILS, STORAGE), "b": node(*RAILS)}, NAMED),
    "a storage card of another host": ({"a": node(*RAILS), "b": node(*RAILS, STORAGE)}, NAMED),
    "a storage card without an RDMA device": ({"a": node(*RAILS, {**STORAGE, "rdma": []})}, IDS),
    "a stranger with the vendor of one NIC and the device of another": (
        {"a": node(*RAILS, OTHER, function("0000:62:00.0", "15b3:1592", "ens4", rdma("mlx5_7")))},
        {"vendors": ["15b3", "8086"], "deviceIDs": ["101b", "1592"], "ifNames": ["ens1f0", "ens2f0", "ens3"]},
    ),
    "a VF with its PF's PCI ID": (
        {"a": node(nic("rail0", CONNECTX, vfs=[{**VF, "device": "101b"}]))}, {**IDS, "ifNames": ["ens1f0"]},
    ),
    "a NIC without a netdev": ({"a": node(NAMELESS)}, IDS),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "selectors"), SELECTED.values(), ids=SELECTED)
def test_the_selectors_match_the_nics_of_the_spec_alone(nodes: dict[str, Discovered], selectors: Any) -> None:
    assert selected(**nodes) == selectors


def test_without_a_nic_of_the_spec_there_is_nothing_to_share() -> None:
    assert shared_rdma(SharedRdma(), {"a": node(CONNECTX, SECOND, STORAGE)}) == {}


def test_a_spec_without_nics_means_all_of_them() -> None:
    discovered = discover(hardware(CONNECTX, {**SECOND, "netdevs": []}, VIRTIO), from_mapping({"node_name": "a"}), {})
    assert {each.address: each.nic for each in discovered.functions} == {
        "0000:00:05.0": "ens5",
        "0000:21:00.0": "ens1f0",
        "0000:21:00.1": "ens1f0",
        "0000:41:00.0": "0000:41:00.0",
    }
    assert selected(a=discovered) == IDS


def rails(**nodes: Discovered) -> dict[str, Any]:
    """The selectors of each resource."""
    made = shared_rdma(SharedRdma(resource_name="hca", rails=True), nodes)["configList"]
    assert {(each["resourcePrefix"], each["rdmaHcaMax"]) for each in made} == {("rdma", SharedRdma().rdma_hca_max)}
    return {each["resourceName"]: each["selectors"] for each in made}


ELSEWHERE = nic("rail1", SECOND, netdevs=[{"name": "ens5", "mtu": 9000}])
RAIL_RESOURCES: dict[str, tuple[dict[str, Discovered], dict[str, Any]]] = {
    "two rails": (
        {"a": node(*RAILS), "b": node(RAILS[0], ELSEWHERE), "c": node(ERDMA)},
        {"hca": IDS, "rail0": {**IDS, "ifNames": ["ens1f0"]}, "rail1": {**IDS, "ifNames": ["ens2f0", "ens5"]}},
    ),
    "a sole rail needs no netdev's name": ({"a": node(RAILS[0])}, {"hca": IDS, "rail0": IDS}),
    "characters that the plugin does not allow": (
        {"a": node(nic("rail.0-a", CONNECTX, vfs=[]))}, {"hca": IDS, "rail_0_a": IDS},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "resources"), RAIL_RESOURCES.values(), ids=RAIL_RESOURCES)
def test_each_rail_is_a_resource_besides_the_shared_one(nodes: dict[str, Discovered], resources: Any) -> None:
    assert rails(**nodes) == resources


def test_the_rails_of_vfs_are_all_vfs_of_a_nic() -> None:
    vfs = [{**VF, "address": f"0000:21:00.{i}", "index": i, "netdevs": [{"name": f"v{i}", "mtu": 1}]} for i in (1, 2)]
    other = {**VF, "address": "0000:41:00.1", "netdevs": [{"name": "w0", "mtu": 1}]}
    discovered = rails(a=node(nic("rail0", CONNECTX, rdma=[], vfs=vfs), nic("rail1", SECOND, rdma=[], vfs=[other])))
    assert {name: each.get("ifNames") for name, each in discovered.items()} == {
        "hca": None,
        "rail0": ["v1", "v2"],
        "rail1": ["w0"],
    }


CROSSED = (nic("rail1", CONNECTX, vfs=[]), nic("rail0", SECOND))
REFUSED: dict[str, tuple[dict[str, Discovered], str]] = {
    "an unwanted NIC with the name of another host's NIC": (
        {"a": node(*RAILS), "b": node(RAILS[0], {**STORAGE, "netdevs": SECOND["netdevs"]})},
        r"also select 0000:c1:00.0 of b \(ens2f0, no NIC of the spec\).*systemd.link",
    ),
    "a NIC without a netdev beside an unwanted one": (
        {"a": node(NAMELESS, STORAGE)}, r"0000:41:00.0 of a \(NIC rail1\) has no netdev .* 0000:c1:00.0 of a .*ib_ipoib",
    ),
    "a name that is another rail on another host": (
        {"a": node(*RAILS), "b": node(*CROSSED)}, r"would also select 0000:41:00.0 of a \(ens2f0, NIC rail1\)",
    ),
    **{
        f"{first} and {second}": ({"a": node(nic(first, CONNECTX, vfs=[]), nic(second, SECOND))}, "would both be rdma/")
        for first, second in (("rail-0", "rail.0"), ("hca", "rail1"))
    },
    **{
        name: ({"a": node(nic(name, CONNECTX, vfs=[]))}, "which Kubernetes refuses") for name in ("rail-", "r" * 59)
    },
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "message"), REFUSED.values(), ids=REFUSED)
def test_nics_that_no_selector_tells_apart_and_names_that_no_resource_may_have_are_refused(
    nodes: dict[str, Discovered], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rails(**nodes)


def test_vfs_of_unwanted_nics_are_in_no_pool() -> None:
    unwanted = function("0000:c1:00.0", "15b3:101b", "ens9f0", vfs=[{**VF, "address": "0000:c1:00.1"}])
    (pool,) = sriov(Sriov(), {"a": node(nic("rail0", CONNECTX), unwanted)})
    assert pool.selectors["pfNames"] == ["ens1f0#0"]
    assert "pciAddresses" not in pool.selectors


def test_vfs_of_an_unwanted_nic_with_the_pf_s_name_on_another_host() -> None:
    unwanted = {**CONNECTX, "vfs": [{**VF, "address": "0000:c1:00.1"}]}
    nodes = {"a": node(nic("rail0", CONNECTX)), "b": node(unwanted)}
    (pool,) = sriov(Sriov(), nodes)
    assert pool.selectors["pciAddresses"] == ["0000:21:00.1"]
    with pytest.raises(ValueError, match=r"would also select 0000:21:00.1 of b \(ens1f0v0, no NIC of the spec\)"):
        sriov(Sriov(), nodes | {"b": node(CONNECTX)})


@pytest.mark.parametrize(
    ("others", "name", "vfs"),
    [([VF], "vf_rdma", "0-1"), ([], "vf_rdma", "1"), ([{**VF, "rdma": []}], "vf", "0-1")],
    ids=["like the other VFs", "like the PF", "like VFs without RDMA devices"],
)
def test_a_vf_that_a_pod_has_stays_in_its_pool(others: list[Any], name: str, vfs: str) -> None:
    taken = {**VF, "address": "0000:21:00.2", "index": 1, "netdevs": [], "rdma": []}
    (pool,) = sriov(Sriov(), {"a": node(nic("rail0", CONNECTX, vfs=[*others, taken]))})
    assert (pool.name, pool.selectors["pfNames"]) == (name, [f"ens1f0#{vfs}"])


def test_a_node_s_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    discovered = evolve(node(*RAILS, STORAGE, ERDMA), nccl="NCCL_DEBUG=INFO\n")
    path = tmp_path / "a.json"
    path.write_text(to_text(discovered))
    assert read_nodes({"a": path}) == {"a": discovered}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not a JSON object"),
        ('{"hcas": [["15b3", "1021"]]}', "extra fields found (hcas)"),
        ('{"functions": [{"address": "0000:21:00.0", "vendor": "15b3"}]}', "field missing @ $.functions[0].device"),
        ("[" * 99 + "]" * 99, "nested"),
    ],
)
def test_a_node_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    good, path = tmp_path / "a.json", tmp_path / "b.json"
    good.write_text(to_text(node(*RAILS)))
    path.write_text(text)
    with pytest.raises(ValueError, match="which writes it anew") as caught:
        read_nodes({"a": good, "b": path, "c": tmp_path / "c.json"})
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}: ")
    assert fault in first
    assert "; remove the file and deploy b" in first
    assert second.startswith(f"{tmp_path / 'c.json'}: No such file")


def test_a_deploy_refuses_the_unreadable_file_of_a_host_outside_its_limit(tmp_path: Path) -> None:
    plugins = {"folder": str(tmp_path / "made")}
    data = {"fake_responses": has(*RAILS), "device_plugins": plugins, "labels": {}, "node_name": "a"}
    other = tmp_path / "made" / "nodes" / "@fake_b.json"
    text_file(other, "{")
    render = "from tasks.kubernetes import manifests\nmanifests.render()\n"
    said = failure(deployed(tmp_path, dict.fromkeys("ab", data), render, "--limit", "@fake/a"))
    assert f"device_plugins: {other}: Expecting property name" in said
    assert "remove the file and deploy @fake/b" in said
    assert not (tmp_path / "made" / "kustomization.yaml").exists()


def test_the_agent_s_output_is_parsed() -> None:
    kernel = Kernel()
    kernel.add_nic("0000:21:00.0", "ens1f0", "02:00:00:00:01:00")
    kernel.add_nic("0000:41:00.0", "ens2f0", "02:00:00:00:02:00")
    rail = {"name": "rail1", "select": {"mac": "02:00:00:00:02:00"}, "vfs": {"count": 2}}
    spec = from_mapping({"node_name": "a", "nics": [rail]})
    converge(kernel.machine(), Goal(spec), Memory(lambda: 0.0))
    printed = json.dumps(to_plain(inspect(kernel.machine(), spec)))
    read = NodeHardware().process(["inspection", printed])
    assert read is not None
    functions = discover(read, spec, {}).functions
    assert [(each.address, each.nic, each.index, each.pf) for each in functions] == [
        ("0000:21:00.0", None, None, None),
        ("0000:41:00.0", "rail1", None, None),
        *((address, "rail1", index, "ens2f0") for index, address in vf_addresses(kernel.files, "0000:41:00.0").items()),
    ]
