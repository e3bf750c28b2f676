from __future__ import annotations

from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError

from tasks import nccl
from tasks.common.commands import script
from tests.deploy.conftest import Answers, Node, Result
from tests.deploy.hardware import CONNECTX, ERDMA, GPUS, SECOND, VF, VIRTIO, function, has, rdma
from tests.deploy.test_labels import FILES, files

HEADER = "# Written by Trackbed; changes here are overwritten.\n"
TYPE_1 = f"{HEADER}NCCL_SOCKET_IFNAME=eth0\nNCCL_IB_HCA=mlx5\nNCCL_DEBUG=INFO\n"
TYPE_2 = f"{HEADER}NCCL_SOCKET_IFNAME=eth0\nNCCL_IB_DISABLE=1\nNCCL_IB_HCA=\nNCCL_DEBUG=INFO\n"
ROCE = f"{HEADER}NCCL_SOCKET_IFNAME=eth0\nNCCL_IB_HCA==mlx5_0,mlx5_1\nNCCL_IB_GID_INDEX=3\nNCCL_DEBUG=INFO\n"
NEW = "/etc/.nccl.conf.new"


def deploy(node: Node, given: dict[str, Any] | None, answers: Answers, **data: Any) -> Result:
    node.data = data if given is None else {"nccl": given, **data}
    return node.deploy(nccl.configure, answers)


def test_nccl_does_not_take_the_header_for_a_setting() -> None:
    assert "=" not in HEADER


@pytest.mark.parametrize("series", ["GU8TF", "GU8TEF", "GX8SF"])
def test_type_1_of_the_cloud(node: Node, series: str) -> None:
    result = deploy(node, {"series": series}, has(CONNECTX, others=GPUS))
    assert result.uploads[NEW].decode() == TYPE_1
    assert result.flat[-1].endswith(f"sh {NEW} /etc/nccl.conf")


@pytest.mark.parametrize(("series", "gpus"), [("P16EN", 16), ("gpu-hpn", 1), ("gpu-hpn", 16)])
def test_type_2_of_the_cloud(node: Node, series: str, gpus: int) -> None:
    result = deploy(node, {"series": series}, has(CONNECTX, others=(GPUS * 2)[:gpus]))
    assert result.uploads[NEW].decode() == TYPE_2


def test_on_other_nodes_the_names_are_the_node_s_own(node: Node) -> None:
    assert deploy(node, {"network_type": 1}, has(CONNECTX, SECOND, ERDMA)).uploads[NEW].decode() == ROCE


def test_type_2_on_other_nodes(node: Node) -> None:
    result = deploy(node, {"network_type": 2}, has(VIRTIO, others=("route 50 ens5",)))
    assert result.uploads[NEW].decode() == TYPE_2.replace("eth0", "ens5")


def test_where_only_vfs_have_rdma_devices_they_are_it(node: Node) -> None:
    pf = {**CONNECTX, "rdma": [], "vfs": [VF]}
    assert "NCCL_IB_HCA==mlx5_2\n" in deploy(node, {"network_type": 1}, has(pf)).uploads[NEW].decode()


@pytest.mark.parametrize(
    "gids", [(), ((5, "RoCE v2", "10.0.0.2"),), ((1, "RoCE v1", "10.0.0.2"),), ((1, "RoCE v2", "fe80::2"),)]
)
def test_a_gid_index_that_is_not_the_same_on_all_ports_is_left_to_nccl(node: Node, gids: Any) -> None:
    second = function("0000:41:00.0", "15b3:101b", "ens2f0", rdma("mlx5_1", *gids))
    text = deploy(node, {"network_type": 1}, has(CONNECTX, second)).uploads[NEW].decode()
    # Ports without such a GID do not object to the others' index.
    assert ("NCCL_IB_GID_INDEX=3" in text) is (not gids or gids[0][1:] != ("RoCE v2", "10.0.0.2"))


def test_values_of_the_inventory_are_used(node: Node) -> None:
    given = {"network_type": 1, "interface": "ens1f0", "hcas": "mlx5_bond", "gid_index": 5, "debug": "WARN"}
    assert deploy(node, given, has(CONNECTX)).uploads[NEW].decode() == (
        f"{HEADER}NCCL_SOCKET_IFNAME=ens1f0\nNCCL_IB_HCA=mlx5_bond\nNCCL_IB_GID_INDEX=5\nNCCL_DEBUG=WARN\n"
    )


def test_unchanged(node: Node) -> None:
    result = deploy(node, {"network_type": 1}, {**has(CONNECTX, SECOND), **files(**{nccl.PATH: ROCE})})
    assert result.flat == []
    assert not any(result.planned.values())


def test_without_the_key_only_trackbed_s_file_is_removed(node: Node) -> None:
    assert deploy(node, None, files(**{nccl.PATH: "NCCL_DEBUG=WARN"})).flat == []
    assert deploy(node, None, files(**{nccl.PATH: ROCE})).flat[0].endswith(f"sh {nccl.PATH}")
    assert deploy(node, None, {FILES: []}).flat == []


def test_another_s_file_is_kept_and_restored(node: Node) -> None:
    result = deploy(node, {"network_type": 1}, {**has(CONNECTX, SECOND), **files(**{nccl.PATH: "NCCL_TOPO_FILE=/x"})})
    assert result.flat[0] == str(script('cp -p "$1" "$2"', nccl.PATH, "/etc/nccl.conf.previous"))
    assert result.uploads[NEW].decode() == ROCE
    other = {**has(CONNECTX), **files(**{nccl.PATH: ROCE, nccl.PREVIOUS: "NCCL_TOPO_FILE=/x"})}
    assert not any("cp -p" in command for command in deploy(node, {"network_type": 1}, other).flat)
    assert deploy(node, None, other).flat == [str(script('mv -T "$1" "$2"', nccl.PREVIOUS, nccl.PATH))]


@pytest.mark.parametrize(
    ("given", "answers", "message"),
    [
        ({"network_type": 1}, has(VIRTIO), "nccl.network_type: the node has no RDMA device"),
        (
            {"series": "GU8TF"},
            has(CONNECTX),
            "nccl.series: an instance of GU8TF has 8 GPUs, this node has 0; correct series",
        ),
        ({"series": "gpu-hpn"}, has(CONNECTX), "an instance of gpu-hpn has 1 to 16 GPUs, this node has 0"),
        (
            {"network_type": 2, "interface": "bond0"},
            has(VIRTIO),
            "interface: the node has no netdev bond0; it has eth0, ens5",
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give network_type (1: RDMA, 2: sockets only), or series, one of GU8TF"),
        ({"network_type": 3}, "3 is not one of 1, 2"),
        ({"series": "GU8TX"}, '"GU8TX" is not one of GU8TF'),
        ({"series": "P16EN", "network_type": 1}, "network_type: P16EN has type 2; remove network_type"),
        ({"network_type": 2, "hcas": "mlx5"}, "hcas and gid_index have no effect on a network of type 2"),
        ({"network_type": 1, "interface": "eth0 X=1"}, "is not a netdev's name"),
        ({"network_type": 1, "hcas": "mlx5 0"}, "is not a list of RDMA devices"),
        ({"network_type": 1, "gid_index": 256}, "gid_index: 256 is out of range"),
        ({"network_type": 1, "debug": "info"}, '"info" is not one of VERSION, WARN, INFO, TRACE'),
    ],
)
def test_bad_data_is_refused_before_the_node_is_touched(node: Node, given: dict[str, Any], message: str) -> None:
    with pytest.raises(DeployError) as caught:
        deploy(node, given, has(CONNECTX))
    assert str(caught.value).startswith("@fake/node-a.nccl: ")
    assert message in str(caught.value)


def test_the_inventory_s_gpus_must_be_those_of_the_series(node: Node) -> None:
    with pytest.raises(DeployError) as caught:
        deploy(node, {"series": "P16EN"}, has(CONNECTX), gpus={"count": 8})
    assert "nccl.series: an instance of P16EN has 16 GPUs, and gpus.count is 8; correct one of the two" in str(
        caught.value
    )
