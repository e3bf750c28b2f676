"""What was changed on this node, when and why: one JSON line each, in a file that outlives reboots and stays small."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import define, field, frozen

from agent.documents import LARGEST_REPORT, load
from agent.report.records import SETTLING, Outcome, from_plain, to_plain
from agent.runtime import boot_id

NAME = "history.jsonl"
LARGEST = 1 << 20
"""Bytes after which the file becomes the old one (``.1``), whose predecessor goes: so twice that is the most on disk."""


@frozen
class Entry:
    """One outcome. ``time`` in seconds since the epoch; ``trigger``: what had the agent look.

    A trigger is `start`, `spec` (another one was adopted), `event` with the devices it was about, `resync` (the timer),
    `retry` (of something that failed), `apply` (somebody asked for it).
    """

    time: float
    boot_id: str
    spec_hash: str
    trigger: str
    outcome: Outcome


@define
class History:
    """Appends to the file in ``folder``. A file that cannot be written stops nothing."""

    folder: Path
    boot_id: str = ""
    _last: frozenset[Outcome] = frozenset()
    _complained: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.boot_id = self.boot_id or boot_id()

    def record(self, outcomes: Iterable[Outcome], spec_hash: str, trigger: str) -> str:
        """Write what a pass has done, and what it could not do unless that was said of the pass before.

        :returns: why it could not be written, the first time; else nothing.
        """
        outcomes = list(outcomes)
        remaining = frozenset(outcome for outcome in outcomes if outcome.result != "applied")
        news = [o for o in outcomes if o not in self._last and o.error != SETTLING]
        self._last = remaining
        now = time.time()
        lines = [json.dumps(to_plain(Entry(now, self.boot_id, spec_hash, trigger, outcome))) + "\n" for outcome in news]
        if not lines:
            return ""
        try:
            self._append("".join(lines).encode())
        except OSError as error:
            said, self._complained = self._complained, True
            return "" if said else f"{self.folder / NAME}: {error.strerror}; the history has a gap"
        self._complained = False
        return ""

    def _append(self, text: bytes) -> None:
        path = self.folder / NAME
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            size = os.fstat(descriptor).st_size
            # A power cut may have left half a line; it must not spoil the next one.
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            left = b"\n" + text if torn else text
            while left:
                left = left[os.write(descriptor, left) :]  # on a disk that becomes full, first a part, then ENOSPC
        finally:
            os.close(descriptor)
        if size + len(text) > LARGEST:
            path.replace(path.with_name(f"{NAME}.1"))


def read(folder: Path) -> Iterator[Entry]:
    """Every entry, the oldest first; half lines and those of another agent are left out."""
    for path in (folder / f"{NAME}.1", folder / NAME):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            try:
                yield from_plain(load(line, LARGEST_REPORT), Entry)
            except ValueError:
                continue
