from __future__ import annotations

from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError

from tasks import nccl
from tasks.common.commands import script
from tests.deploy.conftest import Answers, Node, Result, files
from tests.deploy.hardware import CONNECTX, EFA, ERDMA, GPUS, RAIL1, SECOND, VF, VIRTIO, function, has, nic, nics, rdma

HEADER = "# Written by Trackbed; changes here are overwritten.\n"
TYPE_1 = f"{HEADER}NCCL_SOCKET_IFNAME=eth0\nNCCL_IB_HCA=mlx5\nNCCL_DEBUG=INFO\n"
TYPE_2 = f"{HEADER}NCCL_SOCKET_IFNAME=eth0\nNCCL_IB_DISABLE=1\nNCCL_IB_HCA=\nNCCL_DEBUG=INFO\n"
ROCE = f"{HEADER}NCCL_SOCKET_IFNAME==eth0\nNCCL_IB_HCA==mlx5_0,mlx5_1\nNCCL_DEBUG=INFO\n"
NEW = "/etc/.nccl.conf.new"


def deploy(node: Node, given: dict[str, Any] | None, answers: Answers, **data: Any) -> Result:
    node.data = data if given is None else {"nccl": given, **data}
    return node.deploy(nccl.configure, answers)


def test_nccl_does_not_take_the_header_for_a_setting() -> None:
    assert "=" not in HEADER


@pytest.mark.parametrize("series", ["GU8TF", "GU8TEF", "GX8SF"])
def test_a_cloud_instance_of_type_1_uses_rdma(node: Node, series: str) -> None:
    result = deploy(node, {"series": series}, has(CONNECTX, others=GPUS))
    assert result.uploads[NEW].decode() == TYPE_1
    assert result.flat[-1].endswith("sh put /etc/nccl.conf --")


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"series": "P16EN"}, 16),
        ({"series": "P16EN", "compute_class": "gpu-hpn"}, 4),
        ({"network_type": 2, "compute_class": "gpu-hpn"}, 1),
    ],
)
def test_a_cloud_instance_of_type_2_uses_sockets(node: Node, given: dict[str, Any], gpus: int) -> None:
    result = deploy(node, given, has(CONNECTX, others=(GPUS * 2)[:gpus]))
    assert result.uploads[NEW].decode() == TYPE_2


def test_on_other_nodes_the_names_are_the_node_s_own(node: Node) -> None:
    assert deploy(node, {"network_type": 1}, has(CONNECTX, SECOND, ERDMA)).uploads[NEW].decode() == ROCE


def test_cards_of_no_nic_of_the_spec_are_left_out(node: Node) -> None:
    storage = function("0000:51:00.0", "15b3:101b", "ens3f0", rdma("mlx5_7", (5, "RoCE v2", "10.9.0.1")))
    rails = ({**CONNECTX, "nic": "rail0"}, {**SECOND, "nic": "rail1"})
    assert deploy(node, {"network_type": 1}, has(*rails, storage), nics=nics(*rails)).uploads[NEW].decode() == ROCE


def test_of_a_function_with_several_ports_the_first_one_is_used(node: Node) -> None:
    device = rdma("mlx4_0", (0, "RoCE v2", "10.0.0.1"))
    (port,) = device["ports"]
    device["ports"] = [{**port, "number": number, "netdev": name} for number, name in ((1, "ens1"), (2, "ens1d1"))]
    several = function("0000:03:00.0", "15b3:1003", None, device)
    several["netdevs"] = [{"name": name, "mtu": 1500} for name in ("ens1", "ens1d1")]
    made = deploy(node, {"network_type": 1}, has(several)).uploads[NEW].decode()
    assert "\nNCCL_IB_HCA==mlx4_0:1\n" in made


def of_layers(*layers: str) -> dict[str, Any]:
    """Functions with RDMA devices whose ports have these link layers; ``InfiniBand,Ethernet`` is a device of two ports."""
    functions = []
    for number, given in enumerate(layers):
        device = rdma(f"mlx5_{number}", (0, "RoCE v2", "10.0.0.1"))
        (port,) = device["ports"]
        device["ports"] = [{**port, "number": n, "link_layer": layer} for n, layer in enumerate(given.split(","), 1)]
        functions.append(function(f"0000:{number:02x}:00.0", "15b3:1021", f"net{number}", device))
    return has(*functions)


@pytest.mark.parametrize(
    ("layers", "hcas"),
    [
        (("InfiniBand", "InfiniBand", "Ethernet"), "mlx5_0,mlx5_1"),
        (("InfiniBand", "Ethernet", "Ethernet"), "mlx5_1,mlx5_2"),
        (("InfiniBand,Ethernet", "InfiniBand,Ethernet", "InfiniBand"), "mlx5_0:1,mlx5_1:1,mlx5_2"),
        (("InfiniBand,InfiniBand", "Ethernet", "Ethernet,Ethernet"), "mlx5_1,mlx5_2"),
    ],
)
def test_only_devices_of_the_link_layer_that_most_have_are_listed(
    node: Node, layers: tuple[str, ...], hcas: str
) -> None:
    """DGX H100: rails of InfiniBand, and storage NICs of Ethernet in the same spec. NCCL cannot connect the two."""
    made = deploy(node, {"network_type": 1}, of_layers(*layers)).uploads[NEW].decode()
    assert f"\nNCCL_IB_HCA=={hcas}\n" in made


def test_if_no_link_layer_has_more_devices_the_inventory_must_say_which_are_used(node: Node) -> None:
    result = deploy(node, {"network_type": 1}, of_layers("InfiniBand", "Ethernet"))
    assert result.failed
    assert "as many ports of InfiniBand (mlx5_0) and Ethernet (mlx5_1); NCCL can use one kind; give hcas" in str(
        result.log
    )
    made = deploy(node, {"network_type": 1, "hcas": "=mlx5_0"}, of_layers("InfiniBand", "Ethernet"))
    assert "\nNCCL_IB_HCA==mlx5_0\n" in made.uploads[NEW].decode()


def test_while_the_node_lacks_all_nics_of_its_spec_no_other_card_is_used(node: Node) -> None:
    result = deploy(node, {"network_type": 1}, has(CONNECTX), nics=nics(RAIL1))
    assert result.failed
    assert "the NICs of the spec have no RDMA device" in "\n".join(result.log)


def test_erdma_is_used_only_if_there_is_no_other_device(node: Node) -> None:
    erdma = nic("erdma0", ERDMA)
    result = deploy(node, {"network_type": 1}, has({**VIRTIO, "nic": None}, erdma, CONNECTX), nics=nics(erdma))
    assert "NCCL_IB_HCA==erdma_0\nNCCL_DEBUG" in result.uploads[NEW].decode()


def test_devices_that_nccl_s_own_transport_cannot_use_are_not_listed(node: Node) -> None:
    """AWS's EFA: NCCL uses it by a plugin."""
    alone = deploy(node, {"network_type": 1}, has(VIRTIO, EFA)).uploads[NEW].decode()
    assert alone == f"{HEADER}NCCL_SOCKET_IFNAME==eth0\nNCCL_DEBUG=INFO\n"
    assert deploy(node, {"network_type": 1}, has(CONNECTX, SECOND, EFA)).uploads[NEW].decode() == ROCE


def test_type_2_on_other_nodes_uses_the_netdev_of_the_default_route(node: Node) -> None:
    result = deploy(node, {"network_type": 2}, has(VIRTIO, others=("route 50 ens5",)))
    assert result.uploads[NEW].decode() == TYPE_2.replace("eth0", "=ens5")


def test_if_only_vfs_have_rdma_devices_those_are_used(node: Node) -> None:
    pf = {**CONNECTX, "rdma": [], "vfs": [VF]}
    assert "NCCL_IB_HCA==mlx5_2\n" in deploy(node, {"network_type": 1}, has(pf)).uploads[NEW].decode()


def test_the_index_of_a_gid_is_left_to_nccl(node: Node) -> None:
    """The kernel may move a GID to another index while the node runs, and the file has that of the deploy."""
    assert "GID_INDEX" not in deploy(node, {"network_type": 1}, has(CONNECTX)).uploads[NEW].decode()


def test_values_of_the_inventory_are_used(node: Node) -> None:
    given = {"network_type": 1, "interface": "ens1f0", "hcas": "mlx5_bond", "gid_index": 5, "debug": "WARN"}
    assert deploy(node, given, has(CONNECTX)).uploads[NEW].decode() == (
        f"{HEADER}NCCL_SOCKET_IFNAME==ens1f0\nNCCL_IB_HCA=mlx5_bond\nNCCL_IB_GID_INDEX=5\nNCCL_DEBUG=WARN\n"
    )


@pytest.mark.parametrize(("layout", "value"), [("rails", 0), ("single-switch", 1), ("rail-optimized", 2)])
def test_the_layout_of_the_network_says_whether_rings_cross_nics(node: Node, layout: str, value: int) -> None:
    made = deploy(node, {"network_type": 1, "layout": layout}, has(CONNECTX, SECOND)).uploads[NEW].decode()
    assert made == ROCE.replace("NCCL_DEBUG", f"NCCL_CROSS_NIC={value}\nNCCL_DEBUG")


def test_the_providers_topology_file_is_named(node: Node) -> None:
    made = deploy(node, {"network_type": 1, "topology": "/opt/topo.xml"}, has(CONNECTX, SECOND)).uploads[NEW].decode()
    assert made == ROCE.replace("NCCL_DEBUG", "NCCL_TOPO_FILE=/opt/topo.xml\nNCCL_DEBUG")


def test_nothing_is_done_if_the_file_is_in_place(node: Node) -> None:
    result = deploy(node, {"network_type": 1}, {**has(CONNECTX, SECOND), **files(**{nccl.PATH: ROCE})})
    assert result.flat == []
    assert not any(result.planned.values())


def test_without_the_key_only_trackbed_s_file_is_removed(node: Node) -> None:
    assert deploy(node, None, files(**{nccl.PATH: "NCCL_DEBUG=WARN"})).flat == []
    assert deploy(node, None, files(**{nccl.PATH: ROCE})).flat[0].endswith(f"sh remove {nccl.PATH} --")
    assert deploy(node, None, files()).flat == []


def test_another_s_file_is_kept_and_restored(node: Node) -> None:
    result = deploy(node, {"network_type": 1}, {**has(CONNECTX, SECOND), **files(**{nccl.PATH: "NCCL_TOPO_FILE=/x"})})
    assert result.flat[0] == str(script('ln -f "$1" "$2"', nccl.PATH, "/etc/nccl.conf.previous"))
    assert result.uploads[NEW].decode() == ROCE
    other = {**has(CONNECTX), **files(**{nccl.PATH: ROCE, nccl.PREVIOUS: "NCCL_TOPO_FILE=/x"})}
    assert not any("ln -f" in command for command in deploy(node, {"network_type": 1}, other).flat)
    assert deploy(node, None, other).flat == [str(script('mv -T "$1" "$2"', nccl.PREVIOUS, nccl.PATH))]


@pytest.mark.parametrize(
    ("given", "answers", "message"),
    [
        ({"network_type": 1}, has(VIRTIO), "nccl.network_type: the NICs of the spec have no RDMA device"),
        (
            {"series": "GU8TF"},
            has(CONNECTX),
            "nccl.series: an instance of GU8TF has 8 GPUs, and this node has 0; correct series",
        ),
        (
            {"series": "GU8TF", "compute_class": "gpu-hpn"},
            has(CONNECTX, others=GPUS[:3]),
            "nccl.compute_class: an instance of gpu-hpn has 1, 2, 4 or 8 GPUs, and this node has 3; correct compute_class",
        ),
        (
            {"network_type": 2, "interface": "bond0"},
            has(VIRTIO),
            "interface: the node has no netdev bond0; it has eth0, ens5",
        ),
        pytest.param(
            {"network_type": 1, "gid_index": 3},
            has(CONNECTX, {**SECOND, "rdma": [rdma("mlx5_1", (1, "RoCE v2", "fe80::1"), (5, "RoCE v2", "10.0.0.2"))]}),
            "gid_index: port 1 of mlx5_1 has GIDs that other nodes may reach at 5, not at 3; take gid_index away",
            id="uccl-711",
        ),
        ({"network_type": 2}, {}, "hardware is unknown"),
    ],
)
def test_hardware_that_lacks_something_is_refused_with_nothing_written(
    node: Node, given: dict[str, Any], answers: Answers, message: str
) -> None:
    result = deploy(node, given, answers)
    assert result.failed
    assert message in "\n".join(result.log)
    assert result.uploads == {}


def test_the_inventory_s_gpus_must_be_those_of_the_series(node: Node) -> None:
    with pytest.raises(DeployError) as caught:
        deploy(node, {"series": "P16EN"}, has(CONNECTX), gpus={"count": 8})
    assert "nccl.series: an instance of P16EN has 16 GPUs, and gpus.count is 8; correct one of the two" in str(
        caught.value
    )
