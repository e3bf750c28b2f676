"""RoCE LAG of ConnectX: two ports in one bond share an RDMA device, which the first VFs of a port take from its users."""

from collections.abc import Mapping

import pytest

from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.hardware.bonds import bond_of_ports, rdma_devices
from agent.machine import Link, QueuePair
from agent.report.records import Change, Disruption
from agent.spec.node import NodeSpec
from tests.sim import passes
from tests.sim.engine.test_disruption import deferred
from tests.sim.kernel import Kernel, Netdev
from tests.sim.passes import nic, spec_of

FIRST, SECOND = "0000:21:00.0", "0000:21:00.1"
NAMES = {FIRST: "enp33s0f0", SECOND: "enp33s0f1"}
NCCL = "nccl (pid 4711)"


@pytest.fixture
def kernel() -> Kernel:
    return bonded(NAMES)


def bonded(names: Mapping[str, str], driver: str = "mlx5_core") -> Kernel:
    """Two functions whose netdevs are in bond0, and which have no VFs. ``driver``: that of the second one."""
    kernel = Kernel()
    for number, ((pf, name), own) in enumerate(zip(names.items(), ("mlx5_core", driver), strict=True)):
        kernel.add_nic(pf, name, f"02:00:00:00:01:0{number}")
        kernel.set_driver(pf, own)
        kernel.enslave(pf, "bond0", "bond")
    kernel.netdevs["bond0"] = Netdev("", Link(90, "bond0", "02:00:00:00:01:00", "", 1500, True, True))
    kernel.tree.put("/sys/class/net/bond0/ifindex", "90")
    kernel.tree.put("/sys/class/net/bond0/bonding/slaves", " ".join(names.values()))
    return kernel


def have_lag(kernel: Kernel) -> None:
    kernel.rdma.add(FIRST, "mlx5_bond_0", "bond0")


def spec(pf: str, count: int) -> NodeSpec:
    return spec_of(nic("port", pf, vfs={"count": count}))


def planned(kernel: Kernel, pf: str, count: int) -> Change:
    (change,) = [change for change in dry_run(kernel.machine(), spec(pf, count)).changes if change.kind == "vfs"]
    return change


def settle(kernel: Kernel, pf: str, count: int) -> Pass:
    return passes.settle(kernel, spec(pf, count))


def test_a_port_with_an_rdma_device_of_its_own_has_no_share_in_the_bond_s(kernel: Kernel) -> None:
    have_lag(kernel)
    assert [rdma_devices(kernel.files, pf) for pf in NAMES] == [["mlx5_bond_0"], ["mlx5_bond_0"]]
    kernel.rdma.add(SECOND, "mlx5_1", NAMES[SECOND])
    assert [rdma_devices(kernel.files, pf) for pf in NAMES] == [["mlx5_bond_0"], ["mlx5_1"]]


@pytest.mark.parametrize("pf", NAMES)
def test_the_first_vfs_wait_for_the_users_of_the_bond_s_rdma_device(kernel: Kernel, pf: str) -> None:
    have_lag(kernel)
    kernel.host.open["/dev/infiniband/uverbs0"] = (NCCL,)
    change = planned(kernel, pf, 4)
    assert (change.disruption, change.affected) == (Disruption.LINK_FLAP, (f"{NCCL} ({pf})",))
    assert deferred(settle(kernel, pf, 4)) == (f"{NCCL} ({pf})",)
    kernel.host.open.clear()
    settle(kernel, pf, 4)
    assert len(kernel.vfs(pf)) == 4


def test_the_first_vfs_wait_for_the_kernel_s_connections_over_the_bond_s_rdma_device(kernel: Kernel) -> None:
    have_lag(kernel)
    kernel.rdma.pairs["mlx5_bond_0"] = (QueuePair("nvme_rdma", "RC", "10.0.0.9"),)
    (user,) = planned(kernel, FIRST, 4).affected
    assert "nvme_rdma" in user and FIRST in user
    kernel.rdma.pairs.clear()
    assert planned(kernel, FIRST, 4).affected == ()


def test_the_first_vfs_do_not_wait_for_connections_over_tcp(kernel: Kernel) -> None:
    have_lag(kernel)
    kernel.ip["bond0"] = ("10.0.0.5/24",)
    kernel.servers["10.0.0.9"] = "bond0"
    kernel.connect("10.0.0.5:40000", "10.0.0.9:4420")
    assert planned(kernel, FIRST, 4).affected == ()


def test_without_lag_the_first_vfs_disturb_nobody(kernel: Kernel) -> None:
    """The other port has VFs, so each port has a device of its own."""
    settle(kernel, SECOND, 4)
    kernel.rdma.add(FIRST, "mlx5_0", NAMES[FIRST])
    kernel.host.open["/dev/infiniband/uverbs0"] = (NCCL,)
    change = planned(kernel, FIRST, 4)
    assert (change.disruption, change.affected) == (Disruption.NONE, ())


@pytest.mark.parametrize(("bond", "waits"), [("both ports", True), ("another card's port", False), ("none", False)])
def test_removing_vfs_waits_for_the_users_of_the_port_s_rdma_device_if_that_may_make_lag(
    kernel: Kernel, bond: str, waits: bool
) -> None:
    settle(kernel, FIRST, 4)
    kernel.rdma.add(FIRST, "mlx5_0", NAMES[FIRST])
    kernel.host.open["/dev/infiniband/uverbs0"] = (NCCL,)
    if bond != "both ports":
        kernel.add_nic("0000:41:00.0", "enp65s0f0", "02:00:00:00:02:00")
        members = f"{NAMES[FIRST]} enp65s0f0" if bond != "none" else ""
        kernel.tree.put("/sys/class/net/bond0/bonding/slaves", members)
    change = planned(kernel, FIRST, 6)
    assert (change.disruption, change.affected) == (Disruption.VF_RESET, (f"{NCCL} ({FIRST})",) if waits else ())


@pytest.mark.parametrize(("vfs_of_the_other", "waits"), [(0, True), (2, False)])
def test_removing_vfs_waits_for_the_users_of_the_other_port_s_rdma_device_if_that_may_make_lag(
    kernel: Kernel, vfs_of_the_other: int, waits: bool
) -> None:
    """While the other port has VFs, there is no LAG, and both ports keep their devices."""
    settle(kernel, FIRST, 4)
    settle(kernel, SECOND, vfs_of_the_other)
    kernel.rdma.add(FIRST, "mlx5_0", NAMES[FIRST])
    kernel.rdma.add(SECOND, "mlx5_1", NAMES[SECOND])
    kernel.host.open["/dev/infiniband/uverbs1"] = (NCCL,)
    assert planned(kernel, FIRST, 6).affected == ((f"{NCCL} on {SECOND} ({FIRST})",) if waits else ())
    settle(kernel, FIRST, 6)
    assert len(kernel.vfs(FIRST)) == (4 if waits else 6)


def test_other_changes_of_a_port_do_not_disturb_the_users_of_the_other_port(kernel: Kernel) -> None:
    settle(kernel, FIRST, 4)
    kernel.rdma.add(SECOND, "mlx5_1", NAMES[SECOND])
    kernel.host.open["/dev/infiniband/uverbs0"] = (NCCL,)
    kernel.netlink.set_link(kernel.netdev(FIRST).ifindex, up=True)
    nic = {"name": "port", "select": {"pci": FIRST}, "state": "down"}
    given = spec_of(nic)
    (change,) = [change for change in dry_run(kernel.machine(), given).changes if change.kind == "links"]
    assert change.disruption == Disruption.LINK_FLAP
    assert not [user for user in change.affected if NCCL in user]


# On different buses.
PASSED_THROUGH = {"0101:00:00.0": "enp0", "0102:01:00.1": "enp1"}
SOCKET_DIRECT = {"0000:06:00.0": "enp0", "0000:87:00.0": "enp1"}


@pytest.mark.parametrize("ports", [PASSED_THROUGH, SOCKET_DIRECT])
@pytest.mark.parametrize("name", ["mlx5_bond_0", "rocep6s0f0"])
def test_ports_of_a_card_on_different_buses_share_the_bond_s_rdma_device(ports: dict[str, str], name: str) -> None:
    kernel = bonded(ports)
    kernel.rdma.add(next(iter(ports)), name, "bond0")
    assert [rdma_devices(kernel.files, pf) for pf in ports] == [[name]] * 2
    kernel.host.open["/dev/infiniband/uverbs0"] = (NCCL,)
    assert [planned(kernel, pf, 4).affected for pf in ports] == [(f"{NCCL} ({pf})",) for pf in ports]


def test_a_bonded_nic_of_another_family_does_not_share_the_rdma_device() -> None:
    # Without RoCE LAG the kernel gives a device GIDs of the bond, too.
    kernel = bonded(PASSED_THROUGH, driver="igb")
    first, second = PASSED_THROUGH
    kernel.rdma.add(first, "mlx5_0", "bond0")
    assert rdma_devices(kernel.files, second) == []


NO_GUID, FIRST_GUID, SECOND_GUID = "0000:0000:0000:0000", "0200:00ff:fe00:0001", "0200:00ff:fe00:0002"


@pytest.mark.parametrize(
    ("guids", "bond"),
    [
        ((FIRST_GUID, FIRST_GUID), "bond0"),
        ((FIRST_GUID, SECOND_GUID), None),
        ((NO_GUID, NO_GUID), None),
        ((NO_GUID, SECOND_GUID), None),
        ((NO_GUID, None), None),
    ],
)
def test_two_ports_of_one_system_image_guid_are_of_one_card(guids: tuple[str | None, ...], bond: str | None) -> None:
    kernel = bonded(PASSED_THROUGH)
    for number, (pf, guid) in enumerate(zip(PASSED_THROUGH, guids, strict=True)):
        if guid is not None:
            kernel.rdma.add(pf, f"mlx5_{number}", "bond0")
            kernel.tree.put(f"/sys/class/infiniband/mlx5_{number}/sys_image_guid", guid)
    assert [bond_of_ports(kernel.files, pf) for pf in PASSED_THROUGH] == [bond, bond]
    if bond is None:
        own = [[f"mlx5_{number}"] if guid else [] for number, guid in enumerate(guids)]
        assert [rdma_devices(kernel.files, pf) for pf in PASSED_THROUGH] == own
