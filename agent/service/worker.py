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
from agent.service.listener import Listener
from agent.service.messages import Output
from agent.service.passes import Announcements, Memory, Passes, Reason
from agent.service.spec_in_force import SpecInForce
from agent.service.supervisor import CRASHED, HUNG_WRITES
from agent.service.traced_machine import traced
from agent.service.wake import KnownDevices, WakeUp, Watch
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
    watch = Watch(machine.events.subscribe(), control, readiness, requests.fileno())
    listener = Listener(watch, activity, lambda: output.write({"checking": True}))
    wake_ups = _WakeUps(listener, activity)
    passes = Passes(
        traced(machine, activity),
        in_force,
        memory,
        activity,
        readiness,
        output,
        Announcements(output, wait_until_published),
        lambda known: wake_ups.wait(known, 0.0, ends=False),
    )
    loop = _Loop(path, passes, wake_ups, requests)
    output.write({"serving": True})
    try:
        while loop.turn():
            pass
    finally:
        listener.close()


@define
class _WakeUps:
    """What the listener receives. Commands stay here until the loop carries them out.

    ``reload``: read the spec's file again. ``retry_spec``: somebody asks for that, so a spec that failed before is tried again.
    ``request``: a client of the apply socket waits. ``stop``: end the worker.
    """

    listener: Listener
    activity: Activity
    reload: bool = True
    retry_spec: bool = False
    request: bool = False
    stop: bool = False

    def wait(self, known: KnownDevices, timeout: float, ends: bool = True) -> Scope:
        """As :meth:`Listener.wait`. :returns: what to read again."""
        self.activity.idle()
        return self._keep(self.listener.wait(known, timeout, ends))

    def gather(self, known: KnownDevices) -> Scope:
        """As :meth:`Listener.gather`. :returns: what to read again."""
        return self._keep(self.listener.gather(known))

    def has_command(self) -> bool:
        """Whether there is something to do before the next pass."""
        return self.reload or self.request

    def _keep(self, wake: WakeUp) -> Scope:
        self.reload = self.reload or wake.reload
        self.retry_spec = self.retry_spec or wake.reload
        self.request = self.request or wake.asked
        self.stop = self.stop or wake.stop
        return wake.scope


@define
class _Loop:
    """Runs passes and waits between them. ``postponed``: how many times in a row Ready was held back."""

    path: Path
    passes: Passes
    wake_ups: _WakeUps
    requests: Requests
    postponed: int = 0

    def turn(self) -> bool:
        """Run a pass and wait for the reason for the next one. False: stop."""
        passes, wake_ups = self.passes, self.wake_ups
        with wake_ups.listener.in_pass(passes.known):
            if wake_ups.reload:
                self._reload()
            report, retry = passes.run(self.requests.allowed)
        if wake_ups.listener.answered():
            # The supervisor may have withdrawn Ready meanwhile.
            passes.output.forget()
        self.requests.send(Progress(report.ready, report.outcomes, report.conditions))
        resync = passes.resync_in()
        due = min(resync, retry, passes.trial_left())
        try:
            scope = self._wait(report, time.monotonic() + due)
        finally:
            self._record()  # also if the supervisor is gone, or an event came first
        if wake_ups.stop:
            return False
        if not wake_ups.has_command():
            more = wake_ups.gather(passes.known)
            passes.memory.failures.hasten(more)
            scope = None if scope is None or more is None else scope | more
        passes.reason = Reason.after(scope, "resync" if due == resync else "retry")
        if wake_ups.request:
            self._take_request()
        if passes.reason.scope is None and passes.in_force.refusal:
            wake_ups.reload = True
        return not wake_ups.stop

    def _wait(self, report: Report, deadline: float) -> Scope:
        """Publish the result of the pass and wait for the next event; None once the deadline is over.

        A Ready is not published if an event has come since the devices were read: the next pass decides.
        """
        passes, wake_ups = self.passes, self.wake_ups
        published = False
        scope: Scope = frozenset()
        while scope == frozenset() and not wake_ups.has_command():
            left = deadline - time.monotonic()
            left = min(left, passes.readiness.timeout()) if passes.last else left
            if published:
                self._record()
            else:
                left = min(left, PROBES_WAIT) if passes.readiness.waiting() else 0.0
            scope = wake_ups.wait(passes.known, left)
            if scope == frozenset() and wake_ups.listener.answered():
                passes.output.forget()
            if passes.last and not passes.readiness.timeout():
                report = passes.judged_again(passes.last)
                self.requests.send(Progress(report.ready, report.outcomes, report.conditions))
            if not published:
                published = self._publish(report, scope)
            elif scope == frozenset():
                passes.output.publish(report)
            passes.memory.failures.hasten(scope)
            if wake_ups.stop:
                break
            if time.monotonic() >= deadline:
                return None
        return scope

    def _publish(self, report: Report, scope: Scope) -> bool:
        """Publish the result of a pass, unless it says Ready and its devices have changed since.

        :returns: whether it was published.
        """
        too_often = self.postponed >= POSTPONED and not self.wake_ups.listener.overdue()
        published = scope == frozenset() or not report.ready or too_often
        self.postponed = 0 if published else self.postponed + 1
        if published:
            self.passes.output.publish(report)
        return published

    def _record(self) -> None:
        """Record the last pass, unless that is done. A disk may hang, so the listener's thread takes events meanwhile."""
        if self.passes.is_recorded():
            return
        with self.wake_ups.listener.in_pass(self.passes.known):
            self.passes.record()

    def _take_request(self) -> None:
        self.wake_ups.request = False
        if self.requests.accept():
            # The client may have removed the cause of a failure: try everything now.
            self.passes.memory.failures.forget()
            self.passes.reason = Reason(None, "apply")

    def _reload(self) -> None:
        passes, wake_ups = self.passes, self.wake_ups
        before = passes.in_force.spec
        passes.activity.doing("plan", "read")
        read = passes.in_force.reload(passes.machine, self.path, time.monotonic(), wake_ups.retry_spec)
        wake_ups.reload = wake_ups.retry_spec = False
        if passes.in_force.spec != before:
            passes.start_over(read)


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
