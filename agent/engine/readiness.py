"""Asks the probes and applies the spec's rules to their answers: severity, hysteresis, silences and deadlines."""

from __future__ import annotations

import json
import math
import os
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from agent.documents import load, read
from agent.machine import Machine
from agent.probes import Probe, probes
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault, Status, from_plain, to_plain
from agent.runtime import doubling, journal, write_atomically
from agent.spec.node import ProbePolicy, ProbeSeverity, Readiness, Silence
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

Judge = Callable[[Wanted, Snapshot], list[Condition]]
"""Returns the conditions of all probes for what a pass wanted and read."""

SLACK = 5.0
"""Seconds by which a reading may be early or late, so that it falls together with a pass that is due anyway."""

AGAIN = 10.0
"""Seconds after which a reading that failed is tried again. Each further failure doubles them, up to the probe's period."""

HANDOVER = 1.0
"""Seconds after which the readings that wait behind a hanging one continue in another thread."""

LARGEST_MEMORY = 1 << 20
"""Bytes of a file with a probe's memory. One with 64 losses of each of 64 NICs has a fifth of it."""

CHECKS = 100
"""How many checks of a probe are kept; the spec cannot ask for more."""


def at_once(machine: Machine) -> Judge:
    """A judge that reads each probe now and waits for it, however long that takes."""

    def judge(want: Wanted, have: Snapshot) -> list[Condition]:
        probes = Probes(machine)
        probes.judge(want, have)
        probes.read_queued()
        os.close(probes.fileno())
        return probes.judge(want, have)

    return judge


def _today() -> date:
    return datetime.now(timezone.utc).date()


@frozen
class _Rule:
    """How one probe is judged: the spec's settings, or else the probe's defaults."""

    probe: Probe
    severity: ProbeSeverity
    severity_of_function: ProbeSeverity
    fail_after: int
    of: int
    deadline: float
    silence: Silence | None

    def applied(self, condition: Condition, today: date) -> Condition:
        """A condition with its stage, severity and silence. What is only a warning for the probe stays a warning."""
        severity = condition.severity if self.severity == "required" else "warn"
        message, faults = condition.message, condition.faults
        if faults and (self.severity_of_function == "warn" or self.is_silenced(today)):
            faults = tuple(evolve(fault, severity="warn") for fault in faults)
        if self.silence is not None and condition.status != "True":
            until = self.silence.until
            if self.is_silenced(today):
                severity, message = "warn", f"{message} (silenced until {until}: {self.silence.reason})"
            else:
                message = f"{message} (its silence ended on {until}; take that out of the spec)"
        # Not evolve(), which takes five times as long. Each pass applies twenty rules.
        return Condition(
            condition.type,
            condition.status,
            condition.reason,
            message,
            self.probe.stage,
            severity,
            condition.remedy,
            faults,
        )

    def is_silenced(self, today: date) -> bool:
        return self.silence is not None and today <= date.fromisoformat(self.silence.until)


def _rules(readiness: Readiness) -> list[_Rule]:
    rules = []
    for probe in probes():
        policy = readiness.probes.get(probe.name, ProbePolicy())
        fail_after = policy.fail_after or probe.fail_after
        rule = _Rule(
            probe,
            severity=policy.severity or probe.severity,
            severity_of_function=policy.severity or probe.severity_of_function,
            fail_after=fail_after,
            of=max(policy.of or probe.of, fail_after),
            deadline=policy.deadline or probe.deadline,
            silence=readiness.silenced.get(probe.name),
        )
        if rule.severity != "off":
            rules.append(rule)
    return rules


@define(eq=False)
class _Reading:
    """One run of a probe's ``read``. A thread fills it in, and sets ``finished`` last. ``started`` is inf before it starts."""

    probe: Probe
    want: Wanted
    deadline: float
    started: float = math.inf
    facts: Any = None
    error: str = ""
    finished: bool = False

    def is_of(self, want: Wanted) -> bool:
        """Whether it read all of these NICs, or its probe reads none. Otherwise its facts are not used."""
        return not self.probe.of_nics or want.nics.keys() <= self.want.nics.keys()


@define
class _Record:
    """The readings, memory and answers of one probe so far.

    ``under_way``: the reading that has not been collected yet; ``late``: it has passed its deadline. ``taken``: the last
    reading that was collected; ``errors``: how many in a row have failed, it included. ``checks``: whether each check
    failed, the newest last. ``failed``: the last False conditions. ``passed``: whether a check has ever passed.
    """

    probe: Probe
    under_way: _Reading | None = None
    late: bool = False
    taken: _Reading | None = None
    errors: int = 0
    memory: Any = None
    checks: deque[bool] = field(factory=lambda: deque(maxlen=CHECKS))
    failed: list[Condition] = field(factory=list)
    passed: bool = False


@define(eq=False)
class Probes:
    """The probes of one machine, over time.

    :meth:`judge` never waits: readings run in a thread, and a condition is Unknown until its first reading returns. Call
    :meth:`go_on` just before you wait for events: a thread that runs during a pass slows the pass down, since both need the
    interpreter's lock. The descriptor :meth:`fileno` becomes readable when readings have ended; :meth:`drain` resets it.
    ``_folder``: where the memory of probes with ``kept`` outlives this process; None: nowhere.
    """

    _machine: Machine
    _folder: Path | None = None
    _clock: Callable[[], float] = time.monotonic
    _today: Callable[[], date] = _today
    _rules: tuple[Readiness, list[_Rule]] | None = field(default=None, init=False)
    _records: dict[str, _Record] = field(factory=dict, init=False)
    _queue: deque[_Reading] = field(factory=deque, init=False)
    _judged: Snapshot | None = field(default=None, init=False)
    _looked: float = field(default=-math.inf, init=False)
    _ended: bool = field(default=False, init=False)
    _woken: int = field(factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), init=False)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._woken

    def drain(self) -> None:
        """Reset the descriptor. :meth:`judge` is due then."""
        os.eventfd_read(self._woken)
        self._ended = True

    def waiting(self) -> bool:
        """Whether a reading that has not passed its deadline is under way."""
        return any(record.under_way is not None and not record.late for record in self._records.values())

    def timeout(self) -> float:
        """Seconds until :meth:`judge` is due: 0 if readings have ended, inf if it is not due."""
        if self._ended:
            return 0.0
        times = [math.inf]
        for record in self._records.values():
            reading = record.under_way
            if reading is None:
                times.append(_due(record) + SLACK)
            elif not record.late and not reading.finished:
                # It may have started after judge() last looked: look again soon.
                soon = min(reading.started, self._looked) + HANDOVER
                times.append(soon if self._looked < soon else reading.started + reading.deadline)
        return max(0.0, min(times) - self._clock())

    def judge(self, want: Wanted, have: Snapshot) -> list[Condition]:
        """The conditions from the snapshot and the last readings. Readings that are due are queued for :meth:`go_on`."""
        now = self._looked = self._clock()
        is_new = have is not self._judged
        self._judged, self._ended = have, False
        conditions: list[Condition] = []
        if self._rules is None or self._rules[0] is not want.spec.readiness:
            self._rules = want.spec.readiness, _rules(want.spec.readiness)
        rules, today = self._rules[1], self._today()
        self._forget_all_but({rule.probe.name for rule in rules})
        for rule in rules:
            probe = rule.probe
            record = self._records.get(probe.name)
            if record is None:
                record = self._records[probe.name] = _Record(probe, memory=self._kept(probe))
            answer = self._answer(rule, record, want, have, now, is_new)
            conditions += [rule.applied(condition, today) for condition in answer]
            if probe.read and record.under_way is None and now >= _due(record) - SLACK:
                record.under_way = _Reading(probe, want, rule.deadline)
                self._queue.append(record.under_way)
        return conditions

    def go_on(self) -> None:
        """Start a thread for the queued readings, unless a thread is working on them."""
        now = self._clock()
        readings = [record.under_way for record in self._records.values() if record.under_way is not None]
        busy = any(now - HANDOVER < reading.started < math.inf and not reading.finished for reading in readings)
        if self._queue and not busy:
            # Not Thread.start(), which waits until the thread runs.
            start_new_thread(self.read_queued, ())

    def _forget_all_but(self, names: set[str]) -> None:
        for name in self._records.keys() - names:
            record = self._records[name]
            # Keep a record whose reading hangs, so that no second reading starts if the spec turns the probe on again.
            record.late = record.under_way is not None and not record.under_way.finished
            if not record.late:
                del self._records[name]

    def _answer(
        self, rule: _Rule, record: _Record, want: Wanted, have: Snapshot, now: float, is_new: bool
    ) -> list[Condition]:
        probe, facts = rule.probe, None
        if probe.read is not None:
            is_new = _collect(record, want, now)
            unknown = _unknown(record)
            if unknown is not None:
                nics = want.nics if probe.of_nics else ()
                return [
                    evolve(unknown, faults=tuple(FunctionFault(each, unknown.reason, unknown.message) for each in nics))
                ]
            assert record.taken is not None  # noqa: S101  _unknown checks it
            facts = record.taken.facts
        if probe.remember is not None:
            if is_new or record.memory is None:
                before, record.memory = record.memory, probe.remember(record.memory, now, have, facts)
                self._keep(probe, before, record.memory)
            facts = record.memory
        return _damped(record, rule, probe.judge(want, have, facts), is_new)

    def _kept(self, probe: Probe) -> Any:
        """The memory that an earlier process has kept for a probe; None if there is no such file, or it cannot be read."""
        if self._folder is None or probe.kept is None:
            return None
        try:
            text = read(self._folder / f"{probe.name}.json", LARGEST_MEMORY)
            return from_plain(load(text, LARGEST_MEMORY), probe.kept)
        except (OSError, ValueError):
            return None

    def _keep(self, probe: Probe, before: Any, memory: Any) -> None:
        if self._folder is None or probe.kept is None or (before is not None and before.kept == memory.kept):
            return
        try:
            write_atomically(self._folder / f"{probe.name}.json", json.dumps(to_plain(memory)) + "\n")
        except OSError as error:
            journal(f"{self._folder / probe.name}.json cannot be written: {error.strerror}; a restart forgets it")

    def read_queued(self) -> None:
        """Do the queued readings one after the other, then make the descriptor readable."""
        while self._queue:
            try:
                reading = self._queue.popleft()
            except IndexError:
                break  # another thread was faster
            reading.started = self._clock()
            try:
                assert reading.probe.read is not None  # noqa: S101  only those are queued
                reading.facts = reading.probe.read(self._machine, reading.want)
            except Exception as error:
                reading.error = _described(error)
            reading.finished = True
        os.eventfd_write(self._woken, 1)


def _due(record: _Record) -> float:
    """When the next reading should begin; inf if the probe reads nothing."""
    probe = record.probe
    if probe.read is None:
        return math.inf
    if record.taken is None:
        return -math.inf
    if record.taken.error:
        return record.taken.started + doubling(AGAIN, record.errors, probe.period)
    fails = bool(record.checks) and record.checks[-1]
    return record.taken.started + (probe.recheck if fails else probe.period)


def _collect(record: _Record, want: Wanted, now: float) -> bool:
    """Take the result of the reading under way; True if there is a new one."""
    if record.taken is not None and record.taken.is_of(want):
        record.taken.want = want  # a NIC that is missing now is read again once it is back
    else:
        record.taken = None
    reading = record.under_way
    if reading is None:
        return False
    if not reading.finished:
        if now >= reading.started + reading.deadline:
            record.late, record.taken = True, None
        return False
    late, record.late, record.under_way = record.late, False, None
    if late or not reading.is_of(want):
        return False
    record.taken = reading
    record.errors = record.errors + 1 if reading.error else 0
    return not reading.error


def _unknown(record: _Record) -> Condition | None:
    """Why the probe has no answer; None if it has one."""
    probe = record.probe
    if record.late and record.under_way is not None:
        message = f"its reading has not returned after {record.under_way.deadline:.0f} s"
        return condition(probe.type, "ProbeTimedOut", message)
    if record.taken is None:
        return Condition(probe.type, "Unknown", "NotYetRead", "its first reading is under way")
    if record.taken.error:
        message = f"it could not be read: {record.taken.error}"
        return Condition(probe.type, "Unknown", "ProbeFailed", message)
    return None


def _described(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _damped(record: _Record, rule: _Rule, answer: list[Condition], is_new: bool) -> list[Condition]:
    """The answer with hysteresis: False only while at least ``fail_after`` of the last ``of`` checks failed."""
    fails = any(condition.status == "False" for condition in answer)
    if is_new or not record.checks:
        record.checks.append(fails)
    else:
        record.checks[-1] = fails  # the same check, judged again with a newer snapshot
    # Most probes have no failed check, and each pass calls this for each probe.
    failures = sum(list(record.checks)[-rule.of :]) if True in record.checks else 0
    if fails:
        record.failed = [condition for condition in answer if condition.status == "False"]
        if failures >= rule.fail_after:
            return answer
        status: Status = "True" if record.passed else "Unknown"
        count = _count(rule, failures)
        return [
            evolve(c, status=status, message=f"{c.message} ({count})", faults=c.faults if status == "Unknown" else ())
            if c.status == "False"
            else c
            for c in answer
        ]
    if failures >= rule.fail_after:
        count = _count(rule, failures)
        return [evolve(c, message=f"{c.message} ({count}; the last one passed)") for c in record.failed]
    record.passed = record.passed or all(condition.status == "True" for condition in answer)
    return answer


def _count(rule: _Rule, failures: int) -> str:
    return f"failed {failures} of the last {rule.of} checks, False from {rule.fail_after} on"
