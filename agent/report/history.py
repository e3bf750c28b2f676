"""The history: what was changed on this node, when and why. One JSON line an outcome, in a file of limited size."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType

from attrs import define, field, frozen

from agent.documents import LARGEST_REPORT, load
from agent.report.drift import Suspects
from agent.report.records import SETTLING, Outcome, from_plain, to_plain
from agent.report.target import is_vf, vf_index
from agent.runtime import boot_id

NAME = "history.jsonl"
NOBODY: Suspects = MappingProxyType({})

LARGEST = 1 << 20
"""Bytes. A larger file is renamed to ``.1``, which replaces the older one, so twice that is on disk at most."""


@frozen
class Entry:
    """One outcome. ``time``: seconds since the epoch; ``trigger``: why the pass ran.

    A trigger is `start`, `spec` (another spec is in force), `event` with its devices, `resync` (the timer), `retry` (of a
    failed change), or `apply` (an operator ran `trackbed apply`). ``suspects``: of a repair, the programs that ran and are
    known to set such state.
    """

    time: float
    boot_id: str
    spec_hash: str
    trigger: str
    outcome: Outcome
    suspects: tuple[str, ...] = ()


@define
class History:
    """Appends to the file in ``folder``. If it cannot be written, the agent goes on."""

    folder: Path
    boot_id: str = ""
    _last: frozenset[Outcome] = frozenset()
    _complained: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.boot_id = self.boot_id or boot_id()

    def record(self, outcomes: Iterable[Outcome], spec_hash: str, trigger: str, suspects: Suspects = NOBODY) -> str:
        """Append the outcomes of a pass, except those that the previous pass had, too.

        :param suspects: of the kinds of repairs, the running programs that are known to set such state.
        :returns: why the file cannot be written; empty if it was written, or if an earlier call has already returned why.
        """
        outcomes = list(outcomes)
        remaining = frozenset(outcome for outcome in outcomes if outcome.result != "applied")
        new = [o for o in outcomes if o not in self._last and o.error != SETTLING]
        self._last = remaining
        now = time.time()
        running = [suspects.get(o.change.kind, ()) if o.result == "applied" else () for o in new]
        entries = [
            Entry(now, self.boot_id, spec_hash, trigger, outcome, tuple(each))
            for outcome, each in zip(new, running, strict=True)
        ]
        lines = [json.dumps(to_plain(entry)) + "\n" for entry in entries]
        if not lines:
            return ""
        try:
            self._append("".join(lines).encode())
        except OSError as error:
            complained, self._complained = self._complained, True
            return "" if complained else f"{self.folder / NAME}: {error.strerror}; the history has a gap"
        self._complained = False
        return ""

    def _append(self, text: bytes) -> None:
        path = self.folder / NAME
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        try:
            size = os.fstat(descriptor).st_size
            # A power cut may have left half a line. The next one must start on a line of its own.
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            left = b"\n" + text if torn else text
            while left:
                left = left[os.write(descriptor, left) :]  # a disk that becomes full takes a part, then says ENOSPC
        finally:
            os.close(descriptor)
        if size + len(text) > LARGEST:
            path.replace(path.with_name(f"{NAME}.1"))


def read(folder: Path, damaged: Callable[[Path, int], None] = lambda path, lines: None) -> Iterator[Entry]:
    """Every entry, the oldest first. Incomplete lines and unknown formats are skipped.

    :param damaged: called with each file that has such lines, and with their number.
    """
    for path in (folder / f"{NAME}.1", folder / NAME):
        if not path.exists():
            continue
        if not path.is_file():  # a FIFO would never end
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        skipped = 0
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = from_plain(load(line, LARGEST_REPORT), Entry)
                time.localtime(entry.time)
                if is_vf(target := entry.outcome.change.target):
                    vf_index(target)
            except (ValueError, OverflowError, OSError):
                skipped += 1
            else:
                yield entry
        if skipped:
            damaged(path, skipped)
