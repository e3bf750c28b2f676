"""Users keep their devices: each way to use a device defers the changes that would disturb it."""

import errno
from functools import partial
from typing import Any

import pytest

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import converge
from agent.engine.users import users
from agent.hardware.functions import discover, vf_addresses
from agent.report.records import Disruption
from agent.spec.node import NodeSpec
from agent.state.wanted import resolve
from tests.sim.engine.test_disruption import PF, deferred, hand_to_pod, spec
from tests.sim.kernel import Kernel
from tests.sim.passes import nic, rail0, settle, spec_of
from tests.sim.seams import seen
from tests.sim.two_nics import MAC1, PF1


@pytest.fixture
def kernel(kernel: Kernel) -> Kernel:
    """Four VFs of the first NIC are as the spec wants them."""
    settle(kernel, spec())
    return kernel


@pytest.mark.parametrize("count", [6, 0])
def test_a_pod_with_an_allocated_vf_defers_the_change(kernel: Kernel, count: int) -> None:
    hand_to_pod(kernel, 2)
    result = settle(kernel, spec(count))
    assert deferred(result) == (f"pod team/trainer-0 ({PF}#2)",)
    assert {o.change.disruption for o in result.outcomes if o.result == "deferred"} == {Disruption.VF_RESET}


@pytest.mark.parametrize("part", ["infiniband/erdma_0", "mlx5_core.sf.4"])
def test_a_pod_with_a_part_of_a_vf_defers_the_change_and_does_not_own_the_vf(kernel: Kernel, part: str) -> None:
    kernel.tree.put(f"/sys/bus/pci/devices/{vf_addresses(kernel.files, PF)[1]}/{part}/uevent", "")
    name = part.rpartition("/")[2]
    kernel.host.allocated[name] = ("team/trainer-0",)
    kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 1, trust=True)
    result = settle(kernel, spec(6, trust=False))
    assert deferred(result) == (f"pod team/trainer-0 by {name} ({PF}#1)",)
    assert not kernel.vfs(PF)[1].trust


@pytest.mark.parametrize(("node_type", "on_top"), [("1: CA", False), ("1: CA", True), ("4: RNIC", True)])
def test_a_process_with_an_open_rdma_device_defers_the_change(kernel: Kernel, node_type: str, on_top: bool) -> None:
    """rxe and siw, on top of a netdev, have no PCI function, and the PCI function of eRDMA is not that of its netdev."""
    vf = vf_addresses(kernel.files, PF)[1]
    of, netdev = (None, kernel.netdev(vf).name) if on_top else (vf, None)
    kernel.rdma.add(of, "rxe0", netdev, node_type=node_type)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    kernel.host.open["/dev/infiniband/umad0"] = ("opensm (pid 4712)",)
    assert deferred(settle(kernel, spec(6))) == (f"ib_write_bw (pid 4711) ({PF}#1)",)


def test_a_subnet_manager_is_a_user_of_its_port(kernel: Kernel) -> None:
    """It sends its datagrams by umad, as many programs do for a moment, and holds issm as long as it runs."""
    vf = vf_addresses(kernel.files, PF)[1]
    kernel.rdma.add(vf, "mlx5_0", None, link_layer="InfiniBand")
    kernel.tree.put(f"/sys/bus/pci/devices/{vf}/infiniband_mad/issm0/ibdev", "mlx5_0")
    kernel.host.open["/dev/infiniband/issm0"] = ("opensm (pid 4712)",)
    assert deferred(settle(kernel, spec(6))) == (f"opensm (pid 4712) ({PF}#1)",)


def test_a_program_on_omni_path_is_a_user_without_verbs(kernel: Kernel) -> None:
    """PSM2 and OPX open the driver's own node."""
    kernel.set_driver(PF, "hfi1")
    kernel.tree.folder("/sys/class/hfi1_user/hfi1_0")
    kernel.host.open["/dev/hfi1_0"] = ("mpi (pid 4713)",)
    assert f"mpi (pid 4713) ({PF})" in deferred(settle(kernel, spec(6)))


def test_users_of_an_rdma_device_of_two_ports_are_users_of_both(kernel: Kernel) -> None:
    """With RoCE LAG sysfs shows the device only under the first port."""
    second = PF[:-1] + "1"
    kernel.add_nic(second, "enp33s0f1", "02:00:00:00:01:01")
    wanted = spec_of(nic("b", second, vfs={"count": 4}))
    settle(kernel, wanted)
    kernel.rdma.add(PF, "mlx5_bond_0", "bond0")
    for name in ("enp33s0", "enp33s0f1"):
        kernel.tree.link(f"/sys/class/net/{name}/master", "../bond0")
    kernel.tree.put("/sys/class/net/bond0/bonding/slaves", "enp33s0 enp33s0f1")
    kernel.host.open["/dev/infiniband/uverbs0"] = ("nccl (pid 4711)",)
    more = spec_of(nic("b", second, vfs={"count": 6}))
    assert deferred(settle(kernel, more)) == (f"nccl (pid 4711) ({second})",)


@pytest.mark.parametrize("error", [TimeoutError("no answer within 2 s"), ConnectionRefusedError(111, "refused")])
def test_a_kubelet_that_does_not_answer_defers_disruptive_changes(kernel: Kernel, error: OSError) -> None:
    kernel.host.kubelet_error = error
    said = f"unknown pods, since the kubelet does not say: {error.args[-1]}"
    assert all(user.startswith(said) for user in deferred(settle(kernel, spec(6))))


def test_while_the_kubelet_does_not_answer_no_attribute_of_a_bound_vf_is_changed(kernel: Kernel) -> None:
    """The kubelet may be giving the VF to a pod: its CNI plugin sets attributes before it moves the netdev."""
    kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 1, vlan=7)
    kernel.host.kubelet_error = TimeoutError("no answer within 2 s")
    result = settle(kernel, spec(vlan=0))
    assert kernel.vfs(PF)[1].vlan == 7
    (outcome,) = [each for each in result.outcomes if each.result == "failed"]
    assert outcome.error.endswith(": no answer within 2 s")
    assert outcome.remedy.startswith("if the error is the kubelet's, ")


@pytest.mark.parametrize(
    ("mounts", "server"),
    [
        ("10.0.0.9:/export /data nfs4 rw,vers=4.2,addr=10.0.0.9 0 0", "10.0.0.9"),
        ("10.0.0.9:6789,10.0.0.10:6789:/ /data ceph rw 0 0", "10.0.0.10"),
        ("[fd00::9]:/export /data nfs rw,addr=fd00::9 0 0", "fd00::9"),
        ("1.2.3.999:6789,10.0.0.10:6789:/ /data ceph rw 0 0", "10.0.0.10"),
        ("10.0.0.9:/volume /data fuse.glusterfs rw,relatime,user_id=0,group_id=0 0 0", "10.0.0.9"),
        ("proc /proc proc rw 0 0\n10.0.0.9:/export /data nfs4 rw 0 0\n", "10.0.0.9"),
        ("nas:/e /data nfs4 rw,vers=4.2,proto=tcp6,clientaddr=fd00::5,local_lock=none,addr=fd00::9 0 0", "fd00::9"),
        ("nas:/e /data nfs4 rw,addr=fd00::9%enp33s0 0 0", "fd00::9"),
        ("//nas/e /data nfs4 rw,vers=3.1.1,ip=fd00:0000:0000:0000:0000:0000:0000:0009 0 0", "fd00::9"),
    ],
)
def test_a_nic_through_which_storage_is_reached_is_not_disturbed(kernel: Kernel, mounts: str, server: str) -> None:
    kernel.tree.put("/proc/1/mounts", mounts)
    kernel.servers[server] = "enp33s0"
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    (user,) = deferred(settle(kernel, spec(6)))
    assert f"of {server}" in user


@pytest.mark.parametrize(
    ("local", "peer", "named"),
    [("10.20.0.5:22", "10.20.0.10:51234", "10.20.0.10:51234"), ("fd00::5:38712", "fd00::10:6443", "[fd00::10]:6443")],
)
def test_an_mtu_that_takes_the_link_down_waits_for_a_connection_with_a_neighbour(
    kernel: Kernel, local: str, peer: str, named: str
) -> None:
    """No route through a gateway is in use then."""
    settle(kernel, rail0())
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    kernel.netlink.add_address(kernel.netdev(PF).ifindex, "10.20.0.5/24")
    kernel.netlink.add_address(kernel.netdev(PF).ifindex, "fd00::5/64")
    kernel.connect(local, peer, "sshd (pid 812)")
    jumbo = rail0(mtu=9000)
    (user,) = deferred(settle(kernel, jumbo))
    assert user.startswith("sshd (pid 812)") and f" {named} ({PF})" in user
    assert kernel.netdev(PF).mtu == 1500
    kernel.sockets.clear()
    settle(kernel, jumbo)
    assert kernel.netdev(PF).mtu == 9000


def test_a_mount_of_this_machine_s_own_is_no_user(kernel: Kernel) -> None:
    # Anybody may mount a FUSE file system, and name its source.
    forged = "me\u2028x:/e\u2003/data\u2003nfs4\u2003addr=10.0.0.9 /home/me/m fuse.sshfs rw 0 0"
    forged += "\n\x0cx:/e\x1c/data\x1cnfs4\x1caddr=10.0.0.9 /home/me/m fuse.sshfs rw 0 0"
    kernel.tree.put("/proc/1/mounts", f"/dev/sda1 /data ext4 rw,comment=10.0.0.9 0 0\n\nodd\n{forged}")
    kernel.servers["10.0.0.9"] = "enp33s0"
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    settle(kernel, spec(6))
    assert len(kernel.vfs(PF)) == 6


def test_a_nic_with_the_nodes_address_or_in_a_bond_is_not_disturbed(kernel: Kernel) -> None:
    kernel.ip["enp33s0"] = ("10.0.0.7/24",)
    kernel.tree.put("/sys/class/net/enp33s0/upper_bond0/ifindex", "9")
    affected = deferred(settle(kernel, spec(6, node_name="10.0.0.7")))
    assert affected == (f"the node's address on enp33s0 ({PF})", f"bond0 on enp33s0 ({PF})")


def test_another_number_of_vfs_disturbs_users_of_the_pf_only_if_its_link_goes_down(kernel: Kernel) -> None:
    kernel.routed.add("enp33s0")
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=True)
    assert deferred(settle(kernel, spec(6))) == (f"a route through enp33s0 ({PF})",)
    kernel.set_driver(PF, "mlx5_core")
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, spec(6))) == (f"pod team/trainer-0 ({PF}#2)",)
    kernel.host.allocated.clear()
    settle(kernel, spec(6))
    assert len(kernel.vfs(PF)) == 6


def test_who_steers_the_ptp_clock_of_a_pf_keeps_its_link_and_delays_no_number_of_vfs(kernel: Kernel) -> None:
    kernel.tree.folder(f"/sys/bus/pci/devices/{PF}/ptp/ptp3")
    kernel.host.open["/dev/ptp3"] = ("ptp4l (pid 77)",)
    assert deferred(settle(kernel, spec(6))) == (f"ptp4l (pid 77) ({PF})",)
    kernel.set_driver(PF, "mlx5_core")
    settle(kernel, spec(6))
    assert len(kernel.vfs(PF)) == 6


@pytest.mark.parametrize("look", [users, partial(users, complete=False)])
def test_a_lookup_for_one_vf_reads_nothing_of_the_others(kernel: Kernel, look: Any) -> None:
    vfs = vf_addresses(kernel.files, PF)
    asked: list[str] = []
    machine = seen(kernel.machine(), lambda what, where: asked.append(where))
    want = resolve(spec(), discover(kernel.machine()))
    hand_to_pod(kernel, 2)
    assert look(machine, want, PF, frozenset({f"{PF}#2"})).keys() == {f"{PF}#2"}
    assert any(vfs[2] in where for where in asked)
    assert not any(vfs[index] in where for index in (0, 1, 3) for where in asked)


def test_a_device_whose_rdma_users_cannot_be_read_is_not_disturbed(kernel: Kernel) -> None:
    kernel.rdma.add(None, "rxe0", kernel.netdev(vf_addresses(kernel.files, PF)[1]).name)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)

    def broken(what: str, where: str) -> None:
        if where.startswith("/sys/class/infiniband/"):
            raise OSError(errno.EIO, "Input/output error", where)

    machine = seen(kernel.machine(), broken)
    result = converge(machine, Goal(spec(6)), Memory(lambda: 0.0))
    (failed,) = [outcome for outcome in result.outcomes if outcome.result == "failed"]
    assert failed.error.startswith("its users cannot be determined")
    assert len(kernel.vfs(PF)) == 4


# --- A lookup answers only for what it has looked at: the clock stands still, so each is recent --------------------


def test_the_users_of_one_nic_are_none_of_another_nic_s(kernel: Kernel) -> None:
    def wanting(count: int) -> NodeSpec:
        nics = [nic(pf[5:7], pf, vfs={"count": count}) for pf in (PF, PF1)]
        return spec_of(*nics)

    kernel.add_nic(PF1, "enp65s0", MAC1)
    settle(kernel, wanting(4))
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, wanting(6))) == (f"pod team/trainer-0 ({PF}#2)",)
    assert [len(kernel.vfs(pf)) for pf in (PF, PF1)] == [4, 6]


def told(kernel: Kernel, wanted: NodeSpec) -> list[str]:
    """What a pass announces, and with which change it waits for the publication."""
    calls: list[str] = []
    callbacks = Callbacks(
        announce=lambda change: calls.append(f"announce {change.field}"),
        wait_until_published=lambda change: calls.append("wait"),
    )
    settle(kernel, wanted, callbacks=callbacks)
    return calls


def test_what_is_left_to_the_owners_of_several_vfs_is_not_announced(kernel: Kernel) -> None:
    """One kind looks for the owner of one VF, and a later kind for that of another."""
    wanted = spec(vlan=7, txqueuelen=500)
    settle(kernel, wanted)
    hand_to_pod(kernel, 1)
    hand_to_pod(kernel, 2)
    vf = vf_addresses(kernel.files, PF)[2]
    kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 1, vlan=99)
    kernel.netlink.set_link(kernel.netdev(vf).ifindex, txqueuelen=400)
    assert told(kernel, wanted) == []


def test_for_a_change_that_users_defer_no_publication_is_waited_for_after_a_lookup_of_owners(kernel: Kernel) -> None:
    wanted = spec(spoofchk=False, rings={"rx": 512})
    settle(kernel, wanted)
    vf = vf_addresses(kernel.files, PF)[1]
    kernel.rdma.add(vf, "rocep33s0v1", None)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 1, spoofchk=True)
    kernel.ethtool.set("rings", kernel.netdev(vf).ifindex, {"rx": 256})
    assert told(kernel, wanted) == ["announce spoofchk"]
    assert deferred(settle(kernel, wanted)) == (f"ib_write_bw (pid 4711) ({PF}#1)",)
