"""The process that does all kernel I/O: it waits for events, runs passes, and sends their results to the supervisor."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TextIO

from attrs import define, evolve

from agent.engine.originals import ORIGINALS, Originals
from agent.engine.readiness import Readiness
from agent.engine.retry import Failures
from agent.hardware.functions import physical_function
from agent.kinds import other_writers
from agent.machine import Machine
from agent.report.activity import Activity
from agent.report.drift import Drift
from agent.report.history import History
from agent.report.records import Report
from agent.runtime import end_with_parent
from agent.service.apply_socket import NAME, Progress, Requests
from agent.service.inbox import Inbox
from agent.service.messages import Output
from agent.service.passes import Announcements, Memory, Passes, Reason
from agent.service.spec_in_force import SpecInForce
from agent.service.supervisor import CRASHED, HUNG_WRITES
from agent.service.traced_machine import traced
from agent.state.scope import Scope

PROBES_WAIT = 0.05
"""Seconds that the result of a pass waits for the probes. Most end by then, so one report has both."""

POSTPONED = 5
"""How many times in a row Ready is held back because an event came during the pass. The next Ready is published all the same:
events may never end."""


def work(
    machine: Machine,
    path: Path,
    in_force: SpecInForce,
    memory: Memory,
    activity: Activity,
    control: int,
    out: TextIO,
    requests: Requests,
    wait_until_published: Callable[[str], str] = lambda announcement: "",
) -> None:
    """Keep the spec in the file ``path`` true until ``control`` is closed.

    :param out: where the messages to the supervisor are written.
    :param wait_until_published: as :func:`agent.report.published.wait_until_not_ready` for an announcement.
    """
    readiness = Readiness(machine)
    output = Output(out)
    inbox = Inbox(
        machine.events.subscribe(),
        activity,
        lambda: output.write({"checking": True}),
        control,
        readiness,
        requests.fileno(),
    )
    inbox.reload = True  # the spec has not been read yet
    passes = Passes(
        traced(machine, activity),
        in_force,
        memory,
        activity,
        readiness,
        Announcements(output, wait_until_published),
        inbox,
    )
    loop = _Loop(path, passes, inbox, output, requests)
    output.write({"serving": True})
    try:
        while loop.turn():
            pass
    finally:
        inbox.close()


@define
class _Loop:
    """A pass, its report, its record, and sleep until there is a reason for the next one. docs/architecture.md has a picture.

    ``postponed``: how many times in a row Ready was held back.
    """

    path: Path
    passes: Passes
    inbox: Inbox
    output: Output
    requests: Requests
    postponed: int = 0

    def turn(self) -> bool:
        """Run a pass and wait for the reason for the next one. False: stop."""
        passes, inbox = self.passes, self.inbox
        with inbox.in_pass():
            if inbox.reload:
                passes.reload(self.path, inbox.retry_spec)
                inbox.reload = inbox.retry_spec = False
            report, retry = passes.run(self.requests.allowed)
        self._answer()
        self.requests.send(Progress(report.ready, report.outcomes, report.conditions))
        due, timer = passes.due(retry)
        try:
            scope = self._sleep(report, time.monotonic() + due)
        finally:
            self._record()  # also if the supervisor is gone, or an event came first
        if inbox.stop:
            return False
        if not inbox.has_command():
            more = inbox.gather()
            passes.hasten(more)
            scope = None if scope is None or more is None else scope | more
        passes.reason = Reason.after(scope, timer)
        if inbox.request:
            inbox.request = False
            if self.requests.accept():
                passes.try_everything()
        # A file that was refused may have been written again.
        inbox.reload = inbox.reload or (passes.reason.scope is None and passes.is_refused())
        return not inbox.stop

    def _sleep(self, report: Report, deadline: float) -> Scope:
        """Publish the result of the pass and wait for the next event; None once the deadline is over.

        A Ready is not published if an event has come since the devices were read: the next pass decides.
        """
        passes, inbox = self.passes, self.inbox
        published = False
        scope: Scope = frozenset()
        while scope == frozenset() and not inbox.has_command():
            left = min(deadline - time.monotonic(), passes.probes_due())
            if published:
                self._record()
            else:
                left = min(left, PROBES_WAIT) if passes.readiness.waiting() else 0.0
            scope = inbox.wait(left)
            if scope == frozenset():
                self._answer()
            if not passes.probes_due():
                report = passes.judged_again()
                self.requests.send(Progress(report.ready, report.outcomes, report.conditions))
            if not published:
                published = self._publish(report, scope)
            elif scope == frozenset():
                self.output.publish(report)
            passes.hasten(scope)
            if inbox.stop:
                break
            if time.monotonic() >= deadline:
                return None
        return scope

    def _answer(self) -> None:
        """Note that what has come is answered. If the supervisor may have withdrawn Ready, it is told the result again."""
        if self.inbox.answered():
            self.output.forget()

    def _publish(self, report: Report, scope: Scope) -> bool:
        """Publish the result of a pass, unless it says Ready and its devices have changed since.

        :returns: whether it was published.
        """
        too_often = self.postponed >= POSTPONED and not self.inbox.overdue()
        published = scope == frozenset() or not report.ready or too_often
        self.postponed = 0 if published else self.postponed + 1
        if published:
            self.output.publish(report)
        return published

    def _record(self) -> None:
        """Record the last pass, unless that is done. A disk may hang, so the inbox's thread takes events meanwhile."""
        if not self.passes.is_recorded():
            with self.inbox.in_pass():
                self.passes.record()


def main(
    machine: Machine,
    path: Path,
    run: Path,
    state: Path,
    hung: Collection[str],
    activity_fd: int | None,
    wait_until_published: Callable[[str], str] = lambda announcement: "",
) -> None:
    """Serve the supervisor at the other end of standard input and output.

    :param run: the folder for files that a boot removes; ``state``: the folder for files that outlive a boot.
    :param hung: PCI addresses of functions that hung. Their PFs are left alone, with all VFs.
    :param activity_fd: the memory that the supervisor has made for :class:`Activity`.
    :param wait_until_published: as in :func:`work`.
    """
    end_with_parent()
    control = os.dup(sys.stdin.fileno())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not write between the messages
    activity = Activity.at(activity_fd)
    devices = frozenset(physical_function(machine.files, address) for address in hung)
    machine = evolve(machine, hung=devices)
    try:
        writes = {
            physical_function(machine.files, device) if device else "": why
            for device, why in json.loads(os.environ.get(HUNG_WRITES, "{}")).items()
        }
        in_force = SpecInForce(state, run, crashed=os.environ.get(CRASHED), hung_writes=writes)
        memory = Memory(Originals.load(run / ORIGINALS), Failures(), History(state), Drift.load(run, other_writers()))
        work(machine, path, in_force, memory, activity, control, out, Requests(run / NAME), wait_until_published)
    except BrokenPipeError:
        sys.exit(1)
