"""The worker's loop: a pass, its report, its record, and sleep until there is a reason for the next pass.

docs/architecture.md has a picture.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from attrs import define, field

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import Pass, converge, judged
from agent.engine.readiness import Probes
from agent.machine import Machine
from agent.report.records import Change, Report
from agent.report.verdict import is_ready
from agent.runtime import doubling, fault, journal
from agent.service import messages
from agent.service.activity import Activity
from agent.service.apply_socket import Progress, Requests
from agent.service.inbox import Inbox
from agent.service.messages import Output
from agent.service.pass_log import PassRecords
from agent.service.spec_in_force import SpecInForce
from agent.service.supervisor import REPEATED
from agent.service.wake import known_devices
from agent.state.scope import NOTHING, Scope, joined
from agent.state.snapshot import Snapshot

RESYNC = 60.0
"""Seconds after which everything is read again: writes to sysfs and interrupts by other programs emit no event. Passes that an
event causes do not put it off: events may come all the time."""

FIRST_RETRY = 0.2
"""Seconds to wait after a pass that ended early. Each further one in a row doubles the wait, up to :data:`RESYNC`. If the cause
is a device that went away, the event of that device usually comes sooner."""

SOONEST = 0.05
"""Seconds to wait at least before a failed change is tried again."""

PROBES_WAIT = 0.05
"""Seconds that the result of a pass waits for the probes. Most end by then, so one report has both."""

POSTPONED = 5
"""How many times in a row Ready is held back because an event came during the pass. The next Ready is published all the same:
events may never end."""


@define
class Loop:
    """Runs passes by the spec in force, and sleeps in between.

    ``path``: the spec's file. ``inbox`` has the events that come during a pass, and learns which devices it has read.
    ``last``: the last pass; None if it ended early, or another spec is in force since.
    ``_gone`` and ``_crashes``: passes in a row that ended early, since a device went away or by an exception.
    ``_postponed``: how many times in a row Ready was held back. ``_just_read``: what was read to check the spec in force.
    """

    machine: Machine
    path: Path
    in_force: SpecInForce
    memory: Memory
    records: PassRecords
    activity: Activity
    probes: Probes
    inbox: Inbox
    output: Output
    requests: Requests
    wait_until_published: Callable[[str], str]
    last: Pass | None = field(default=None, init=False)
    _resync_at: float = field(default=0.0, init=False)
    _gone: int = field(default=0, init=False)
    _crashes: int = field(default=0, init=False)
    _last_crash: str = field(default="", init=False)
    _postponed: int = field(default=0, init=False)
    _announcement: str = field(default="", init=False)
    _just_read: Snapshot | None = field(default=None, init=False)

    def run(self) -> None:
        """Run until the supervisor has this worker end, or is gone."""
        scope, trigger = None, "start"
        while not self.inbox.stop:
            with self.inbox.in_pass():
                if self._reload():
                    scope, trigger = None, "spec"
                report, retry = self.run_pass(scope, trigger)
            scope, trigger = self._sleep(report, retry)

    def run_pass(self, scope: Scope, trigger: str) -> tuple[Report, float]:
        """Run a pass. A new spec that fails in it is given up, and a pass by the last verified one follows.

        :param scope: what it reads again. ``trigger``: why it runs, in the words of the history.
        :returns: the report, and the seconds until something that failed is tried again; inf if nothing is.
        """
        began = time.monotonic()
        everything = self.last is None or scope is None
        report, retry = self._converged(scope)
        ended = time.monotonic()
        # Nothing is kept of a pass that ended early.
        if everything or self.last is None:
            self._resync_at = ended + RESYNC
        self.records.note(report, trigger, ended - began, self.last)
        if not self._gives_up():
            return report, retry
        self._write_records()
        self.start_over()
        return self.run_pass(None, "spec")

    def start_over(self) -> None:
        """Another spec is in force: the next pass reads everything and tries everything."""
        self.last, self._crashes = None, 0
        self.memory.failures.forget()
        self.records.drift.start_over()

    def _reload(self) -> bool:
        """Read the spec's file if that is asked for. :returns: whether another spec is in force now."""
        if not self.inbox.reload:
            return False
        before = self.in_force.spec
        self.activity.doing("plan", "read")
        # What is read to check the new spec is not read again. The events that come meanwhile are kept.
        just_read = self.in_force.reload(self.machine, self.path, time.monotonic(), self.inbox.retry_spec, self.last)
        self.inbox.reload = self.inbox.retry_spec = False
        if self.in_force.spec == before:
            return False
        self._just_read = just_read
        self.start_over()
        return True

    def _converged(self, scope: Scope) -> tuple[Report, float]:
        """Make the machine match the spec in force. :returns: as :meth:`run_pass`."""
        if (spec := self.in_force.spec) is None:
            return messages.without_spec(self.in_force), math.inf
        last, self.last = self.last, None
        just_read, self._just_read = self._just_read, None
        callbacks = Callbacks(
            announce=lambda change: self._announce(change, last),
            wait_until_published=self._wait_until_published,
            new_events=lambda: self.inbox.wait(0.0, ends=False),
            judge=self.probes.judge,
            doing=self.activity.doing,
        )
        goal = Goal(spec, self.in_force.verified, self.requests.allowed)
        try:
            self.last = converge(
                self.machine, goal, self.memory, last.have if last else None, scope, callbacks, just_read
            )
        except OSError as error:
            # A device went away during the pass, so nothing that was read can be trusted.
            self._gone += 1
            message = f"while reading the devices: {error}; reading again"
            report = messages.of_failed_pass("DeviceLost", message, self.in_force)
            return report, doubling(FIRST_RETRY, self._gone, RESYNC)
        except Exception as error:  # a bug in a kind or a probe must not end the worker: another spec may avoid it
            journal("".join(traceback.format_exception(error)))
            self._crashes += 1
            self._last_crash = fault(error)
            report = messages.of_failed_pass("PassCrashed", f"{self._last_crash}; it is tried again", self.in_force)
            return report, doubling(FIRST_RETRY, self._crashes, RESYNC)
        self._gone = 0
        self.inbox.known = known_devices(self.last)
        retry = self.memory.failures.next_try()
        return self._report(self.last), math.inf if retry is None else max(SOONEST, retry - time.monotonic())

    def _gives_up(self) -> bool:
        if self._crashes >= REPEATED:
            return self.in_force.gives_up_crashing(self._last_crash)
        return self.last is not None and self.in_force.gives_up(self.last, time.monotonic())

    def _announce(self, change: Change, last: Pass | None) -> None:
        """Publish that the node is about to be changed, and so is not ready."""
        self._announcement = os.urandom(16).hex()
        self.output.write(messages.of_announcement(change, self._announcement, last, self.in_force))

    def _wait_until_published(self, change: Change) -> None:
        self.activity.idle()  # the wait may be longer than a read may take, and no device hangs
        if cause := self.wait_until_published(self._announcement):
            journal(f"{cause}; going on with {change}")

    def _report(self, result: Pass) -> Report:
        if is_ready(result.conditions) and result.want.spec.mode == "enforce":
            self.activity.doing("records", "write")
            self.activity.call("", "write the verified spec")
            self.in_force.ready(result)
            self._crashes = 0
        self.activity.doing("kubelet", "read")
        return messages.of_pass(result, self.in_force, self.machine.kubelet.started())

    def _sleep(self, report: Report, retry: float) -> tuple[Scope, str]:
        """Publish and record the result of the pass, and wait until there is a reason for the next one.

        :returns: what that one reads again, and why it runs.
        """
        inbox, failures = self.inbox, self.memory.failures
        deadline, timer = self._next_pass(retry)
        self._answer()
        self._send(report)
        scope: Scope = NOTHING
        is_over = published = False
        try:
            while scope == NOTHING and not (is_over or inbox.has_command()):
                left = min(deadline - time.monotonic(), self._probes_due())
                if published:
                    self._record()
                else:
                    left = min(left, PROBES_WAIT) if self.probes.waiting() else 0.0
                scope = inbox.wait(left)
                if scope == NOTHING:
                    self._answer()
                if self.last is not None and not self._probes_due():
                    self.last = judged(self.last, self.probes.judge)
                    report = self._report(self.last)
                    self._send(report)
                if not published or scope == NOTHING:
                    published = self._publish(report, scope)
                failures.hasten(scope)
                is_over = time.monotonic() >= deadline
        finally:
            self._record()  # also if the supervisor is gone, or an event came first
        if is_over:
            scope = None
        if not inbox.has_command():
            more = inbox.gather()
            failures.hasten(more)
            scope = joined(scope, more)
        trigger = timer if scope is None else f"event {' '.join(sorted(scope))}"
        if inbox.request:
            inbox.request = False
            if self.requests.accept():
                # The client may have removed the cause of a failure: the next pass tries everything.
                failures.forget()
                scope, trigger = None, "apply"
        # A file that was refused may have been written again.
        inbox.reload = inbox.reload or (scope is None and bool(self.in_force.refusal))
        return scope, trigger

    def _next_pass(self, retry: float) -> tuple[float, str]:
        """When the next pass runs if nothing happens, and why. ``retry``: as :meth:`run_pass` returns it."""
        now = time.monotonic()
        resync = max(0.0, self._resync_at - now)
        # A pass that ended early shows no failure of a new spec.
        trial_left = self.in_force.trial_left(now) if self.last else math.inf
        due = min(resync, retry, trial_left)
        return now + due, "resync" if due == resync else "retry"

    def _probes_due(self) -> float:
        return self.probes.timeout() if self.last else math.inf

    def _answer(self) -> None:
        """Note that what has come is answered. If the supervisor may have withdrawn Ready, it is told the result again."""
        if self.inbox.answered():
            self.output.forget()

    def _send(self, report: Report) -> None:
        self.requests.send(Progress(report.ready, report.outcomes, report.conditions, nics=report.nics))

    def _publish(self, report: Report, scope: Scope) -> bool:
        """Publish the result of a pass, unless it says Ready and its devices have changed since: the next pass decides.

        :returns: whether it was published.
        """
        too_often = self._postponed >= POSTPONED and not self.inbox.overdue()
        if report.ready and scope != NOTHING and not too_often:
            self._postponed += 1
            return False
        self._postponed = 0
        self.output.write(report)
        return True

    def _record(self) -> None:
        """Record the last pass, unless that is done. A disk may hang, so the inbox's thread takes events meanwhile."""
        if self.records.are_due():
            with self.inbox.in_pass():
                self._write_records()

    def _write_records(self) -> None:
        # Otherwise the supervisor would take a disk that hangs for a hang of the device that was read last.
        self.activity.doing("records", "write")
        self.activity.call("", "write the history and the drift")
        self.records.write()
