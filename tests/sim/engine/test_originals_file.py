"""The file of originals: what each change leaves in it, and what kills, a full file system and damage make of it."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.engine.originals import ORIGINALS, SPARE, Originals
from agent.kinds import ANY_VALUE, by_name
from agent.report.records import HOST, Change
from agent.spec.node import NodeSpec
from agent.state.wanted import Wanted
from tests.sim.engine.one_nic import Node, follow_or_die, vf, wanting
from tests.sim.hugepages import NODE
from tests.sim.kernel import Kernel, no_fault
from tests.sim.killed import Killed
from tests.sim.passes import condition, settle
from tests.sim.two_nics import PF0, PF1

MACHINE = Kernel().machine()
WANT = Wanted(NodeSpec("n1"))
LINKS, VFS, HUGEPAGES = (by_name()[name] for name in ("links", "vfs", "hugepages"))

VALUES: dict[str, Any] = {"mtu": 9000, "vfs": {"count": 2, "defaults": {"trust": True}}}
NO_VALUES: dict[str, Any] = {"vfs": {"count": 2}}


def mtu(before: int | None, after: int, of: str = PF0, **more: Any) -> Change:
    return Change("links", of, "mtu", before, after, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ORIGINALS


@pytest.fixture
def node(kernel: Kernel, path: Path) -> Node:
    return Node(kernel, path)


def values(node: Node) -> tuple[int, list[bool]]:
    return node.kernel.netdev(PF0).mtu, [each.trust for each in node.kernel.vfs(PF0)]


def lines(path: Path) -> list[Any]:
    """Each line's kind, target, field, value before, and values written since. The file begins with the first change."""
    if not path.exists():
        return []
    return [json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines()]


def test_a_value_that_cannot_be_read_after_the_change_is_the_agents_own(path: Path, originals: Originals) -> None:
    kernel, pages = Kernel(), Change("hugepages", HOST, "2M", 0, 4)
    originals.keep(kernel.machine(), WANT, HUGEPAGES, pages)
    noted = lines(path)
    kernel.unreadable |= {f"{NODE}/node{node}/hugepages/hugepages-2048kB/nr_hugepages" for node in range(kernel.nodes)}
    originals.seen(kernel.machine(), HUGEPAGES, pages)
    assert lines(path) == noted
    assert {line[4][-1] for line in noted} == {ANY_VALUE}


def test_the_same_change_again_is_not_noted_again(path: Path, originals: Originals) -> None:
    for _ in range(2):
        originals.keep(MACHINE, WANT, LINKS, mtu(1500, 9000))
    assert len(lines(path)) == 1


@pytest.mark.parametrize(
    ("kind", "change"),
    [(VFS, Change("vfs", PF0, "count", 0, 4)), (LINKS, mtu(9000, 1500, original=True)), (LINKS, mtu(None, 9000))],
    ids=["of a kind without originals", "that restores", "of an unknown value"],
)
def test_a_change_that_replaces_no_original_is_not_noted(
    path: Path, originals: Originals, kind: Any, change: Change
) -> None:
    originals.keep(MACHINE, WANT, kind, change)
    assert lines(path) == []


def test_the_file_is_written_anew_once_it_has_too_many_superseded_lines(path: Path, originals: Originals) -> None:
    for of in (PF0, PF1):
        originals.keep(MACHINE, WANT, LINKS, mtu(1500, 9000, of))
    begun, values, most = path.stat().st_ino, [9000, 4000], 0
    while path.stat().st_ino == begun:
        most = len(lines(path))
        # Only a value that was not the last is a new line.
        originals.keep(MACHINE, WANT, LINKS, mtu(values[0], values[1]))
        values.reverse()
    assert most == SPARE + 2 * 2 + 1
    assert [line[1] for line in lines(path)] == [PF0, PF1]


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """It must not outlast the block: pytest's own output may be a larger file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_of_which_only_a_part_was_written_is_not_kept(path: Path, originals: Originals) -> None:
    originals.keep(MACHINE, WANT, LINKS, mtu(1500, 9000))
    with no_file_larger_than(path.stat().st_size + 10):
        originals.keep(MACHINE, WANT, LINKS, mtu(1500, 9000, PF1))
    kept = originals.condition
    assert kept is not None
    assert kept.message.startswith(f"{path} ") and "No space left" in kept.message


# --- kills, damage and a full file system, in whole passes ------------------------------------------------------


def test_a_lost_original_is_reported_and_not_replaced_by_another_value(node: Node) -> None:
    node.follow(VALUES)
    node.path.write_bytes(b"\xff\xfe[[[[\n" + node.path.read_bytes().replace(b"9000", b"9001"))
    for _ in range(2):  # the second reads what the first wrote
        node.restart()
        lost = condition(node.follow({**VALUES, "mtu": 4000}), "OriginalsKept")
        assert (lost.status, lost.reason, lost.severity) == ("False", "Unreadable", "warn")
    node.follow(NO_VALUES)
    assert values(node) == (4000, [False, False]), "the agent wrote 9000, so it is no original; the others are known"


def test_a_reader_of_the_file_does_not_write_to_it(node: Node) -> None:
    node.follow(VALUES)
    before = node.path.read_bytes()
    settle(node.kernel, wanting(NO_VALUES), originals=Originals.load(node.path, keep=False))
    assert node.kernel.netdev(PF0).mtu == 1500
    assert node.path.read_bytes() == before


def test_a_file_that_cannot_be_read_is_reported_and_counts_as_lost(node: Node) -> None:
    node.path.mkdir()
    lost = Originals.load(node.path, keep=False).condition
    assert lost is not None
    assert (lost.status, lost.reason, lost.severity) == ("False", "Unreadable", "warn")
    assert lost.remedy == "set those by hand"
    node.restart()
    node.path.rmdir()
    node.follow(VALUES)
    node.follow(NO_VALUES)
    assert node.kernel.netdev(PF0).mtu == 9000


def test_values_that_a_write_brought_back_stay_forgotten_after_a_restart(node: Node) -> None:
    node.follow(VALUES)
    node.follow(NO_VALUES)
    assert node.kernel.netdev(PF0).mtu == 1500
    node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, mtu=9000)
    node.restart()
    node.follow(NO_VALUES)
    assert node.kernel.netdev(PF0).mtu == 9000, "an operator has set it since: there is nothing to restore"


def test_if_originals_cannot_be_written_that_is_reported(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.follow(NO_VALUES)
    capsys.readouterr()
    with no_file_larger_than(0):
        kept = condition(node.follow(VALUES), "OriginalsKept")
    assert node.kernel.netdev(PF0).mtu == 9000
    why = f"{node.path} cannot be written: File too large"
    assert kept.message == f"{why}; they are lost if the agent ends now"
    assert (kept.status, kept.reason, kept.severity) == ("False", "NotWritten", "warn")
    assert kept.remedy == "make room in /run"
    said = f"{why}; until it can be, a restart of the agent forgets what values were before"
    assert capsys.readouterr().err.splitlines() == [said], "said once"
    result = node.follow({**VALUES, "mtu": 4000})
    assert "OriginalsKept" not in {each.type for each in result.conditions}
    node.restart()
    node.follow(NO_VALUES)
    assert values(node) == (1500, [False, False])


def test_a_link_that_a_kill_left_down_is_not_noted_as_down_before(node: Node) -> None:
    node.follow(NO_VALUES)
    node.path.unlink()  # as after a reboot: the agent finds the VFs up
    node.restart()
    function = vf(node, 0)
    node.kernel.carriers.lose(function)

    def kill(operation: str, where: str, value: str) -> None:
        if operation == "set_link" and "up=True" in value:
            raise Killed

    node.kernel.fault = kill
    follow_or_die(node, NO_VALUES)
    assert not node.kernel.netdev(function).up
    node.kernel.fault = no_fault
    node.follow(NO_VALUES)
    node.follow(None)
    assert node.kernel.netdev(function).up
