"""Users keep their devices: what the policy allows when, and which changes of a new spec wait."""

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.hardware.functions import vf_addresses
from agent.machine import QueueUser
from agent.report.records import Change, Disruption
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec, from_mapping
from tests.sim.kernel import Kernel
from tests.sim.passes import condition, rail0, settle, spec_of
from tests.sim.seams import seen
from tests.sim.two_nics import two_nics

PF = "0000:21:00.0"
MAC = "02:00:00:00:01:00"
NOON = datetime(2026, 3, 4, 12, 0, tzinfo=timezone.utc)  # a Wednesday


def spec(count: int = 4, disruption: object = None, node_name: str = "n1", **attributes: object) -> NodeSpec:
    nic = {"name": "rail0", "select": {"pci": PF}, "vfs": {"count": count, "defaults": attributes}}
    return from_mapping({"node_name": node_name, "nics": [nic], "disruption": disruption or {}})


def deferred(result: Pass) -> tuple[str, ...]:
    """The affected of the one change that was deferred."""
    (outcome,) = [outcome for outcome in result.outcomes if outcome.result == "deferred"]
    return outcome.change.affected


def hand_to_pod(kernel: Kernel, index: int) -> None:
    kernel.host.allocated[vf_addresses(kernel.files, PF)[index]] = ("team/trainer-0",)


def test_only_force_in_the_spec_disturbs_users(kernel: Kernel) -> None:
    settle(kernel, spec())
    hand_to_pod(kernel, 2)
    assert deferred(settle(kernel, spec(6), asked=lambda: (Disruption.REBOOT, "")))
    assert deferred(settle(kernel, spec(6, {"force": True, "allow": "link-flap"}))), "force is about users alone"
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
        return rail0(vfs={"count": count}, rdma={"pf": False, "vfs": True})

    def devices(result: Pass) -> str:
        return condition(result, "RdmaDevices").status

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
        return spec_of(nic, irqs=irqs or {})

    kernel.rdma.add(PF, "rocep33s0", "enp33s0")
    assert is_ready(settle(kernel, wanting(4, **before)).conditions)
    hand_to_pod(kernel, 2)
    result = settle(kernel, wanting(6, **after), verified=wanting(4, **before))
    assert result.waiting
    assert is_ready(result.conditions), result.conditions


def test_deferred_drift_makes_the_node_not_ready(kernel: Kernel) -> None:
    wanted = spec(disruption={"allow": "none"})
    settle(kernel, wanted, asked=lambda: (Disruption.VF_RESET, ""))
    kernel.files.write(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "0")
    result = settle(kernel, wanted, verified=wanted)
    assert not is_ready(result.conditions)
    assert not result.waiting


def test_with_owner_trackbed_a_pods_vf_gets_the_attributes_of_the_spec(kernel: Kernel) -> None:
    wanted = spec(vlan=7, owner="trackbed")
    settle(kernel, wanted)
    hand_to_pod(kernel, 2)
    kernel.netlink.set_vf(kernel.netdev(PF).ifindex, 2, vlan=99)
    assert is_ready(settle(kernel, wanted).conditions)
    assert kernel.vfs(PF)[2].vlan == 7


NOONISH: dict[str, object] = {"allow": "none", "windows": [{"start": "11:00", "end": "12:00", "allow": "vf-reset"}]}
NIGHTLY: dict[str, object] = {
    "allow": "none",
    "windows": [
        {"start": "22:00", "end": "02:00", "allow": "vf-reset", "days": ["Wed"]},
        {"start": "03:00", "end": "04:00", "allow": "none"},
    ],
}


@pytest.mark.parametrize(
    ("windows", "now", "open_"),
    [
        (NIGHTLY, NOON, False),
        (NIGHTLY, NOON.replace(hour=22), True),
        (NIGHTLY, NOON.replace(day=5, hour=1, minute=59), True),
        (NIGHTLY, NOON.replace(day=5, hour=2), False),
        (NIGHTLY, NOON.replace(hour=1), False),
        (NIGHTLY, NOON.replace(day=5, hour=23), False),
        (NOONISH, NOON.replace(hour=10, minute=59, second=59), False),
        (NOONISH, NOON.replace(hour=11), True),
        (NOONISH, NOON.replace(hour=11, minute=59, second=59), True),
        (NOONISH, NOON, False),
    ],
)
def test_a_maintenance_window_allows_more_while_it_is_open(
    kernel: Kernel, windows: dict[str, object], now: datetime, open_: bool
) -> None:
    settle(kernel, spec())
    result = settle(kernel, spec(6, windows), time_of_day=lambda: now)
    assert is_ready(result.conditions) is open_
    if not open_:
        (outcome,) = [outcome for outcome in result.outcomes if outcome.result == "deferred"]
        assert f"more in the window {'Wed 22:00-02:00' if windows is NIGHTLY else '11:00-12:00'} UTC" in outcome.error


def test_a_nics_policy_replaces_the_nodes_policy(kernel: Kernel) -> None:
    settle(kernel, spec())
    result = settle(kernel, rail0(vfs={"count": 6}, disruption={"allow": "none"}))
    assert not is_ready(result.conditions)


@pytest.mark.parametrize("by", ["window", "apply"])
def test_what_is_allowed_no_more_when_not_ready_is_published_is_not_done(kernel: Kernel, by: str) -> None:
    """Publication may take most of a minute. Meanwhile the window closes, or the operator ends `trackbed apply`."""
    settle(kernel, spec())
    over: list[Change] = []

    def asked() -> tuple[Disruption | None, str]:
        return (None if over or by == "window" else Disruption.VF_RESET), ""

    result = settle(
        kernel,
        spec(6, NOONISH if by == "window" else {"allow": "none"}),
        callbacks=Callbacks(wait_until_published=over.append),
        asked=asked,
        time_of_day=lambda: NOON if over else NOON - timedelta(seconds=1),
    )
    assert deferred(result) == () and over and len(kernel.vfs(PF)) == 4


def converge_with(
    kernel: Kernel, wanted: NodeSpec, wait_until_published: Callable[[Change], None], clock: Callable[[], float]
) -> Pass:
    return converge(
        kernel.machine(), Goal(wanted), Memory(clock), callbacks=Callbacks(wait_until_published=wait_until_published)
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
    """A machine on which each read takes ``step`` seconds. At read number ``at``, ``take`` gives VF 2 to a user.

    ``log``: the reads, and the VFs that were unbound, or whose attributes were set.
    """

    def __init__(self, at: int, take: Callable[[Kernel, str], None], step: float = 0.5) -> None:
        self.kernel = two_nics()
        self.kernel.load_vfio()
        settle(self.kernel, spec())
        self.vf = vf_addresses(self.kernel.files, PF)[2]
        self.at, self.take, self.step = at, take, step
        self.now = 0.0
        self.log: list[str] = []
        self.kernel.fault = self.write

    def see(self, what: str, where: str) -> None:
        if len(self.log) == self.at:
            self.take(self.kernel, self.vf)
        self.log.append(what)
        self.now += self.step

    def write(self, operation: str, where: str, value: str) -> None:
        if where.endswith("/driver/unbind"):
            self.log.append(f"unbind {value}")
        elif operation == "set_vf":
            self.log.append(f"set VF {value.partition(' ')[0]}")

    def converge(self, **wanted: object) -> list[str]:
        machine = seen(self.kernel.machine(), self.see)
        converge(machine, Goal(spec(**wanted)), Memory(lambda: self.now))  # type: ignore[arg-type]
        return self.log


def moments(log: list[str], written: str, look: str) -> list[int]:
    """Where the reads are from the first lookup of users to the last one before a write, which must come right before it."""
    at = log.index(written)
    last = max(number for number in range(at) if log[number] == look)
    assert at - last < 12, "many reads lie between the last lookup of users and the write"
    return [number for number in range(log.index("kubelet.allocations"), last + 1) if " " not in log[number]]


def give_to_pod(kernel: Kernel, vf: str) -> None:
    kernel.host.allocated[vf] = ("team/trainer-0",)


@pytest.mark.parametrize(
    ("take", "look"),
    [(give_to_pod, "kubelet.allocations"), (Kernel.move_away, "files.names")],
    ids=["pod", "namespace"],
)
def test_a_vf_that_gets_a_user_meanwhile_is_not_unbound(take: Callable[[Kernel, str], None], look: str) -> None:
    undisturbed = Slow(-1, take)
    for at in moments(undisturbed.converge(driver="vfio-pci"), f"unbind {undisturbed.vf}", look):
        slow = Slow(at, take)
        assert f"unbind {slow.vf}" not in slow.converge(driver="vfio-pci"), f"taken before read {at}, but unbound"


def test_a_vf_that_gets_an_owner_while_other_vfs_are_changed_keeps_its_attributes(kernel: Kernel) -> None:
    settle(kernel, spec())
    seconds = [0.0]

    def write(operation: str, where: str, value: str) -> None:
        seconds.append(seconds[-1] + 1.0)
        hand_to_pod(kernel, 3)

    kernel.fault = write
    settle(kernel, spec(trust=True), now=seconds[-1])
    assert [vf.trust for vf in kernel.vfs(PF)] == [True, True, True, False]


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["quick", "slow"])
def test_a_vf_that_gets_an_owner_before_any_read_keeps_its_attributes(step: float) -> None:
    """A lookup is of the VF itself and comes right before its write, however long reads take."""
    for at in moments(Slow(-1, give_to_pod, step).converge(trust=True), "set VF 2", "kubelet.allocations")[::3]:
        slow = Slow(at, give_to_pod, step)
        slow.converge(trust=True)
        assert not slow.kernel.sriov.granted(slow.vf).trust, f"taken before read {at}, but written"


def of_ice(kernel: Kernel) -> None:
    """The PF has the driver ice, which resets a VF when its VLAN is set."""
    kernel.set_driver(PF, "ice")


def test_an_attribute_for_which_the_driver_resets_the_vf_waits_for_the_users_of_the_vf(kernel: Kernel) -> None:
    of_ice(kernel)
    settle(kernel, spec())
    kernel.rdma.add(vf_addresses(kernel.files, PF)[1], "rocep33s0v1", None)
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    result = settle(kernel, spec(vlan=7))
    assert deferred(result) == (f"ib_write_bw (pid 4711) ({PF}#1)",)
    assert [vf.vlan for vf in kernel.vfs(PF)] == [7, 0, 7, 7]
    # Spoof checking is set without a reset.
    assert not deferred_fields(settle(kernel, spec(spoofchk=False)))
    kernel.host.open.clear()
    assert is_ready(settle(kernel, spec(vlan=7)).conditions)
    assert kernel.vfs(PF)[1].vlan == 7


def deferred_fields(result: Pass) -> set[str]:
    return {outcome.change.field for outcome in result.outcomes if outcome.result == "deferred"}


def test_a_vf_that_an_attribute_resets_is_disturbed_if_it_has_a_driver(kernel: Kernel) -> None:
    of_ice(kernel)
    settle(kernel, spec())
    kernel.unbind(vf_addresses(kernel.files, PF)[2])
    result = settle(kernel, spec(disruption={"allow": "none"}, trust=True))
    assert [vf.trust for vf in kernel.vfs(PF)] == [False, False, True, False]
    assert {o.change.disruption for o in result.outcomes if o.result == "deferred"} == {Disruption.REBIND}


@pytest.mark.parametrize(
    ("driver", "name", "value", "waits"),
    [
        ("ixgbe", "trust", True, True),  # it pings the VF, which resets itself (ixgbe_ndo_set_vf_trust)
        ("ixgbe", "vlan", 7, False),
        ("hns3", "vlan", 7, True),
        ("hns3", "trust", True, False),  # no VF is told (hclge_set_vf_trust)
    ],
)
def test_only_what_resets_a_vf_waits_for_its_users(
    kernel: Kernel, driver: str, name: str, value: object, waits: bool
) -> None:
    kernel.set_driver(PF, driver)
    settle(kernel, spec())
    kernel.host.open["/dev/infiniband/uverbs0"] = ("ib_write_bw (pid 4711)",)
    kernel.rdma.add(vf_addresses(kernel.files, PF)[1], "rocep33s0v1", None)
    changed = {"vlan": 0, "trust": False} | {name: value}
    assert deferred_fields(settle(kernel, spec(vlan=changed["vlan"], trust=changed["trust"]))) == (
        {name} if waits else set()
    )


@pytest.mark.parametrize("driver", ["mlx5_core", "igb"])
def test_channels_wait_for_those_who_have_queues_although_the_link_stays_up(kernel: Kernel, driver: str) -> None:
    """ConnectX keeps the link up for it; the kernel refuses to remove a queue of AF_XDP, and mlx5 any change."""

    def channels(count: int) -> NodeSpec:
        nic = {"name": "rail0", "select": {"pci": PF}, "channels": {"combined": count}}
        return from_mapping({"node_name": "n1", "nics": [nic], "disruption": {"allow": "link-flap"}})

    kernel.set_driver(PF, driver)
    assert is_ready(settle(kernel, channels(4)).conditions)
    kernel.queue_users[PF] = (QueueUser(3, "AF_XDP"),)
    connected = (f"a connection with 10.9.9.9:2049 ({PF})",) if driver == "igb" else ()
    kernel.ip["enp33s0"] = ("10.9.9.1/24",)
    kernel.connect("10.9.9.1:700", "10.9.9.9:2049")
    using = (*connected, f"AF_XDP on queue 3 of enp33s0 ({PF})")
    assert deferred(settle(kernel, channels(2))) == using
    (planned,) = [change for change in dry_run(kernel.machine(), channels(2)).changes if change.kind == "channels"]
    assert planned.affected == using
    kernel.queue_users.clear()
    kernel.sockets.clear()
    assert is_ready(settle(kernel, channels(2)).conditions)
    assert kernel.ethtool.settings("channels", kernel.netdev(PF).ifindex)["combined"].value == 2
