"""Runs one pass after the other by the spec in force, and keeps the results that later passes need."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal
from uuid import uuid4

from attrs import define, field, frozen

from agent.engine import context
from agent.engine.contention import suspects
from agent.engine.context import Callbacks, Goal
from agent.engine.converge import Pass, converge, judged_again
from agent.engine.originals import Originals
from agent.engine.readiness import Readiness
from agent.engine.retry import Failures
from agent.kinds import links, vf_links
from agent.machine import Machine
from agent.report.activity import Activity
from agent.report.drift import Drift
from agent.report.history import History
from agent.report.records import Change, Disruption, Report
from agent.report.verdict import is_ready
from agent.runtime import doubling, fault, journal
from agent.service import messages
from agent.service.inbox import Inbox
from agent.service.messages import Output
from agent.service.pass_log import PassLog
from agent.service.spec_in_force import SpecInForce
from agent.service.supervisor import REPEATED
from agent.service.wake import KnownDevices
from agent.spec.addresses import FIRST_TABLE
from agent.spec.node import NodeSpec, spec_hash
from agent.spec.sysctl_names import netdevs
from agent.state.scope import Scope, alone, own
from agent.state.snapshot import Snapshot

RESYNC = 60.0
"""Seconds after which everything is read again: writes to sysfs and interrupts by other programs emit no event. Passes that an
event causes do not put it off: events may come all the time."""

FIRST_RETRY = 0.2
"""Seconds to wait after a pass that ended early. Each further one in a row doubles the wait, up to :data:`RESYNC`. If the cause
is a device that went away, the event of that device usually comes sooner."""

SOONEST = 0.05
"""Seconds to wait at least before a failed change is tried again."""


Timer = Literal["resync", "retry"]


@frozen
class Memory:
    """What is kept between passes: original values, failed changes, the history of changes, and the counts of drift."""

    originals: Originals
    failures: Failures
    history: History
    drift: Drift


@frozen
class Reason:
    """Why a pass runs. ``scope``: what it reads again. ``trigger``: the reason in the words of the history."""

    scope: Scope
    trigger: str

    @classmethod
    def after(cls, scope: Scope, timer: Timer) -> Reason:
        """The reason of a pass that follows a wait.

        :param scope: what the events during the wait concern; None: no event ended it, but the timer.
        :param timer: what the timer was set for.
        """
        return cls(scope, timer if scope is None else f"event {' '.join(sorted(scope))}")


@define
class Announcements:
    """Publishes that the node is about to be changed, and waits until Kubernetes shows it."""

    _output: Output
    _wait_until_published: Callable[[str], str]
    _latest: str = field(default="", init=False)

    def announce(self, change: Change, last: Pass | None, in_force: SpecInForce) -> None:
        """Publish that the node is not ready because of a change."""
        self._latest = uuid4().hex
        self._output.publish(messages.of_announcement(change, self._latest, last, in_force))

    def wait(self, change: Change) -> None:
        """Return when the latest announcement is published, or could not be published in time."""
        if cause := self._wait_until_published(self._latest):
            journal(f"{cause}; going on with {change}")


@define
class _EarlyEnds:
    """Passes in a row that ended early, since a device went away (``gone``) or by an exception (``crashes``)."""

    gone: int = 0
    crashes: int = 0
    last_crash: str = ""

    def crashed(self, error: Exception) -> float:
        """Count a crash. :returns: the seconds until the next pass."""
        journal("".join(traceback.format_exception(error)))
        self.crashes += 1
        self.last_crash = fault(error)
        return doubling(FIRST_RETRY, self.crashes, RESYNC)

    def device_gone(self) -> float:
        """Count a device that went away. :returns: the seconds until the next pass."""
        self.gone += 1
        return doubling(FIRST_RETRY, self.gone, RESYNC)


@frozen
class _Record:
    """What the history, the counts of drift and the journal need of a pass. ``result``: None if the pass ended early."""

    report: Report
    trigger: str
    seconds: float
    result: Pass | None


@define
class Passes:
    """Runs passes, and keeps the last one's result.

    ``inbox`` has the events that come during a pass, and learns which devices it has read.
    """

    machine: Machine
    in_force: SpecInForce
    memory: Memory
    activity: Activity
    readiness: Readiness
    announcements: Announcements
    inbox: Inbox
    reason: Reason = field(default=Reason(None, "start"), init=False)
    last: Pass | None = field(default=None, init=False)
    _resync_at: float = field(default=0.0, init=False)
    _early_ends: _EarlyEnds = field(factory=_EarlyEnds, init=False)
    _log: PassLog = field(factory=PassLog, init=False)
    _unrecorded: _Record | None = field(default=None, init=False)
    _just_read: Snapshot | None = field(default=None, init=False)

    def start_over(self, just_read: Snapshot | None = None) -> None:
        """Another spec is in force: the next pass reads everything and tries everything.

        :param just_read: what was read for this spec just now, during which the events were kept. It is not read again.
        """
        self._just_read = just_read
        self.last, self.reason = None, Reason(None, "spec")
        self._early_ends.crashes = 0
        self.memory.failures.forget()
        self.memory.drift.start_over()

    def run(self, allowed: Callable[[], Disruption | None]) -> tuple[Report, float]:
        """Run a pass. A new spec that fails in it is given up, and a pass by the last verified one follows.

        :param allowed: the most disruptive level that a client of the apply socket allows now.
        :returns: the report, and the seconds until something that failed is tried again; inf if nothing is.
        """
        report, retry = self._timed(allowed)
        while self._gives_up():
            self.record()
            self.start_over()
            report, retry = self._timed(allowed)
        return report, retry

    def reload(self, path: Path, asked: bool) -> None:
        """Read the spec's file again, as :meth:`SpecInForce.reload`."""
        before = self.in_force.spec
        self.activity.doing("plan", "read")
        just_read = self.in_force.reload(self.machine, path, time.monotonic(), asked)
        if self.in_force.spec != before:
            self.start_over(just_read)

    def is_refused(self) -> bool:
        """Whether the file's content is not in force."""
        return bool(self.in_force.refusal)

    def try_everything(self) -> None:
        """A client of the apply socket may have removed the cause of a failure: the next pass tries everything."""
        self.memory.failures.forget()
        self.reason = Reason(None, "apply")

    def hasten(self, scope: Scope) -> None:
        """Something happened to devices: what failed there is tried again sooner."""
        self.memory.failures.hasten(scope)

    def due(self, retry: float) -> tuple[float, Timer]:
        """The seconds until the next pass if nothing happens, and what it is for.

        :param retry: the seconds until something that failed is tried again.
        """
        now = time.monotonic()
        resync = max(0.0, self._resync_at - now)
        # A pass that ended early shows no failure of a new spec.
        trial_left = self.in_force.trial_left(now) if self.last else math.inf
        due = min(resync, retry, trial_left)
        return due, "resync" if due == resync else "retry"

    def probes_due(self) -> float:
        """The seconds until the last pass must be judged again by the probes; infinite if it ended early."""
        return self.readiness.timeout() if self.last else math.inf

    def is_recorded(self) -> bool:
        """Whether :meth:`record` has nothing to do."""
        return self._unrecorded is None

    def record(self) -> None:
        """Record the last pass: its changes in the history, the drift that it repaired, and its entry in the journal.

        Call it after the report of the pass is published: the report must not wait for a disk, and does not contain these
        records. A worker that is killed before this call loses the records, as one that is killed during the pass does.
        """
        record, self._unrecorded = self._unrecorded, None
        if record is None:
            return
        # Otherwise the supervisor would take a disk that hangs for a hang of the device that was read last.
        self.activity.doing("records", "write")
        self.activity.call("", "write the history and the drift")
        if (result := record.result) is not None:
            repairs = self.memory.drift.repairs(result.outcomes)
            running = {change.kind: suspects(change.kind, result.have.processes) for change in repairs}
            in_force = spec_hash(result.want.spec)
            if gap := self.memory.history.record(result.outcomes, in_force, record.trigger, running):
                journal(gap)
            self.memory.drift.count(repairs, running, result.as_wanted)
        self._log.write(record.report, record.trigger, record.seconds)

    def judged_again(self) -> Report:
        """The report with what the probes have read since the pass, which did not end early."""
        assert self.last is not None  # noqa: S101  otherwise no probe is due
        self.last = judged_again(self.last, self.readiness.judge)
        return self._report(self.last)

    def _gives_up(self) -> bool:
        """Whether the spec in force was given up for the last verified one."""
        if self._early_ends.crashes >= REPEATED:
            return self.in_force.gives_up_crashing(self._early_ends.last_crash)
        return self.last is not None and self.in_force.gives_up(self.last, time.monotonic())

    def _timed(self, allowed: Callable[[], Disruption | None]) -> tuple[Report, float]:
        began = time.monotonic()
        everything = self.last is None or self.reason.scope is None
        report, retry = self._run(allowed)
        ended = time.monotonic()
        # Nothing is kept of a pass that ended early.
        if everything or self.last is None:
            self._resync_at = ended + RESYNC
        self._unrecorded = _Record(report, self.reason.trigger, ended - began, self.last)
        return report, retry

    def _run(self, allowed: Callable[[], Disruption | None]) -> tuple[Report, float]:
        spec = self.in_force.spec
        if spec is None:
            return messages.without_spec(self.in_force), math.inf
        try:
            self.last = self._converge(spec, allowed())
        except OSError as error:
            # A device went away during the pass, so nothing that was read can be trusted.
            self.last = None
            message = f"while reading the devices: {error}; reading again"
            return messages.of_failed_pass("DeviceLost", message, self.in_force), self._early_ends.device_gone()
        except Exception as error:  # a bug in a kind or a probe must not end the worker: another spec may avoid it
            self.last = None
            retry = self._early_ends.crashed(error)
            message = f"{self._early_ends.last_crash}; it is tried again"
            return messages.of_failed_pass("PassCrashed", message, self.in_force), retry
        self._early_ends.gone = 0
        self.activity.doing("records", "write")
        self.activity.call("", "write the verified spec")
        self.inbox.known = _known(self.last)
        return self._report(self.last), _retry_in(self.memory.failures)

    def _converge(self, spec: NodeSpec, allow: Disruption | None) -> Pass:
        just_read, self._just_read = self._just_read, None
        return converge(
            self.machine,
            Goal(spec, verified=self.in_force.verified, allow=allow),
            context.Memory(time.monotonic, self.memory.failures, self.memory.originals),
            self.last.have if self.last else None,
            self.reason.scope,
            Callbacks(
                announce=lambda change: self.announcements.announce(change, self.last, self.in_force),
                wait_until_published=self.announcements.wait,
                new_events=lambda: self.inbox.wait(0.0, ends=False),
                judge=self.readiness.judge,
                doing=self.activity.doing,
            ),
            just_read,
        )

    def _report(self, result: Pass) -> Report:
        if is_ready(result.conditions) and result.want.spec.mode == "enforce":
            self.in_force.ready(result)
            self._early_ends.crashes = 0
        return messages.of_pass(result, self.in_force, self.machine.kubelet.started())


def _retry_in(failures: Failures) -> float:
    retry = failures.next_try()
    return math.inf if retry is None else max(SOONEST, retry - time.monotonic())


def _known(result: Pass) -> KnownDevices:
    """The netdevs and functions that the pass has read. By these, events are assigned to devices."""
    by_ifindex: dict[int, str] = {}
    by_address = {address: address for address in result.want.nics}
    for kind in (links.NAME, vf_links.NAME):
        for address, functions in result.have[kind].items():
            statuses: Mapping[str, links.LinkStatus] = functions
            by_address |= {status.pci: address for status in statuses.values()}
            by_ifindex |= {status.link.ifindex: alone(target) for target, status in statuses.items() if status.link}
    nics = result.want.nics.items() if result.want.spec.mode == "enforce" else ()
    required = frozenset(address for address, nic in nics if nic.nic.required)
    steered = result.want.spec.rps.netdevs
    by_table = {
        FIRST_TABLE + nic.nic.rail: own(address)
        for address, nic in result.want.nics.items()
        if nic.nic.addresses and nic.nic.rail is not None
    }
    with_sysctls = netdevs(result.want.spec.sysctls)
    return KnownDevices(by_ifindex, by_address, bool(result.want.missing), required, steered, by_table, with_sysctls)
