"""Users keep their devices: who counts as a user, what the policy allows when, and which changes of a new spec wait."""

import errno
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.users import owners, users
from agent.hardware.functions import discover, vf_addresses
from agent.report.records import Change, Disruption
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec, from_mapping
from agent.state.wanted import resolve
from tests.sim.kernel import Kernel
from tests.sim.seams import seen

PF = "0000:21:00.0"
MAC = "02:00:00:00:01:00"
NOON = datetime(2026, 3, 4, 12, 0, tzinfo=timezone.utc)  # a Wednesday


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_nic(PF, "enp33s0", MAC)
    return kernel


def spec(count: int = 4, disruption: object = None, node_name: str = "n1", **attributes: object) -> NodeSpec:
    nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": count, "defaults": attributes}}
    return from_mapping({"node_name": node_name, "nics": [nic], "disruption": disruption or {}})


def settle(
    kernel: Kernel,
    wanted: NodeSpec,
    verified: NodeSpec | None = None,
    now: datetime = NOON,
    allow: Disruption | None = None,
) -> Pass:
    def clock() -> float:
        return 0.0

    return converge(kernel.machine(), Goal(wanted, verified=verified, allow=allow, at=now), Memory(clock))


def deferred(result: Pass) -> tuple[str, ...]:
    """The affected of the one change that was deferred."""
    (outcome,) = [outcome for outcome in result.outcomes if outcome.result == "deferred"]
    return outcome.change.affected


def hand_to_pod(kernel: Kernel, index: int) -> None:
    kernel.host.allocated[vf_addresses(kernel, PF)[index]] = ("team/trainer-0",)


def test_a_pod_with_an_allocated_vf_defers_the_change(kernel: Kernel) -> None:
    settle(kernel, spec())
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, spec(6))) == (f"pod team/trainer-0 ({PF}#2)",)


@pytest.mark.parametrize("part", ["infiniband/erdma_0", "mlx5_core.sf.4"])
def test_a_pod_with_a_part_of_a_vf_defers_the_change_and_does_not_own_the_vf(kernel: Kernel, part: str) -> None:
    settle(kernel, spec())
    kernel.tree.put(f"/sys/bus/pci/devices/{vf_addresses(kernel, PF)[1]}/{part}/uevent", "")
    name = part.rpartition("/")[2]
    kernel.host.allocated[name] = ("team/trainer-0",)
    kernel.set_vf(kernel.netdev(PF).ifindex, 1, trust=True)
    result = settle(kernel, spec(6, trust=False))
    assert deferred(result) == (f"pod team/trainer-0 by {name} ({PF}#1)",)
    assert not kernel.vfs(PF)[1].trust


def test_a_process_with_an_open_rdma_device_defers_the_change(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.rdma.add(vf_addresses(kernel, PF)[1], "rocep33s0v1", None)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    kernel.host.open["/dev/infiniband/umad0"] = ("opensm (pid 4712)",)
    assert deferred(settle(kernel, spec(6))) == (f"ib_write_bw (pid 4711) ({PF}#1)",)


@pytest.mark.parametrize("node_type", ["1: CA", "4: RNIC"])
def test_users_of_an_rdma_device_on_top_of_a_netdev_are_users_of_the_netdev(kernel: Kernel, node_type: str) -> None:
    """rxe and siw have no PCI function, and the PCI function of eRDMA is not that of its netdev."""
    settle(kernel, spec())
    kernel.rdma.add(None, "rxe0", kernel.netdev(vf_addresses(kernel, PF)[1]).name, node_type=node_type)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    assert deferred(settle(kernel, spec(6))) == (f"ib_write_bw (pid 4711) ({PF}#1)",)


def test_users_of_an_rdma_device_of_two_ports_are_users_of_both(kernel: Kernel) -> None:
    """With RoCE LAG sysfs shows the device only under the first port."""
    second = PF[:-1] + "1"
    kernel.add_nic(second, "enp33s0f1", "02:00:00:00:01:01")
    wanted = from_mapping({"node_name": "n1", "nics": [{"name": "b", "select": {"pci": second}, "vfs": {"count": 4}}]})
    settle(kernel, wanted)
    kernel.rdma.add(PF, "mlx5_bond_0", "bond0")
    for name in ("enp33s0", "enp33s0f1"):
        kernel.tree.link(f"/sys/class/net/{name}/master", "../bond0")
    kernel.tree.put("/sys/class/net/bond0/bonding/slaves", "enp33s0 enp33s0f1")
    kernel.host.open["/dev/infiniband/uverbs0"] = ("nccl (pid 4711)",)
    more = from_mapping({"node_name": "n1", "nics": [{"name": "b", "select": {"pci": second}, "vfs": {"count": 6}}]})
    assert deferred(settle(kernel, more)) == (f"nccl (pid 4711) ({second})",)


def test_a_kubelet_that_does_not_answer_defers_disruptive_changes(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.host.kubelet_error = TimeoutError("no answer within 2 s")
    assert all("the kubelet does not say" in user for user in deferred(settle(kernel, spec(6))))


@pytest.mark.parametrize(
    ("mounts", "server"),
    [
        ("10.0.0.9:/export /data nfs4 rw,vers=4.2,addr=10.0.0.9 0 0", "10.0.0.9"),
        ("10.0.0.9:6789,10.0.0.10:6789:/ /data ceph rw 0 0", "10.0.0.10"),
        ("[fd00::9]:/export /data nfs rw,addr=fd00::9 0 0", "fd00::9"),
        ("1.2.3.999:6789,10.0.0.10:6789:/ /data ceph rw 0 0", "10.0.0.10"),
    ],
)
def test_a_nic_through_which_storage_is_reached_is_not_disturbed(kernel: Kernel, mounts: str, server: str) -> None:
    settle(kernel, spec())
    kernel.tree.put("/proc/1/mounts", mounts)
    kernel.servers[server] = "enp33s0"
    kernel.set_link(kernel.netdev(PF).ifindex, up=True)
    (user,) = deferred(settle(kernel, spec(6)))
    assert f"of {server}" in user


@pytest.mark.parametrize(
    ("transport", "address", "server"),
    [
        ("rdma", "traddr=10.0.0.9,trsvcid=4420,host_traddr=10.0.0.7,src_addr=10.0.0.7", "10.0.0.9"),
        ("tcp", "traddr=fd00::9,trsvcid=4420", "fd00::9"),
    ],
)
def test_a_nic_through_which_nvme_is_reached_is_not_disturbed(
    kernel: Kernel, transport: str, address: str, server: str
) -> None:
    settle(kernel, spec())
    put_nvme(kernel, transport, address)
    kernel.servers[server] = "enp33s0"
    kernel.set_link(kernel.netdev(PF).ifindex, up=True)
    assert deferred(settle(kernel, spec(6))) == (f"nvme1 of {server} ({PF})",)


@pytest.mark.parametrize(
    ("transport", "address"),
    [("pcie", "0000:01:00.0"), ("fc", "traddr=10.0.0.9"), ("rdma", "host_traddr=10.0.0.9,src_addr=10.0.0.9")],
)
def test_nvme_that_is_not_reached_through_a_nic_is_no_user(kernel: Kernel, transport: str, address: str) -> None:
    settle(kernel, spec())
    put_nvme(kernel, transport, address)
    kernel.servers["10.0.0.9"] = "enp33s0"
    kernel.set_link(kernel.netdev(PF).ifindex, up=True)
    settle(kernel, spec(6))
    assert len(kernel.vfs(PF)) == 6


def put_nvme(kernel: Kernel, transport: str, address: str) -> None:
    """A controller, beside one of this machine's own."""
    for name, fields in (("nvme0", ("pcie", "0000:02:00.0")), ("nvme1", (transport, address))):
        for file, text in zip(("transport", "address"), fields, strict=True):
            kernel.tree.put(f"/sys/class/nvme/{name}/{file}", text)


def test_a_mount_of_this_machine_s_own_is_no_user(kernel: Kernel) -> None:
    settle(kernel, spec())
    # Anybody may mount a FUSE file system, and name its source.
    forged = "me\u2028x:/e\u2003/data\u2003nfs4\u2003addr=10.0.0.9 /home/me/m fuse.sshfs rw 0 0"
    forged += "\n\x0cx:/e\x1c/data\x1cnfs4\x1caddr=10.0.0.9 /home/me/m fuse.sshfs rw 0 0"
    kernel.tree.put("/proc/1/mounts", f"/dev/sda1 /data ext4 rw,comment=10.0.0.9 0 0\n\nodd\n{forged}")
    kernel.servers["10.0.0.9"] = "enp33s0"
    kernel.set_link(kernel.netdev(PF).ifindex, up=True)
    settle(kernel, spec(6))
    assert len(kernel.vfs(PF)) == 6


def test_a_nic_with_the_nodes_address_or_in_a_bond_is_not_disturbed(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.ip["enp33s0"] = ("10.0.0.7/24",)
    kernel.tree.put("/sys/class/net/enp33s0/upper_bond0/ifindex", "9")
    affected = deferred(settle(kernel, spec(6, node_name="10.0.0.7")))
    assert affected == (f"the node's address on enp33s0 ({PF})", f"bond0 on enp33s0 ({PF})")


def test_another_number_of_vfs_disturbs_users_of_the_pf_only_if_its_link_goes_down(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.routed.add("enp33s0")
    kernel.set_link(kernel.netdev(PF).ifindex, up=True)
    assert deferred(settle(kernel, spec(6))) == (f"a route through enp33s0 ({PF})",)
    kernel.tree.link(f"/sys/bus/pci/devices/{PF}/driver", "../../../bus/pci/drivers/mlx5_core")
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, spec(6))) == (f"pod team/trainer-0 ({PF}#2)",)
    kernel.host.allocated.clear()
    settle(kernel, spec(6))
    assert len(kernel.vfs(PF)) == 6


@pytest.mark.parametrize("look", [users, owners])
def test_a_lookup_for_one_vf_reads_nothing_of_the_others(kernel: Kernel, look: Any) -> None:
    settle(kernel, spec())
    vfs = vf_addresses(kernel, PF)
    asked: list[str] = []
    machine = seen(kernel.machine(), lambda what, where: asked.append(where))
    want = resolve(spec(), discover(kernel.machine()))
    hand_to_pod(kernel, 2)
    assert look(machine, want, PF, frozenset({f"{PF}#2"})).keys() == {f"{PF}#2"}
    assert any(vfs[2] in where for where in asked)
    assert not any(vfs[index] in where for index in (0, 1, 3) for where in asked)


def test_only_force_in_the_spec_disturbs_users(kernel: Kernel) -> None:
    settle(kernel, spec())
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, spec(6), allow=Disruption.REBOOT))
    assert is_ready(settle(kernel, spec(6, {"force": True})).conditions)


def test_waiting_changes_of_a_new_spec_leave_the_node_ready(kernel: Kernel) -> None:
    settle(kernel, spec())
    hand_to_pod(kernel, 2)
    result = settle(kernel, spec(6, trust=True), verified=spec())
    assert is_ready(result.conditions)
    assert {outcome.change.field for outcome in result.waiting} >= {"count"}
    # What is made later is no drift.
    assert not result.as_wanted
    assert [vf.trust for vf in kernel.vfs(PF)] == [True, True, False, True]
    kernel.host.allocated.clear()
    result = settle(kernel, spec(6, trust=True), verified=spec())
    assert is_ready(result.conditions)
    assert not result.waiting
    assert result.as_wanted


def test_rdma_devices_of_waiting_vfs_are_not_reported_missing(kernel: Kernel) -> None:
    def with_rdma(count: int) -> NodeSpec:
        nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": count}, "rdma": {"pf": False, "vfs": True}}
        return from_mapping({"node_name": "n1", "nics": [nic]})

    def devices(result: Pass) -> str:
        return next(condition.status for condition in result.conditions if condition.type == "RdmaDevices")

    kernel.rdma.rxe = True
    assert devices(settle(kernel, with_rdma(4))) == "True"
    hand_to_pod(kernel, 2)
    result = settle(kernel, with_rdma(6), verified=with_rdma(4))
    assert result.waiting
    assert devices(result) == "True"
    kernel.host.allocated.clear()
    assert devices(settle(kernel, with_rdma(6), verified=with_rdma(4))) == "True"
    assert len(kernel.vfs(PF)) == 6


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"rdma": {"pf": True, "gid_type": "RoCE v2"}}, {}),
        ({"rdma": {"pf": True, "gid_type": "RoCE v2"}}, {"rdma": {"pf": True}}),
        ({"irqs": {"irqbalance": "banned"}}, {}),
    ],
    ids=["rdma", "gids", "irqbalance"],
)
def test_while_changes_wait_the_probes_judge_by_the_verified_spec(
    kernel: Kernel, before: dict[str, object], after: dict[str, object]
) -> None:
    def wanting(count: int, irqs: object = None, **more: object) -> NodeSpec:
        nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": count}, **more}
        return from_mapping({"node_name": "n1", "nics": [nic], "irqs": irqs or {}})

    kernel.rdma.add(PF, "rocep33s0", "enp33s0")
    assert is_ready(settle(kernel, wanting(4, **before)).conditions)
    hand_to_pod(kernel, 2)
    result = settle(kernel, wanting(6, **after), verified=wanting(4, **before))
    assert result.waiting
    assert is_ready(result.conditions), result.conditions


def test_deferred_drift_makes_the_node_not_ready(kernel: Kernel) -> None:
    wanted = spec(disruption={"allow": "none"})
    settle(kernel, wanted, allow=Disruption.VF_RESET)
    kernel.write(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "0")
    result = settle(kernel, wanted, verified=wanted)
    assert not is_ready(result.conditions)
    assert not result.waiting


def test_a_pods_vf_keeps_the_attributes_that_its_network_plugin_set(kernel: Kernel) -> None:
    wanted = spec(vlan=7, trust=False)
    settle(kernel, wanted)
    hand_to_pod(kernel, 2)
    index = kernel.netdev(PF).ifindex
    for vf in (1, 2):
        kernel.set_vf(index, vf, vlan=99, mac="02:aa:00:00:00:01")
    result = settle(kernel, wanted)
    assert is_ready(result.conditions)
    assert [vf.vlan for vf in kernel.vfs(PF)] == [7, 7, 99, 7]
    assert kernel.vfs(PF)[2].mac == "02:aa:00:00:00:01"


def test_with_owner_trackbed_a_pods_vf_gets_the_attributes_of_the_spec(kernel: Kernel) -> None:
    wanted = spec(vlan=7, owner="trackbed")
    settle(kernel, wanted)
    hand_to_pod(kernel, 2)
    kernel.set_vf(kernel.netdev(PF).ifindex, 2, vlan=99)
    assert is_ready(settle(kernel, wanted).conditions)
    assert kernel.vfs(PF)[2].vlan == 7


NOONISH = {"allow": "none", "windows": [{"start": "11:00", "end": "12:00", "allow": "vf-reset"}]}
NIGHTLY = {"allow": "none", "windows": [{"start": "22:00", "end": "02:00", "allow": "vf-reset", "days": ["Wed"]}]}


@pytest.mark.parametrize(
    ("now", "open_"),
    [
        (NOON, False),
        (NOON.replace(hour=22), True),
        (NOON.replace(day=5, hour=1, minute=59), True),
        (NOON.replace(day=5, hour=2), False),
        (NOON.replace(hour=1), False),
        (NOON.replace(day=5, hour=23), False),
    ],
)
def test_a_maintenance_window_allows_more_while_it_is_open(kernel: Kernel, now: datetime, open_: bool) -> None:
    settle(kernel, spec())
    result = settle(kernel, spec(6, NIGHTLY), now=now)
    assert is_ready(result.conditions) is open_
    if not open_:
        (outcome,) = [outcome for outcome in result.outcomes if outcome.result == "deferred"]
        assert "more in the window Wed 22:00-02:00 UTC (vf-reset)" in outcome.error


@pytest.mark.parametrize(
    ("now", "open_"),
    [
        (NOON.replace(hour=10, minute=59, second=59), False),
        (NOON.replace(hour=11), True),
        (NOON.replace(hour=11, minute=59, second=59), True),
        (NOON, False),
    ],
)
def test_a_maintenance_window_closes_at_its_end(kernel: Kernel, now: datetime, open_: bool) -> None:
    settle(kernel, spec())
    assert is_ready(settle(kernel, spec(6, NOONISH), now=now).conditions) is open_


def test_a_nics_policy_replaces_the_nodes_policy(kernel: Kernel) -> None:
    settle(kernel, spec())
    nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": 6}, "disruption": {"allow": "none"}}
    result = settle(kernel, from_mapping({"node_name": "n1", "nics": [nic]}))
    assert not is_ready(result.conditions)


def converge_with(
    kernel: Kernel, wanted: NodeSpec, wait_until_published: Callable[[Change], None], clock: Callable[[], float]
) -> Pass:
    return converge(
        kernel.machine(),
        Goal(wanted, at=NOON),
        Memory(clock),
        callbacks=Callbacks(wait_until_published=wait_until_published),
    )


def test_a_pod_that_gets_a_vf_during_the_publication_keeps_it(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.writes.clear()
    seconds = [0.0]

    def publish(change: Change) -> None:
        hand_to_pod(kernel, 2)
        seconds.append(1.0)

    result = converge_with(kernel, spec(6), publish, lambda: seconds[-1])
    assert deferred(result) == (f"pod team/trainer-0 ({PF}#2)",)
    assert kernel.writes == []


def test_not_ready_is_published_once_before_the_first_disruptive_write_only(kernel: Kernel) -> None:
    published: list[tuple[str, int]] = []
    settle(kernel, spec())
    kernel.writes.clear()

    def publish(change: Change) -> None:
        published.append((change.field, len(kernel.writes)))

    converge_with(kernel, spec(trust=True), publish, lambda: 0.0)
    assert published == [] and kernel.vfs(PF)[1].trust
    kernel.writes.clear()
    converge_with(kernel, spec(6, trust=True), publish, lambda: 0.0)
    assert published == [("count", 0)]


class Slow:
    """A machine on which each read takes half a second. At read number ``at``, ``take`` hands a VF to a user.

    ``log``: the reads, and the VFs that were unbound.
    """

    def __init__(self, at: int, take: Callable[[Kernel, str], None]) -> None:
        self.kernel = Kernel()
        self.kernel.add_nic(PF, "enp33s0", MAC)
        self.kernel.load_vfio()
        settle(self.kernel, spec())
        self.vf = vf_addresses(self.kernel, PF)[2]
        self.at, self.take = at, take
        self.now = 0.0
        self.log: list[str] = []
        self.kernel.fault = self.write

    def see(self, what: str, where: str) -> None:
        if len(self.log) == self.at:
            self.take(self.kernel, self.vf)
        self.log.append(what)
        self.now += 0.5

    def write(self, operation: str, where: str, value: str) -> None:
        if where.endswith("/driver/unbind"):
            self.log.append(f"unbind {value}")

    def converge(self) -> list[str]:
        machine = seen(self.kernel.machine(), self.see)
        converge(machine, Goal(spec(driver="vfio-pci"), at=NOON), Memory(lambda: self.now))
        return self.log


def give_to_pod(kernel: Kernel, vf: str) -> None:
    kernel.host.allocated[vf] = ("team/trainer-0",)


@pytest.mark.parametrize(
    ("take", "look"),
    [(give_to_pod, "kubelet.allocations"), (Kernel.move_away, "files.names")],
    ids=["pod", "namespace"],
)
def test_a_vf_that_gets_a_user_while_other_vfs_are_rebound_is_not_unbound(
    take: Callable[[Kernel, str], None], look: str
) -> None:
    undisturbed = Slow(-1, take)
    log = undisturbed.converge()
    unbound = log.index(f"unbind {undisturbed.vf}")
    first = log.index("kubelet.allocations")
    last = max(number for number in range(unbound) if log[number] == look)
    assert unbound - last < 12, "many reads lie between the last lookup of users and the write"
    for at in (number for number in range(first, last + 1) if not log[number].startswith("unbind")):
        slow = Slow(at, take)
        assert f"unbind {slow.vf}" not in slow.converge(), f"taken before read {at} of {last}, but unbound"


def test_a_vf_that_gets_an_owner_while_other_vfs_are_changed_keeps_its_attributes(kernel: Kernel) -> None:
    settle(kernel, spec())
    seconds = [0.0]

    def write(operation: str, where: str, value: str) -> None:
        seconds.append(seconds[-1] + 1.0)
        hand_to_pod(kernel, 3)

    kernel.fault = write
    converge(kernel.machine(), Goal(spec(trust=True), at=NOON), Memory(lambda: seconds[-1]))
    assert [vf.trust for vf in kernel.vfs(PF)] == [True, True, True, False]


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["quick", "slow"])
def test_a_vf_that_gets_an_owner_before_any_read_keeps_its_attributes(step: float) -> None:
    """A lookup is of the VF itself and comes right before its write, however long reads take."""

    def converged(at: int) -> tuple[int, int, bool]:
        """Where in the log the VF's attribute is written, where its last lookup before that is, and its value afterwards."""
        kernel = Kernel()
        kernel.add_nic(PF, "enp33s0", MAC)
        settle(kernel, spec())
        vf = vf_addresses(kernel, PF)[2]
        log: list[str] = []

        def see(what: str, where: str) -> None:
            if len(log) >= at:
                give_to_pod(kernel, vf)
            log.append(what)

        def write(operation: str, where: str, value: str) -> None:
            log.append(f"vf {value.partition(' ')[0]}" if operation == "set_vf" else operation)

        kernel.fault = write
        converge(seen(kernel.machine(), see), Goal(spec(trust=True), at=NOON), Memory(lambda: step * len(log)))
        written = log.index("vf 2") if "vf 2" in log else -1
        looks = [number for number, what in enumerate(log[: max(written, 0)]) if what == "kubelet.allocations"]
        return written, max(looks, default=-1), kernel.granted(vf).trust

    written, last, _ = converged(at=10_000)
    assert 0 < written - last < 12, "many reads lie between the last lookup of owners and the write"
    for at in range(0, last + 1, 3):
        assert not converged(at)[-1], f"taken before read {at} of {last}, but written"


def test_a_device_whose_rdma_users_cannot_be_read_is_not_disturbed(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.rdma.add(None, "rxe0", kernel.netdev(vf_addresses(kernel, PF)[1]).name)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)

    def broken(what: str, where: str) -> None:
        if where.startswith("/sys/class/infiniband/"):
            raise OSError(errno.EIO, "Input/output error", where)

    machine = seen(kernel.machine(), broken)
    result = converge(machine, Goal(spec(6), at=NOON), Memory(lambda: 0.0))
    (failed,) = [outcome for outcome in result.outcomes if outcome.result == "failed"]
    assert failed.error.startswith("its users cannot be determined")
    assert len(kernel.vfs(PF)) == 4
