"""The file of a run, from which a stopped run is resumed: a JSON line for the run, one for each result, and one for its end."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cattrs
from attrs import define, evolve, field, frozen

from agent.documents import read
from fleet.fabric.collective import Collective
from fleet.fabric.ends import End, Ends, by_name
from fleet.fabric.results import FabricResult
from fleet.fabric.tests import TESTS, FabricSettings
from fleet.paths import state

_converter = cattrs.Converter()

LARGEST = 1 << 30
"""Bytes of a file of results."""


def default_path() -> Path:
    """The file of the last run, on the control host."""
    return state() / "fabric" / "results.jsonl"


class Damaged(ValueError):
    """The file is not one of a run; the message names it, the line and the remedy."""


class UnderWay(ValueError):
    """Another process tests, and writes to the file."""


@frozen
class Run:
    """What is tested.

    ``absent``: nodes, and NICs as ``NODE/NIC``, that could not be tested, with the reason. ``began``: when, by time.time().
    """

    ends: tuple[End, ...]
    settings: FabricSettings
    absent: dict[str, str]
    began: float

    def by_name(self) -> Ends:
        """The ends by their names."""
        return by_name(self.ends)


def _known(result: FabricResult, ends: Ends) -> FabricResult:
    """Return the result.

    :raises LookupError: this version does not know its test, or the run does not have one of its ends.
    """
    _ = TESTS[result.test], ends[result.server], ends[result.client]
    return result


@define
class Journal:
    """A run's file, and what is in it."""

    path: Path
    run: Run
    results: list[FabricResult]
    collectives: list[Collective] = field(factory=list)
    ended: float | None = None

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read a file. A last line that was not written to its end is left out.

        :raises Damaged: it is not the file of a run.
        :raises OSError: it cannot be read.
        """
        try:
            *lines, _ = read(path, LARGEST).split("\n")
        except ValueError as error:
            raise Damaged(f"{path} cannot be read: {error}; move the file away, and test again") from None
        made: Journal | None = None
        ends: Ends = {}
        for number, line in enumerate(lines, 1):
            try:
                ((kind, value),) = json.loads(line).items()
                if kind == "run":
                    made = cls(path, _converter.structure(value, Run), [])
                    ends = made.run.by_name()
                elif made is not None and kind == "result":
                    made.results.append(_known(_converter.structure(value, FabricResult), ends))
                elif made is not None and kind == "collective":
                    made.collectives.append(_converter.structure(value, Collective))
                elif made is not None and kind == "ended":
                    made.ended = float(value)
            except Exception:  # cattrs raises exception groups
                raise Damaged(f"{path}, line {number}, cannot be read; move the file away, and test again") from None
        if made is None:
            raise Damaged(f"{path} has no run; move the file away, and test again")
        return made

    @classmethod
    def open(cls, path: Path, run: Run) -> Journal:
        """Resume the stopped run in the file if it tests the same; else begin a new one, and keep the old file.

        :raises Damaged: the file is not that of a run.
        :raises UnderWay: another process has opened it, and has not ended.
        :raises OSError: it cannot be read or written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _lock(path)
        if path.exists():
            earlier = cls.read(path)
            if earlier.ended is None and evolve(earlier.run, began=0, absent={}) == evolve(run, began=0, absent={}):
                _cut(path)
                return earlier
            stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(earlier.run.began))
            path.rename(path.with_name(f"{path.stem}-{stamp}{path.suffix}"))
        made = cls(path, run, [])
        made._write([{"run": _converter.unstructure(run)}])
        return made

    def add(self, results: Sequence[FabricResult], collectives: Sequence[Collective] = ()) -> None:
        """Append results; they are on the disk when this returns."""
        new = {"result": results, "collective": collectives}
        self._write([{kind: _converter.unstructure(each)} for kind, all in new.items() for each in all])
        self.results += results
        self.collectives += collectives

    def finish(self) -> None:
        """Note that all tests are done."""
        self.ended = time.time()
        self._write([{"ended": self.ended}])

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


def _lock(path: Path) -> None:
    """Lock a run's file against other processes until this process ends. The lock is a file beside it, for it is renamed."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UnderWay(
            f"another test is under way, and writes to {path}; wait until it has ended, since a NIC can do one test at a time"
        ) from None


def _cut(path: Path) -> None:
    """Remove a last line that was not written to its end."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))
