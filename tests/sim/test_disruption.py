"""Nobody loses a device: who is in the way, what is allowed when, and what a new spec waits for."""

import errno
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from agent.engine.converge import Pass, converge
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.report.records import Change, Disruption, is_ready
from agent.spec.node import NodeSpec, from_mapping
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

    return converge(kernel.machine(), wanted, None, None, Failures(), clock, allow, verified=verified, now=lambda: now)


def deferred(found: Pass) -> tuple[str, ...]:
    """The affected of the one change that was deferred."""
    (outcome,) = [outcome for outcome in found.outcomes if outcome.result == "deferred"]
    return outcome.change.affected


def hand_to_pod(kernel: Kernel, index: int) -> None:
    kernel.host.allocated[vf_addresses(kernel, PF)[index]] = ("team/trainer-0",)


def test_a_pod_that_the_kubelet_gave_a_vf_is_in_the_way(kernel: Kernel) -> None:
    settle(kernel, spec())
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, spec(6))) == (f"pod team/trainer-0 ({PF}#2)",)


@pytest.mark.parametrize("part", ["infiniband/erdma_0", "mlx5_core.sf.4"])
def test_a_pod_with_a_part_of_a_nic_is_in_the_way_and_owns_no_attributes(kernel: Kernel, part: str) -> None:
    settle(kernel, spec())
    kernel.tree.put(f"/sys/bus/pci/devices/{vf_addresses(kernel, PF)[1]}/{part}/uevent", "")
    name = part.rpartition("/")[2]
    kernel.host.allocated[name] = ("team/trainer-0",)
    kernel.set_vf(kernel.netdev(PF).ifindex, 1, trust=True)
    found = settle(kernel, spec(6, trust=False))
    assert deferred(found) == (f"pod team/trainer-0 by {name} ({PF}#1)",)
    assert not kernel.vfs(PF)[1].trust


def test_a_process_with_an_rdma_device_open_is_in_the_way(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.rdma.add(vf_addresses(kernel, PF)[1], "rocep33s0v1", None)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    kernel.host.open["/dev/infiniband/umad0"] = ("opensm (pid 4712)",)
    assert deferred(settle(kernel, spec(6))) == (f"ib_write_bw (pid 4711) ({PF}#1)",)


@pytest.mark.parametrize("node_type", ["1: CA", "4: RNIC"])
def test_an_rdma_device_that_stands_on_a_netdev_is_in_the_way_of_that(kernel: Kernel, node_type: str) -> None:
    """rxe and siw have no PCI function, and eRDMA's is another one than its netdev's."""
    settle(kernel, spec())
    kernel.rdma.add(None, "rxe0", kernel.netdev(vf_addresses(kernel, PF)[1]).name, node_type=node_type)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    assert deferred(settle(kernel, spec(6))) == (f"ib_write_bw (pid 4711) ({PF}#1)",)


def test_an_rdma_device_of_two_ports_is_in_the_way_of_both(kernel: Kernel) -> None:
    """RoCE LAG: the device is the first port's, the second has none."""
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


def test_a_kubelet_that_does_not_answer_stops_what_disturbs(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.host.kubelet_error = TimeoutError("no answer within 2 s")
    assert all("the kubelet does not say" in victim for victim in deferred(settle(kernel, spec(6))))


@pytest.mark.parametrize(
    ("mounts", "server"),
    [
        ("10.0.0.9:/export /data nfs4 rw,vers=4.2,addr=10.0.0.9 0 0", "10.0.0.9"),
        ("10.0.0.9:6789,10.0.0.10:6789:/ /data ceph rw 0 0", "10.0.0.10"),
        ("[fd00::9]:/export /data nfs rw,addr=fd00::9 0 0", "fd00::9"),
    ],
)
def test_storage_behind_a_nic_keeps_its_link(kernel: Kernel, mounts: str, server: str) -> None:
    settle(kernel, spec())
    kernel.tree.put("/proc/1/mounts", mounts)
    kernel.servers[server] = "enp33s0"
    kernel.set_link(kernel.netdev(PF).ifindex, up=True)
    (victim,) = deferred(settle(kernel, spec(6)))
    assert f"of {server}" in victim


def test_the_node_s_own_address_and_a_bond_keep_a_nic(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.ip["enp33s0"] = ("10.0.0.7/24",)
    kernel.tree.put("/sys/class/net/enp33s0/upper_bond0/ifindex", "9")
    affected = deferred(settle(kernel, spec(6, node_name="10.0.0.7")))
    assert affected == (f"the node's address on enp33s0 ({PF})", f"bond0 on enp33s0 ({PF})")


def test_force_in_the_spec_is_the_only_way_past_users(kernel: Kernel) -> None:
    settle(kernel, spec())
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, spec(6), allow=Disruption.REBOOT))
    assert is_ready(settle(kernel, spec(6, {"force": True})).conditions)


def test_what_a_new_spec_waits_for_leaves_the_node_as_ready_as_it_was(kernel: Kernel) -> None:
    settle(kernel, spec())
    hand_to_pod(kernel, 2)
    found = settle(kernel, spec(6, trust=True), verified=spec())
    assert is_ready(found.conditions)
    assert {outcome.change.field for outcome in found.waiting} >= {"count"}
    assert [vf.trust for vf in kernel.vfs(PF)] == [True, True, False, True]
    kernel.host.allocated.clear()
    found = settle(kernel, spec(6, trust=True), verified=spec())
    assert is_ready(found.conditions)
    assert not found.waiting


def test_the_devices_of_vfs_that_a_new_spec_waits_for_are_not_missed_yet(kernel: Kernel) -> None:
    def with_rdma(count: int) -> NodeSpec:
        nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": count}, "rdma": {"pf": False, "vfs": True}}
        return from_mapping({"node_name": "n1", "nics": [nic]})

    def devices(found: Pass) -> str:
        return next(condition.status for condition in found.conditions if condition.type == "RdmaDevices")

    kernel.rdma.rxe = True
    assert devices(settle(kernel, with_rdma(4))) == "True"
    hand_to_pod(kernel, 2)
    found = settle(kernel, with_rdma(6), verified=with_rdma(4))
    assert found.waiting
    assert devices(found) == "True"
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
def test_what_a_new_spec_does_not_ask_for_is_judged_by_the_one_before_all_the_same(
    kernel: Kernel, before: dict[str, object], after: dict[str, object]
) -> None:
    def wanting(count: int, irqs: object = None, **more: object) -> NodeSpec:
        nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": count}, **more}
        return from_mapping({"node_name": "n1", "nics": [nic], "irqs": irqs or {}})

    kernel.rdma.add(PF, "rocep33s0", "enp33s0")
    assert is_ready(settle(kernel, wanting(4, **before)).conditions)
    hand_to_pod(kernel, 2)
    found = settle(kernel, wanting(6, **after), verified=wanting(4, **before))
    assert found.waiting
    assert is_ready(found.conditions), found.conditions


def test_what_drifts_and_cannot_be_put_back_is_not_ready_though_it_is_deferred(kernel: Kernel) -> None:
    wanted = spec(disruption={"allow": "none"})
    settle(kernel, wanted, allow=Disruption.VF_RESET)
    kernel.write(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "0")
    found = settle(kernel, wanted, verified=wanted)
    assert not is_ready(found.conditions)
    assert not found.waiting


def test_a_pod_s_vf_keeps_what_its_network_plugin_gave_it(kernel: Kernel) -> None:
    wanted = spec(vlan=7, trust=False)
    settle(kernel, wanted)
    hand_to_pod(kernel, 2)
    index = kernel.netdev(PF).ifindex
    for vf in (1, 2):
        kernel.set_vf(index, vf, vlan=99, mac="02:aa:00:00:00:01")
    found = settle(kernel, wanted)
    assert is_ready(found.conditions)
    assert [vf.vlan for vf in kernel.vfs(PF)] == [7, 7, 99, 7]
    assert kernel.vfs(PF)[2].mac == "02:aa:00:00:00:01"


def test_unless_the_spec_says_that_it_stays_ours(kernel: Kernel) -> None:
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
def test_a_window_allows_more_while_it_is_open(kernel: Kernel, now: datetime, open_: bool) -> None:
    settle(kernel, spec())
    found = settle(kernel, spec(6, NIGHTLY), now=now)
    assert is_ready(found.conditions) is open_
    if not open_:
        (outcome,) = [outcome for outcome in found.outcomes if outcome.result == "deferred"]
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
def test_a_window_is_over_at_its_end(kernel: Kernel, now: datetime, open_: bool) -> None:
    settle(kernel, spec())
    assert is_ready(settle(kernel, spec(6, NOONISH), now=now).conditions) is open_


def test_a_nic_s_own_policy_stands_in_the_place_of_the_node_s(kernel: Kernel) -> None:
    settle(kernel, spec())
    nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": 6}, "disruption": {"allow": "none"}}
    found = settle(kernel, from_mapping({"node_name": "n1", "nics": [nic]}))
    assert not is_ready(found.conditions)


def converge_with(
    kernel: Kernel, wanted: NodeSpec, acknowledged: Callable[[Change], None], clock: Callable[[], float]
) -> Pass:
    return converge(
        kernel.machine(), wanted, None, None, Failures(), clock, acknowledged=acknowledged, now=lambda: NOON
    )


def test_a_pod_that_came_while_the_world_was_told_keeps_its_device(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.writes.clear()
    seconds = [0.0]

    def acknowledged(change: Change) -> None:
        hand_to_pod(kernel, 2)
        seconds.append(1.0)

    found = converge_with(kernel, spec(6), acknowledged, lambda: seconds[-1])
    assert deferred(found) == (f"pod team/trainer-0 ({PF}#2)",)
    assert kernel.writes == []


def test_the_world_is_told_once_before_the_first_disruptive_write_and_not_of_others(kernel: Kernel) -> None:
    told: list[tuple[str, int]] = []
    settle(kernel, spec())
    kernel.writes.clear()

    def acknowledged(change: Change) -> None:
        told.append((change.field, len(kernel.writes)))

    converge_with(kernel, spec(trust=True), acknowledged, lambda: 0.0)
    assert told == [] and kernel.vfs(PF)[1].trust
    kernel.writes.clear()
    converge_with(kernel, spec(6, trust=True), acknowledged, lambda: 0.0)
    assert told == [("count", 0)]


class Slow:
    """A machine each of whose reads takes half a second, and on which a VF is taken at the read of a number.

    ``log``: what was read and, of the writes, the VFs that were unbound.
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
        converge(machine, spec(driver="vfio-pci"), None, None, Failures(), lambda: self.now, now=lambda: NOON)
        return self.log


def give_to_pod(kernel: Kernel, vf: str) -> None:
    kernel.host.allocated[vf] = ("team/trainer-0",)


@pytest.mark.parametrize(
    ("take", "look"),
    [(give_to_pod, "kubelet.allocations"), (Kernel.move_away, "files.names")],
    ids=["pod", "namespace"],
)
def test_a_vf_that_is_taken_while_others_are_bound_anew_is_looked_at_once_more(
    take: Callable[[Kernel, str], None], look: str
) -> None:
    undisturbed = Slow(-1, take)
    log = undisturbed.converge()
    unbound = log.index(f"unbind {undisturbed.vf}")
    first = log.index("kubelet.allocations")
    last = max(number for number in range(unbound) if log[number] == look)
    assert unbound - last < 12, "many reads lie between the last look and the write"
    for at in (number for number in range(first, last + 1) if not log[number].startswith("unbind")):
        slow = Slow(at, take)
        assert f"unbind {slow.vf}" not in slow.converge(), f"taken before read {at} of {last}, and unbound all the same"


def test_a_device_whose_rdma_users_cannot_be_told_is_not_disturbed(kernel: Kernel) -> None:
    settle(kernel, spec())
    kernel.rdma.add(None, "rxe0", kernel.netdev(vf_addresses(kernel, PF)[1]).name)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)

    def broken(what: str, where: str) -> None:
        if where.startswith("/sys/class/infiniband/"):
            raise OSError(errno.EIO, "Input/output error", where)

    machine = seen(kernel.machine(), broken)
    found = converge(machine, spec(6), None, None, Failures(), lambda: 0.0, now=lambda: NOON)
    (failed,) = [outcome for outcome in found.outcomes if outcome.result == "failed"]
    assert failed.error.startswith("who uses it cannot be told")
    assert len(kernel.vfs(PF)) == 4
