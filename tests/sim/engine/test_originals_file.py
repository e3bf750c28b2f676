"""The file of originals: what each change leaves in it."""

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
from tests.sim.hugepages import NODE
from tests.sim.kernel import Kernel

MACHINE = Kernel().machine()
WANT = Wanted(NodeSpec("n1"))
LINKS, VFS, HUGEPAGES = (by_name()[name] for name in ("links", "vfs", "hugepages"))
PF0, PF1 = "0000:21:00.0", "0000:41:00.0"


def mtu(before: int | None, after: int, of: str = PF0, **more: Any) -> Change:
    return Change("links", of, "mtu", before, after, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ORIGINALS


@pytest.fixture
def originals(path: Path) -> Originals:
    return Originals.load(path)


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


def test_once_originals_are_lost_no_present_value_is_stored_as_one(path: Path) -> None:
    path.write_text("junk\n")
    originals = Originals.load(path)
    originals.keep(MACHINE, WANT, LINKS, mtu(9000, 4000))
    assert [line for line in lines(path) if line[0] == LINKS.NAME] == []
    condition = Originals.load(path).condition
    assert condition is not None and condition.reason == "Unreadable"


def test_an_unreadable_file_of_originals_counts_as_lost(path: Path) -> None:
    path.mkdir()
    originals = Originals.load(path)
    path.rmdir()
    originals.keep(MACHINE, WANT, LINKS, mtu(9000, 4000))
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
    condition = originals.condition
    assert condition is not None
    assert condition.message.startswith(f"{path} cannot be written: No space left on device; ")
