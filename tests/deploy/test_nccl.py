from typing import Any

import pytest

from tasks import nccl
from tasks.common.commands import script
from tests.deploy.conftest import Answers, Node, Result, files
from tests.deploy.hardware import CONNECTX, EFA, ERDMA, GPUS, RAIL1, SECOND, VF, VIRTIO, function, has, nic, nics, rdma

HEADER = "# Written by Trackbed; changes here are overwritten.\n"
SERIES = ("GU8TF", "GU8TEF", "GX8SF")
NEW = "/etc/.nccl.conf.new"


def deploy(node: Node, given: dict[str, Any] | None, answers: Answers, **data: Any) -> Result:
    node.data = data if given is None else {"nccl": given, **data}
    return node.deploy(nccl.configure, answers)


def test_nccl_does_not_take_the_header_for_a_setting() -> None:
    assert "=" not in HEADER


STORAGE = function("0000:51:00.0", "15b3:101b", "ens3f0", rdma("mlx5_7", (5, "RoCE v2", "10.9.0.1")))
ERDMA_NIC = nic("erdma0", ERDMA)
TYPE = {"network_type": 1}
GIVEN = {**TYPE, "interface": "ens1f0", "hcas": "mlx5_bond", "gid_index": 5, "debug": "WARN"}


def with_ports(*layers: str) -> Answers:
    """Functions with RDMA devices whose ports have these link layers; ``InfiniBand,Ethernet`` is a device of two ports."""
    functions = []
    for number, given in enumerate(layers):
        device = rdma(f"mlx5_{number}", (0, "RoCE v2", "10.0.0.1"))
        (port,) = device["ports"]
        device["ports"] = [{**port, "number": n, "link_layer": layer} for n, layer in enumerate(given.split(","), 1)]
        functions.append(function(f"0000:{number:02x}:00.0", "15b3:1021", f"net{number}", device))
    return has(*functions)


def several_ports() -> Answers:
    """A function with a device of two ports, and a netdev for each."""
    device = rdma("mlx4_0", (0, "RoCE v2", "10.0.0.1"))
    (port,) = device["ports"]
    device["ports"] = [{**port, "number": number, "netdev": name} for number, name in ((1, "ens1"), (2, "ens1d1"))]
    netdevs = [{"name": name, "mtu": 1500} for name in ("ens1", "ens1d1")]
    return has({**function("0000:03:00.0", "15b3:1003", None, device), "netdevs": netdevs})


def lines(interface: str, hcas: str | None, *more: str) -> str:
    """The file's text."""
    of_hcas = [] if hcas is None else [f"NCCL_IB_HCA={hcas}"]
    return "".join(f"{line}\n" for line in (f"NCCL_SOCKET_IFNAME={interface}", *of_hcas, *more, "NCCL_DEBUG=INFO"))


TYPE_1, TYPE_2 = lines("eth0", "mlx5"), "NCCL_SOCKET_IFNAME=eth0\nNCCL_IB_DISABLE=1\nNCCL_IB_HCA=\nNCCL_DEBUG=INFO\n"
ROCE = lines("=eth0", "=mlx5_0,mlx5_1")
# DGX H100: rails of InfiniBand, and storage NICs of Ethernet in the same spec. NCCL cannot connect the two.
CASES: dict[str, tuple[dict[str, Any], Answers, str]] = {
    **{f"{series}, of type 1": ({"series": series}, has(CONNECTX, others=GPUS), TYPE_1) for series in SERIES},
    "P16EN, of type 2": ({"series": "P16EN"}, has(CONNECTX, others=GPUS * 2), TYPE_2),
    "a part of P16EN": ({"series": "P16EN", "compute_class": "gpu-hpn"}, has(CONNECTX, others=GPUS[:4]), TYPE_2),
    "type 2 of a cloud": ({"network_type": 2, "compute_class": "gpu-hpn"}, has(CONNECTX, others=GPUS[:1]), TYPE_2),
    "other nodes have names of their own": (TYPE, has(CONNECTX, SECOND, ERDMA), ROCE),
    "the first of several ports": (TYPE, several_ports(), lines("=eth0", "=mlx4_0:1")),
    "most are InfiniBand": (TYPE, with_ports("InfiniBand", "InfiniBand", "Ethernet"), ROCE),
    "most are Ethernet": (TYPE, with_ports("InfiniBand", "Ethernet", "Ethernet"), lines("=eth0", "=mlx5_1,mlx5_2")),
    "a port of two is InfiniBand": (
        TYPE, with_ports("InfiniBand,Ethernet", "InfiniBand,Ethernet", "InfiniBand"),
        lines("=eth0", "=mlx5_0:1,mlx5_1:1,mlx5_2"),
    ),
    "a device counts once": (
        TYPE, with_ports("InfiniBand,InfiniBand", "Ethernet", "Ethernet,Ethernet"), lines("=eth0", "=mlx5_1,mlx5_2"),
    ),
    "as many of each, and one is given": (
        {**TYPE, "hcas": "=mlx5_0"}, with_ports("InfiniBand", "Ethernet"), lines("=eth0", "=mlx5_0"),
    ),
    "EFA is used by a plugin of NCCL": (TYPE, has(VIRTIO, EFA), lines("=eth0", None)),
    "EFA beside others": (TYPE, has(CONNECTX, SECOND, EFA), ROCE),
    "type 2 elsewhere, and another default route": (
        {"network_type": 2}, has(VIRTIO, others=("route 50 ens5",)), TYPE_2.replace("eth0", "=ens5"),
    ),
    "only VFs have RDMA devices": (TYPE, has({**CONNECTX, "rdma": [], "vfs": [VF]}), lines("=eth0", "=mlx5_2")),
    "values of the inventory": (
        GIVEN, has(CONNECTX), lines("=ens1f0", "mlx5_bond", "NCCL_IB_GID_INDEX=5").replace("INFO", "WARN"),
    ),
    "rails": ({**TYPE, "layout": "rails"}, has(CONNECTX), lines("=eth0", "=mlx5_0", "NCCL_CROSS_NIC=0")),
    "one switch": ({**TYPE, "layout": "single-switch"}, has(CONNECTX), lines("=eth0", "=mlx5_0", "NCCL_CROSS_NIC=1")),
    "rails and more": ({**TYPE, "layout": "rail-optimized"}, has(CONNECTX), lines("=eth0", "=mlx5_0", "NCCL_CROSS_NIC=2")),
    "the provider's topology": (
        {**TYPE, "topology": "/opt/topo.xml"}, has(CONNECTX), lines("=eth0", "=mlx5_0", "NCCL_TOPO_FILE=/opt/topo.xml"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "answers", "text"), CASES.values(), ids=CASES)
def test_the_file_has_what_the_network_and_the_hardware_need(
    node: Node, given: dict[str, Any], answers: Answers, text: str
) -> None:
    """No index of a GID unless it is given: the kernel may move a GID while the node runs."""
    result = deploy(node, given, answers)
    assert result.uploads[NEW].decode() == HEADER + text
    assert result.flat[-1].endswith("sh put /etc/nccl.conf --")


def test_only_cards_of_the_spec_s_nics_are_used(node: Node) -> None:
    rails = ({**CONNECTX, "nic": "rail0"}, {**SECOND, "nic": "rail1"})
    assert deploy(node, TYPE, has(*rails, STORAGE), nics=nics(*rails)).uploads[NEW].decode() == HEADER + ROCE
    made = (
        deploy(node, TYPE, has({**VIRTIO, "nic": None}, ERDMA_NIC, CONNECTX), nics=nics(ERDMA_NIC))
        .uploads[NEW]
        .decode()
    )
    assert made == HEADER + lines("=eth0", "=erdma_0")
    # Also while the node lacks them.
    assert deploy(node, TYPE, has(CONNECTX), nics=nics(RAIL1)).failed


def test_nothing_is_done_if_the_file_is_in_place(node: Node) -> None:
    assert deploy(node, TYPE, {**has(CONNECTX, SECOND), **files(**{nccl.PATH: HEADER + ROCE})}).did_nothing


def test_without_the_key_only_trackbed_s_file_is_removed(node: Node) -> None:
    assert deploy(node, None, files(**{nccl.PATH: "NCCL_DEBUG=WARN"})).flat == []
    assert deploy(node, None, files(**{nccl.PATH: HEADER + ROCE})).flat[0].endswith(f"sh remove {nccl.PATH} --")
    assert deploy(node, None, files()).flat == []


def test_another_s_file_is_kept_and_restored(node: Node) -> None:
    result = deploy(node, TYPE, {**has(CONNECTX, SECOND), **files(**{nccl.PATH: "NCCL_TOPO_FILE=/x"})})
    assert result.flat[0] == str(script('ln -f "$1" "$2"', nccl.PATH, "/etc/nccl.conf.previous"))
    assert result.uploads[NEW].decode() == HEADER + ROCE
    other = {**has(CONNECTX), **files(**{nccl.PATH: HEADER + ROCE, nccl.PREVIOUS: "NCCL_TOPO_FILE=/x"})}
    assert not any("ln -f" in command for command in deploy(node, TYPE, other).flat)
    assert deploy(node, None, other).flat == [str(script('mv -T "$1" "$2"', nccl.PREVIOUS, nccl.PATH))]


@pytest.mark.parametrize(
    ("given", "answers", "message"),
    [
        (TYPE, has(VIRTIO), "nccl.network_type: the NICs of the spec have no RDMA device"),
        ({"series": "GU8TF"}, has(CONNECTX), "nccl.series: an instance of GU8TF has 8 GPUs, and this node has 0"),
        ({"series": "GU8TF", "compute_class": "gpu-hpn"}, has(CONNECTX, others=GPUS[:3]), "4 or 8 GPUs, and this node has 3"),
        ({"network_type": 2, "interface": "bond0"}, has(VIRTIO), "the node has no netdev bond0; it has eth0, ens5"),
        (TYPE, with_ports("InfiniBand", "Ethernet"), "have equally many ports of InfiniBand (mlx5_0) and Ethernet"),
        pytest.param(
            {"network_type": 1, "gid_index": 3},
            has(CONNECTX, {**SECOND, "rdma": [rdma("mlx5_1", (1, "RoCE v2", "fe80::1"), (5, "RoCE v2", "10.0.0.2"))]}),
            "gid_index: port 1 of mlx5_1 has GIDs that other nodes may reach at 5, not at 3",
            id="uccl-711",
        ),
        ({"network_type": 2}, {}, "hardware is unknown"),
    ],
)  # fmt: skip
def test_hardware_that_lacks_something_is_refused_with_nothing_written(
    node: Node, given: dict[str, Any], answers: Answers, message: str
) -> None:
    result = deploy(node, given, answers)
    assert result.failed
    assert message in "\n".join(result.log)
    assert result.uploads == {}
