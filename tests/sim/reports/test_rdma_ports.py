"""Public reports about the ports of RDMA devices: their state, GIDs and partition keys."""

import re
from typing import Any

import pytest

from agent.report.verdict import is_ready
from cli.inspection import inspect
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.readiness import Node as Probed
from tests.sim.two_nics import IPOIB, NAME0, NAME1, PF0, PF1, two_nics


def roce(**nic: Any) -> Probed:
    kernel = two_nics()
    kernel.rdma.add(PF0, "mlx5_0", NAME0)
    rdma = {"gid_type": "RoCE v2", "gid_ipv4": True}
    given = {"name": "rail0", "select": {"pci": PF0}, "rail": 0, "rdma": rdma, "addresses": ["10.0.0.1/24"], **nic}
    return Probed(kernel, more={"nics": [given]})


def test_an_rdma_device_that_is_away_for_a_while_is_missed_only_then() -> None:
    """Another monitor called each reload of the driver a broken card, and never took that back (NVSentinel 1488)."""
    node = roce()
    rdma, port = node.kernel.rdma, "/sys/class/infiniband/mlx5_0/ports/1"
    assert is_ready(node.look().values())
    rdma.delete("mlx5_0")
    assert node.look()["RdmaDevices"].reason == "DeviceMissing"
    rdma.add(PF0, "mlx5_1", NAME0)
    rdma.address_added(NAME0, "10.0.0.1")
    assert is_ready(node.look().values())
    for file in ("link_layer", "state"):
        node.kernel.unreadable = {f"{port.replace('mlx5_0', 'mlx5_1')}/{file}"}
        message = node.look()["RdmaPorts"].message
        assert "cannot be read" in message
        assert "GID" not in message
    node.kernel.unreadable = set()
    assert is_ready(node.look().values())


def test_an_address_that_another_program_takes_away_is_back_with_its_gid() -> None:
    """`netplan apply` builds the addresses anew, and the GID has another index then (sparkring 290)."""
    node = roce()
    assert is_ready(node.look().values())
    index = node.kernel.netdev(PF0).ifindex
    node.kernel.routing.remove_address(index, "10.0.0.1/24")
    node.kernel.rdma.set_gid("mlx5_0", 1, "0000:0000:0000:0000:0000:ffff:c0a8:0001", "RoCE v2", NAME0)
    assert is_ready(node.look().values())
    assert node.kernel.routing.assigned[index] == ("10.0.0.1/24",)
    gids = [node.kernel.files.read(f"/sys/class/infiniband/mlx5_0/ports/1/gids/{place}") for place in range(3)]
    assert gids[2].endswith("ffff:0a00:0001")


@pytest.mark.parametrize(
    ("made", "gids", "named"),
    [
        pytest.param({}, False, "rdma.pf: false", id="scalablefunctions-2"),
        ({}, True, ""),
        ({"node_type": "4: RNIC"}, True, "it does iWARP"),
    ],
)
def test_a_device_that_can_have_no_roce_gid_is_named_with_the_reason(
    kernel: Kernel, made: dict[str, Any], gids: bool, named: str
) -> None:
    kernel.rdma.add(PF0, "mlx5_0", NAME0 if gids else None, **made)
    nic = {"name": "rail0", "select": {"pci": PF0}, "rdma": {"gid_type": "RoCE v2"}}
    judged = Probed(kernel, more={"nics": [nic]}).look()["RdmaPorts"]
    assert (judged.status == "True") is (named == "")
    assert named in judged.message
    assert "addresses" not in judged.message


@pytest.mark.parametrize("down", [pytest.param(0, id="sichek-98"), 9])
def test_of_the_ports_of_planes_those_that_do_roce_count(kernel: Kernel, down: int) -> None:
    """Of twelve ports of a ConnectX-8 with four planes, all but 3, 6, 9 and 12 are disabled (sichek 98)."""
    kernel.rdma.add(PF0, "roce_r0", None, state="DOWN", other_ports=[(None, "Ethernet", "100 Gb/sec (1X NDR)")] * 11)
    for number in range(1, 13):
        port = f"/sys/class/infiniband/roce_r0/ports/{number}"
        if number % 3:
            kernel.tree.remove(f"{port}/gids")
        else:
            kernel.tree.put(f"{port}/state", "1: DOWN" if number == down else "4: ACTIVE")
            kernel.tree.put(f"{port}/gids/0", "fe80:0000:0000:0000:0200:00ff:fe00:0001")
            kernel.tree.put(f"{port}/gid_attrs/types/0", "RoCE v2")
    nic = {"name": "rail0", "select": {"pci": PF0}, "rdma": {"gid_type": "RoCE v2"}}
    judged = Probed(kernel, more={"nics": [nic]}).look()["RdmaPorts"]
    assert (judged.status == "True") is (down == 0)
    assert re.findall(r"port (\d+)", judged.message) == ([str(down)] if down else [])
    assert [port.number for port in inspect(kernel.machine()).functions[0].rdma[0].ports] == [3, 6, 9, 12]


def test_ports_of_one_card_may_be_ethernet_or_infiniband(kernel: Kernel) -> None:
    """In Ethernet mode a port looks like one of InfiniBand that no subnet manager has seen (prometheus/procfs 700)."""
    kernel.rdma.add(PF0, "mlx5_0", NAME0)
    wanted: dict[str, Any] = nic("rail0", PF0, rdma={})
    assert is_ready(Probed(kernel, more={"nics": [wanted]}).look().values())
    wanted["rdma"] = {"link_layer": "InfiniBand"}
    judged = Probed(kernel, more={"nics": [wanted]}).look()
    assert "not InfiniBand" in judged["RdmaPorts"].message
    assert "SubnetManager" not in judged


@pytest.mark.parametrize(("given", "ready"), [({"required": False}, True), ({}, False)])
def test_a_port_that_is_down_by_design_does_not_matter(kernel: Kernel, given: dict[str, Any], ready: bool) -> None:
    """The second port of a card, which a cloud leaves without a network (NVSentinel 1361)."""
    kernel.rdma.add(PF0, "mlx5_0", NAME0)
    kernel.rdma.add(PF1, "mlx5_1", NAME1, state="DOWN")
    kernel.carriers.lose(PF1, slow=True)
    nics = [nic(f"rail{n}", pf, rdma={}) for n, pf in enumerate((PF0, PF1))]
    assert is_ready(Probed(kernel, more={"nics": nics[:1]}).look().values())
    judged = Probed(kernel, more={"nics": [nics[0], nics[1] | given]}).look()
    assert is_ready(judged.values()) is ready
    assert "state DOWN/Disabled" in judged["RdmaPorts"].message


@pytest.mark.parametrize(
    ("key", "wanted", "good"),
    [
        pytest.param("0x02b4", "0x02b4", True, id="rdma-core-465"),
        pytest.param("0x0123", "0x8123", False, id="rdma-core-413"),
        pytest.param("0x800a", "0x000a", True, id="linux-system-roles-network-493"),
    ],
)
def test_a_partition_is_the_same_for_limited_and_full_members_and_not_the_same_membership(
    key: str, wanted: str, good: bool
) -> None:
    kernel = Kernel()
    kernel.add_nic(PF0, "ibp33s0", IPOIB, driver="mlx5_core")
    kernel.rdma.add(PF0, "mlx5_0", None, link_layer="InfiniBand")
    kernel.tree.put("/sys/class/infiniband/mlx5_0/ports/1/pkeys/1", key)
    nic = {"name": "rail0", "select": {"pci": PF0}, "rdma": {"pkeys": [wanted]}}
    judged = Probed(kernel, more={"nics": [nic]}).look()["PartitionKeys"]
    assert (judged.status == "True") is good, judged
