"""An original stays kept until its value is back: refusals, late effects, changes that stop half-way, parts of one setting."""

import errno
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.originals import LOOKS, ORIGINALS
from agent.machine import DcbState
from agent.report.verdict import is_ready
from tests.sim.engine.one_nic import Node, follow_or_die, left, wanting
from tests.sim.hugepages import NODE
from tests.sim.hugepages import Memory as Memory2M
from tests.sim.kernel import NET, Kernel, no_fault
from tests.sim.killed import Killed
from tests.sim.passes import condition
from tests.sim.refusing import refusing
from tests.sim.two_nics import NAME0, PF0

ECN = f"{NET}/{NAME0}/ecn"


@pytest.fixture
def node(kernel: Kernel, tmp_path: Path) -> Node:
    return Node(kernel, tmp_path / ORIGINALS)


# --- one original a value -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sequence",
    [
        [{"rx": 1024}, {"rx": 1024, "tx": 1024}],
        [{"tx": 512}, {"rx": 512}],
        [{"rx": 512, "tx": 512}, {"rx": 1024}],
        [{"rx": 512}, {}, {"tx": 512}],
    ],
    ids=str,
)
@pytest.mark.parametrize("last", [{}, None], ids=["without rings", "without the NIC"])
def test_each_ring_size_has_its_own_original(node: Node, sequence: list[dict[str, int]], last: Any) -> None:
    for rings in sequence:
        assert is_ready(node.follow({"rings": rings} if rings else {}).conditions)
        sizes = node.kernel.ethtool.settings("rings", node.kernel.netdev(PF0).ifindex)
        assert {name: size.value for name, size in sizes.items()} == {"rx": 256, "tx": 256, **rings}
    assert left(node.follow(last)) == []
    sizes = node.kernel.ethtool.settings("rings", node.kernel.netdev(PF0).ifindex)
    assert {name: size.value for name, size in sizes.items()} == {"rx": 256, "tx": 256}


def test_the_link_goes_down_once_for_a_size_that_comes_and_one_that_leaves(node: Node) -> None:
    node.follow({"rings": {"rx": 512}})
    node.kernel.writes.clear()
    node.follow({"rings": {"tx": 1024}})
    assert node.kernel.writes == [(NAME0, "rings {'rx': 256, 'tx': 1024}")]


def test_each_rdma_port_has_its_own_original(node: Node) -> None:
    for name, tos in (("rocep33s0", 32), ("rocep33s1", 96), ("rocep33s2", 0)):
        node.kernel.rdma.add(PF0, name, NAME0)
        node.kernel.rdma.set_cm_defaults(name, 1, tos=tos)
    assert is_ready(node.follow({"roce": {"cm_tos": 106}}).conditions)
    node.kernel.rdma.set_cm_defaults("rocep33s2", 1, tos=5)
    node.follow({})
    assert [node.kernel.rdma.cm_defaults(f"rocep33s{n}", 1).tos for n in range(3)] == [32, 96, 5]  # type: ignore[union-attr]


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [0, 5], ids=["at once", "after hours"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_rate_that_the_driver_refuses_without_a_link_is_restored_when_the_link_is_back(
    node: Node, again: int, restarts: bool
) -> None:
    """igb and ixgbe answer EINVAL (igb_ndo_set_vf_bw, ixgbe_ndo_set_vf_bw)."""
    node.follow({"state": "up", "vfs": {"count": 1, "defaults": {"max_tx_rate": 100}}})
    down: dict[str, Any] = {"state": "down", "vfs": {"count": 1}}
    for _ in range(1 + again):
        result = node.follow(down)
        ((_, refused, why),) = left(result)
        assert (refused, why.partition(":")[0]) == ("failed", "EINVAL")
        assert "(as it was before): EINVAL" in condition(result, "Converged").message
    if restarts:
        node.restart()
    assert left(node.follow({**down, "state": "up"})) == []
    assert node.kernel.vfs(PF0)[0].max_tx_rate == 0


@pytest.mark.parametrize(
    "number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ERANGE, errno.ENOSYS, errno.EBUSY, errno.ENOSPC]
)
def test_whatever_error_refuses_a_restoring_it_is_tried_again_and_said(node: Node, number: int) -> None:
    node.follow({"mtu": 9000})
    node.kernel.fault = lambda operation, where, value: OSError(number, "no") if "mtu=1500" in value else None
    for _ in range(4):
        ((named, result, why),) = left(node.follow({}))
        assert (named, result in ("failed", "unsupported"), why) == ("mtu", True, "no")
    node.kernel.fault = no_fault
    node.restart()
    assert left(node.follow({})) == []
    assert node.kernel.netdev(PF0).mtu == 1500


def test_a_write_that_was_refused_does_not_count_as_written_without_effect(node: Node) -> None:
    refusals = iter([OSError(errno.EBUSY, "busy")] * 2)
    node.kernel.fault = lambda operation, where, value: next(refusals, None) if "mtu=9000" in value else None
    times = count(0, 1000)
    spec = wanting({"mtu": 9000, "vfs": {"count": 1, "defaults": {"mtu": 9000, "trust": True}}})
    result = converge(node.kernel.machine(), Goal(spec), Memory(lambda: float(next(times))))
    assert [error for _, _, error in left(result) if error.startswith("written")] == []
    assert node.kernel.netdev(PF0).mtu == 9000


def test_a_pf_that_was_down_goes_down_after_its_vfs_have_their_rates_again(node: Node) -> None:
    node.follow({"state": "up", "vfs": {"count": 1, "defaults": {"max_tx_rate": 100}}})
    node.kernel.fault = refusing(errno.EBUSY, "max_tx_rate")
    waiting = ("state", "blocked", "its other values are restored first")
    assert waiting in left(node.follow(None))
    assert node.kernel.netdev(PF0).up
    node.kernel.fault = no_fault
    assert left(node.follow(None)) == []
    assert (node.kernel.vfs(PF0)[0].max_tx_rate, node.kernel.netdev(PF0).up) == (0, False)


def test_a_value_that_the_driver_does_not_report_now_stays_kept(node: Node) -> None:
    node.kernel.rdma.dcb[NAME0] = DcbState(frozenset({1}))
    node.follow({"roce": {"pfc": "3"}})
    state = node.kernel.rdma.dcb.pop(NAME0)
    node.follow({})
    node.kernel.rdma.dcb[NAME0] = state
    node.follow({})
    assert node.kernel.rdma.dcb[NAME0].pfc == frozenset({1})


def test_huge_pages_that_cannot_be_found_now_are_reserved_again_later(node: Node) -> None:
    path = f"{NODE}/node0/hugepages/hugepages-2048kB/nr_hugepages"
    node.kernel.files.write(path, "40")
    node.follow(None, hugepages=[{"size": "2M", "count": 2, "numa_node": 0}])
    node.kernel.memory = Memory2M({2048: 10, 1048576: 1})
    ((_, _, why),) = left(node.follow(None))
    assert "10 of 40 pages of 2M" in why and node.kernel.files.read(path) == "10"
    node.restart()
    node.kernel.memory = Memory2M()
    assert left(node.follow(None)) == []
    assert node.kernel.files.read(path) == "40"


# --- late effects -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
def test_an_original_value_that_the_driver_sets_late_stays_the_original(node: Node, restarts: bool) -> None:
    def spoofchk(on: bool | None, catches_up: bool) -> None:
        defaults = {} if on is None else {"spoofchk": on}
        node.follow({"vfs": {"count": 1, "defaults": defaults}}, passes=1)
        if restarts:
            node.restart()
        if catches_up:
            node.kernel.sriov.catch_up()

    node.follow({"vfs": {"count": 1}})
    node.kernel.sriov.able.add(PF0)
    node.kernel.sriov.late.add("spoofchk")
    assert node.kernel.vfs(PF0)[0].spoofchk
    spoofchk(False, catches_up=True)
    spoofchk(False, catches_up=True)
    spoofchk(True, catches_up=False)
    spoofchk(True, catches_up=False)
    spoofchk(None, catches_up=True)
    for _ in range(3):
        spoofchk(None, catches_up=True)
    assert node.kernel.vfs(PF0)[0].spoofchk


def test_a_value_that_is_set_late_is_restored_though_it_had_left_the_spec_before(node: Node) -> None:
    node.follow({"vfs": {"count": 1}})
    node.kernel.sriov.able.add(PF0)
    node.kernel.sriov.late.add("spoofchk")
    node.follow({"vfs": {"count": 1, "defaults": {"spoofchk": False}}}, passes=1)
    node.follow({"vfs": {"count": 1}}, passes=LOOKS - 1)
    node.kernel.sriov.catch_up()
    assert not node.kernel.vfs(PF0)[0].spoofchk
    for _ in range(3):
        node.follow({"vfs": {"count": 1}}, passes=1)
        node.kernel.sriov.catch_up()
    assert node.kernel.vfs(PF0)[0].spoofchk


def test_a_refused_write_does_not_shorten_the_wait_for_a_late_one(node: Node) -> None:
    vfs: dict[str, Any] = {"vfs": {"count": 1}}
    off = {"vfs": {"count": 1, "defaults": {"spoofchk": False}}}
    node.follow(vfs)
    node.kernel.sriov.able.add(PF0)
    node.kernel.fault = refusing(errno.EBUSY, "spoofchk")
    node.follow(off, passes=1)
    node.kernel.fault = no_fault
    node.follow(vfs, passes=LOOKS - 1)
    node.kernel.sriov.late.add("spoofchk")
    node.follow(off, passes=1)
    node.follow(vfs, passes=1)
    node.kernel.sriov.catch_up()
    node.kernel.sriov.late.clear()
    assert not node.kernel.vfs(PF0)[0].spoofchk
    node.follow(vfs)
    assert node.kernel.vfs(PF0)[0].spoofchk


# --- changes of several writes ------------------------------------------------------------------------------


def with_roce(node: Node) -> None:
    for role in ("roce_np", "roce_rp"):
        for priority in range(8):
            node.kernel.tree.put(f"{ECN}/{role}/enable/{priority}", str(int(priority == 6)))
    node.kernel.rdma.dcb[NAME0] = DcbState(frozenset(), frozenset({(26, 5), (46, 6)}))


def roce(node: Node) -> object:
    files = node.kernel.tree.files
    return node.kernel.rdma.dcb[NAME0], {path: text for path, text in files.items() if path.startswith(ECN)}


SEVERAL = [{"ecn": "3-4"}, {"ecn": "0-7"}, {"trust": "dscp"}, {"trust": "pcp"}, {"pfc": "3,5"}]


@pytest.mark.parametrize("wanted", SEVERAL, ids=str)
@pytest.mark.parametrize("what", ["refused", "killed"])
@pytest.mark.parametrize("after", range(4))
def test_a_change_that_stops_half_way_is_taken_back(node: Node, wanted: dict[str, str], what: str, after: int) -> None:
    with_roce(node)
    before = roce(node)
    node.kernel.fault = stopping(what, after)
    follow_or_die(node, {"roce": wanted})
    # Also to take it back is refused half-way.
    node.kernel.fault = stopping(what, 1)
    follow_or_die(node, {})
    node.kernel.fault = no_fault
    node.restart()
    assert left(node.follow({})) == []
    assert roce(node) == before


def test_a_kill_while_an_address_is_removed_leaves_no_setting_of_its_netdev_changed(node: Node) -> None:
    promotes = f"/proc/sys/net/ipv4/conf/{NAME0}/promote_secondaries"
    assert node.kernel.files.read(promotes) == "0"
    node.follow({"rail": 0, "addresses": ["192.0.2.11/24"]})

    def kill(operation: str, where: str, value: str) -> None:
        if operation == "remove_address" or (where == promotes and value == "0"):
            raise Killed

    node.kernel.fault = kill
    follow_or_die(node, {"rail": 0})
    assert node.kernel.files.read(promotes) == "1"
    node.kernel.fault = no_fault
    assert left(node.follow({"rail": 0})) == []
    assert (node.kernel.netlink.addresses(), node.kernel.files.read(promotes)) == ({}, "0")


def test_a_kill_between_the_two_writes_of_a_pair_of_sysctls_loses_neither(node: Node) -> None:
    ratio, amount = "/proc/sys/vm/dirty_ratio", "/proc/sys/vm/dirty_bytes"
    node.kernel.files.write(ratio, "0")
    node.follow(None, sysctls={"vm.dirty_bytes": "1073741824"})

    def kill(operation: str, where: str, value: str) -> None:
        if (where, value) == (ratio, "0"):
            raise Killed

    node.kernel.fault = kill
    with pytest.raises(Killed):
        node.follow(None)
    node.kernel.fault = no_fault
    node.restart()
    assert left(node.follow(None)) == []
    assert [node.kernel.files.read(path) for path in (ratio, amount)] == ["0", "0"]


def stopping(what: str, after: int) -> Callable[[str, str, str], OSError | None]:
    """A fault that lets some writes of RoCE settings pass, and no more."""
    passed = count(0)

    def fault(operation: str, where: str, value: str) -> OSError | None:
        if "/ecn/" not in where and operation not in ("add_dscp", "remove_dscp", "set_pfc"):
            return None
        if next(passed) < after:
            return None
        if what == "killed":
            raise Killed
        return OSError(errno.EINVAL, "the firmware refuses it")

    return fault
