"""Records each pass: its changes in the history, the drift that it repaired, and an entry of the journal.

The entry has fields for `journalctl -o json`; docs/metrics.md lists them.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import get_args

from attrs import define, field, frozen

from agent.engine.contention import suspects
from agent.engine.converge import Pass
from agent.kinds import other_writers
from agent.kinds.irqs import FOLLOWING, followed
from agent.report.drift import Drift
from agent.report.history import History
from agent.report.records import Report, Result
from agent.runtime import journal
from agent.spec.node import spec_hash

SOCKET = Path("/run/systemd/journal/socket")
"""journald's socket for entries with fields: https://systemd.io/JOURNAL_NATIVE_PROTOCOL."""

MESSAGE_ID = "5b0c8a9f1d4e4f6c9a3b7e2d10486f35"
"""The MESSAGE_ID that only these entries have: `journalctl MESSAGE_ID=...`."""

INFO, DEBUG = "6", "7"
"""syslog's priorities: the first for a pass that changed something or ended in another way than the one before."""

QUIET = 60.0
"""Seconds from one entry to the next of priority DEBUG. An event a second must not fill the journal."""

LONGEST = 300
"""Characters of a value. With the bounds below, an entry is far smaller than the largest datagram."""

MOST_CHANGES = 20
MOST_CONDITIONS = 40
"""How many changes and conditions an entry names at most, each in a field of its own."""


@define
class PassLog:
    """Writes the entries. ``_last``: how the last pass ended; ``_omitted``: the passes since the last entry."""

    clock: Callable[[], float] = time.monotonic
    _last: tuple[object, ...] = field(default=(), init=False)
    _written: float = field(default=-math.inf, init=False)
    _omitted: int = field(default=0, init=False)

    def write(self, report: Report, trigger: str, seconds: float) -> None:
        """Write the entry of a pass. One of priority DEBUG is left out if the last entry is less than :data:`QUIET` old.

        If journald does not take an entry, its message goes to standard error, unless the priority is DEBUG.

        :param report: the report after the pass.
        :param trigger: why the pass ran, as the history has it.
        """
        counted = Counter(outcome.result for outcome in report.outcomes)
        not_true = [f"{c.type} {c.status} {c.reason}" for c in report.conditions if c.status != "True"]
        ended = (report.ready, report.spec_hash, not_true, {**counted, "applied": 0})
        priority = INFO if counted["applied"] or ended != self._last else DEBUG
        self._last = ended
        now = self.clock()
        if priority == DEBUG and now - self._written < QUIET:
            self._omitted += 1
            return
        omitted, self._omitted, self._written = self._omitted, 0, now
        why, _, devices = trigger.partition(" ")
        results = ", ".join(f"{counted[result]} {result}" for result in sorted(counted)) or "nothing to change"
        message = f"pass ({why}): {results}; {'ready' if report.ready else 'not ready'}"
        fields = [
            ("MESSAGE", message),
            ("MESSAGE_ID", MESSAGE_ID),
            ("PRIORITY", priority),
            ("SYSLOG_IDENTIFIER", "trackbed"),
            ("TRACKBED_TRIGGER", why),
            ("TRACKBED_DEVICES", devices),
            ("TRACKBED_OMITTED", str(omitted)),
            ("TRACKBED_DURATION_USEC", str(int(seconds * 1e6))),
            ("TRACKBED_SPEC_HASH", report.spec_hash),
            ("TRACKBED_READY", str(int(report.ready))),
            ("TRACKBED_UP_TO_DATE", str(int(report.up_to_date))),
            *((f"TRACKBED_{result.upper()}", str(counted[result])) for result in get_args(Result)),
            *(("TRACKBED_NOT_TRUE", condition) for condition in not_true[:MOST_CONDITIONS]),
            *(("TRACKBED_CHANGE", change) for change in _changes(report)),
        ]
        if not _sent(fields) and priority == INFO:
            journal(message)


@frozen
class _Record:
    """What is recorded of a pass. ``result``: None if it ended early."""

    report: Report
    trigger: str
    seconds: float
    result: Pass | None


@define
class PassRecords:
    """Records passes after their reports are published: a report must not wait for a disk, and does not contain the records.

    A worker that is killed before that loses the records of a pass, as one that is killed during the pass does.
    """

    history: History
    drift: Drift
    log: PassLog = field(factory=PassLog)
    _due: _Record | None = field(default=None, init=False)
    _followed: object = field(default=None, init=False)

    @classmethod
    def kept(cls, state: Path, run: Path) -> PassRecords:
        """Continue with what is kept in these folders."""
        return cls(History(state), Drift.load(run, other_writers()))

    def note(self, report: Report, trigger: str, seconds: float, result: Pass | None) -> None:
        """Note a pass, which :meth:`write` records."""
        self._due = _Record(report, trigger, seconds, result)

    def are_due(self) -> bool:
        """Whether the last pass is not recorded yet."""
        return self._due is not None

    def write(self) -> None:
        """Record the last pass, unless that is done."""
        record, self._due = self._due, None
        if record is None:
            return
        if (result := record.result) is not None:
            repairs, now = self.drift.repairs(result.outcomes), followed(result.want, result.have)
            if self._followed not in (None, now):
                # A pod with CPUs of its own, or with a VF, has started or ended, or a queue has moved with the load, and no
                # program has undone a change.
                repairs = [change for change in repairs if change.kind not in FOLLOWING]
            self._followed = now
            running = {change.kind: suspects(change.kind, result.have.processes) for change in repairs}
            in_force = spec_hash(result.want.spec)
            if gap := self.history.record(result.outcomes, in_force, record.trigger, running):
                journal(gap)
            self.drift.count(repairs, running, result.as_wanted)
        self.log.write(record.report, record.trigger, record.seconds)


def _sent(fields: list[tuple[str, str]]) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as made:
        made.setblocking(False)  # a pass must not wait for a journald that hangs
        made.connect(str(SOCKET))
        made.send(b"".join(_encoded(name, value[:LONGEST]) for name, value in fields))
        return True
    return False


def _encoded(name: str, value: str) -> bytes:
    """A field with its length, so that the value may have any characters, such as newlines."""
    content = value.encode(errors="backslashreplace")
    return name.encode() + b"\n" + struct.pack("<Q", len(content)) + content + b"\n"


def _changes(report: Report) -> Iterator[str]:
    for outcome in report.outcomes[:MOST_CHANGES]:
        yield f"{outcome.result}: {outcome.change}" + (f": {outcome.error}" if outcome.error else "")
