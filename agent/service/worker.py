"""The process that does all kernel I/O: it waits for wake-ups, runs passes, and hands what it found to its parent."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

from attrs import define, evolve, field

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import Pass, converge, judged_again
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.readiness import Readiness
from agent.engine.retry import Failures
from agent.hardware.functions import physical_function
from agent.kinds import links, vf_links, vfs
from agent.machine import Machine
from agent.report.activity import Activity
from agent.report.history import History
from agent.report.records import Change, Condition, Outcome, is_ready, to_plain
from agent.runtime import fault, journal
from agent.service.apply_socket import NAME, Requests
from agent.service.listener import Listener
from agent.service.spec_in_force import Adopted
from agent.service.supervisor import CRASHED, REPEATED
from agent.service.traced_machine import traced
from agent.service.wake import Known, WakeUp, Watch
from agent.spec.node import NodeSpec, spec_hash
from agent.state.scope import Scope, own

RESYNC = 60.0
"""Seconds after which everything is read again: sysfs and interrupt writes by others emit no event."""

AGAIN = 0.2
"""Seconds to wait when a device went away while it was read; its own event usually comes first.

Each time in a row doubles it, up to :data:`RESYNC`.
"""


UP_TO_DATE = "UpToDate"

BRIEFLY = 0.05
"""Seconds that a round of the probes' readings takes at most as a rule: what a pass found is said together with theirs."""

POSTPONED = 5
"""Passes in a row whose Ready is not said because more has happened meanwhile; then it is: events may never end."""


def work(
    machine: Machine,
    path: Path,
    adopted: Adopted,
    originals: Originals,
    activity: Activity,
    control: int,
    out: TextIO,
    requests: Requests,
    history: History,
    failures: Failures,
    acknowledged: Callable[[Change], str] = lambda change: "",
) -> None:
    """Keep the spec at ``path`` true until ``control`` ends; each finding is one JSON line on ``out``.

    :param acknowledged: returns once the world knows that the node is not ready because of a change, or why it does not.
    """
    readiness = Readiness(machine)
    seen = traced(machine, activity)
    saying = Lock()
    watch = Watch(machine.events.subscribe(), control, readiness, requests.fileno())
    listener = Listener(watch, activity, lambda: _write(out, saying, {"checking": True}))
    loop = _Loop(
        seen,
        path,
        listener,
        readiness,
        out,
        saying,
        adopted,
        originals,
        activity,
        requests,
        history,
        failures,
        acknowledged,
    )
    loop.say({"serving": True})
    try:
        while loop.turn():
            pass
    finally:
        listener.close()


def _write(out: TextIO, saying: Lock, message: Mapping[str, Any]) -> None:
    with saying:
        out.write(json.dumps(message) + "\n")
        out.flush()


@define
class _Loop:
    """What lasts from one pass to the next."""

    machine: Machine
    path: Path
    listener: Listener
    readiness: Readiness
    out: TextIO
    saying: Lock
    adopted: Adopted
    originals: Originals
    activity: Activity
    requests: Requests
    history: History
    failures: Failures
    acknowledged: Callable[[Change], str]
    last: Pass | None = None
    scope: Scope = None
    known: Known = field(factory=lambda: Known({}, {}))
    postponed: int = 0
    lost: int = 0
    crashes: int = 0
    crash: str = ""
    reload: bool = True
    asked: bool = False
    request_pending: bool = False
    stop: bool = False
    trigger: str = "start"
    told: Mapping[str, Any] = field(factory=dict)

    def say(self, message: Mapping[str, Any]) -> None:
        """Tell the parent, unless that is what it was told last: nobody is woken for nothing new."""
        if message != self.told:
            _write(self.out, self.saying, message)
            self.told = message

    def turn(self) -> bool:
        """One pass, then wait for the next reason for one; False: no more of them."""
        with self.listener.in_pass(self.known):
            body, due = self._look()
        if self.listener.answered():
            # The supervisor may have taken Ready back.
            self.told = {}
        self.requests.tell(body)
        due = min(due, self.adopted.trial_left(time.monotonic()))
        deadline = time.monotonic() + due
        self.scope, said = frozenset(), body == self.told
        while self.scope == frozenset() and not self.reload and not self.request_pending:
            left = min(deadline - time.monotonic(), self.readiness.timeout() if self.last else math.inf)
            first = min(left, BRIEFLY) if self.readiness.waiting() else 0.0
            scope = self._listen(left if said else first)
            if self.last and not self.readiness.timeout():
                self.last = judged_again(self.last, self.readiness.judge)
                body = self._found(self.last)
                self.requests.tell(body)
                if said and scope == frozenset():
                    self.say(body)
            if not said:
                # Ready is not said of devices to which something has happened since they were read.
                tired = self.postponed >= POSTPONED and not self.listener.overdue()
                said = scope == frozenset() or not body["ready"] or tired
                self.postponed = 0 if said else self.postponed + 1
                if said:
                    self.say(body)
            if self.stop:
                return False
            self.scope = None if time.monotonic() >= deadline else scope
            self.failures.hasten(scope)
        if not self.reload and not self.request_pending:
            meanwhile = self._heard(self.listener.gather(self.known))
            self.failures.hasten(meanwhile)
            self.scope = None if self.scope is None or meanwhile is None else self.scope | meanwhile
        self.trigger = _trigger(self.scope, due)
        if self.request_pending:
            self._take_request()
        self.reload = self.reload or (self.scope is None and bool(self.adopted.refusal))
        return not self.stop

    def _look(self) -> tuple[dict[str, Any], float]:
        """What a pass found by the spec that is in force now, and the seconds until the next one is due."""
        if self.reload:
            self._reload()
        body, due = self._pass()
        while self._gives_up():
            self._start_over()
            body, due = self._pass()
        return body, due

    def _listen(self, timeout: float, first: bool = False) -> Scope:
        self.activity.idle()
        return self._heard(self.listener.wait(self.known, timeout, first))

    def _heard(self, wake: WakeUp) -> Scope:
        self.reload = self.reload or wake.reload
        self.asked = self.asked or wake.reload
        self.stop = self.stop or wake.stop
        self.request_pending = self.request_pending or wake.asked
        return wake.scope

    def _take_request(self) -> None:
        self.request_pending = False
        if self.requests.accept():
            # Somebody says that what was in the way is gone.
            self.failures.forget()
            self.scope, self.trigger = None, "apply"

    def _reload(self) -> None:
        before = self.adopted.spec
        self.activity.doing("plan", "read")
        self.adopted.reload(self.machine, self.path, time.monotonic(), self.asked)
        self.reload = self.asked = False
        if self.adopted.spec != before:
            self._start_over()

    def _start_over(self) -> None:
        """Another spec is in force: nothing of it was looked at, or has failed, yet."""
        self.last, self.scope, self.trigger, self.crashes = None, None, "spec", 0
        self.failures.forget()

    def _gives_up(self) -> bool:
        """Whether the spec in force was given up for the last verified one."""
        if self.crashes >= REPEATED:
            return self.adopted.gives_up_crashing(self.crash)
        return self.last is not None and self.adopted.gives_up(self.last, time.monotonic())

    def _pass(self) -> tuple[dict[str, Any], float]:
        """What to report, and the seconds until the next pass is due whatever happens."""
        spec = self.adopted.spec
        if spec is None:
            return _body(None, (), (_no_spec(self.adopted.refusal),), self.adopted), RESYNC
        try:
            self.last = converge(
                self.machine,
                Goal(spec, verified=self.adopted.verified, allow=self.requests.allowed()),
                Memory(time.monotonic, self.failures, self.originals),
                self.last.have if self.last else None,
                self.scope,
                Callbacks(
                    announce=lambda change: self.say(_body(spec, (), _converging(change, self.last), self.adopted)),
                    wait_until_published=self._acknowledged,
                    new_events=lambda: self._listen(0.0, first=self.last is None),
                    judge=self.readiness.judge,
                    doing=self.activity.doing,
                ),
            )
        except OSError as error:
            # A device vanished under our hands: nothing that was read can be trusted.
            self.last = None
            due = min(AGAIN * 2 ** min(self.lost, 16), RESYNC)
            self.lost += 1
            message = f"while reading the devices: {error}; reading again"
            lost = Condition("Converged", "Unknown", "DeviceLost", message)
            return _body(spec, (), (lost,), self.adopted), due
        except Exception as error:  # whatever it is, the node must not stay with a spec that no pass gets through
            return self._crashed(spec, error)
        self.lost = 0
        self.known = _known(self.last)
        if gap := self.history.record(self.last.outcomes, spec_hash(spec), self.trigger):
            journal(gap)
        return self._found(self.last), _due(self.failures)

    def _crashed(self, spec: NodeSpec, error: Exception) -> tuple[dict[str, Any], float]:
        """What to report of a pass that ended with an exception: nothing that it has read or decided is used."""
        journal("".join(traceback.format_exception(error)))
        self.last = None
        self.crashes += 1
        self.crash = fault(error)
        crashed = Condition("Converged", "Unknown", "PassCrashed", f"{self.crash}; it is tried again")
        due = min(AGAIN * 2 ** min(self.crashes - 1, 16), RESYNC)
        return _body(spec, (), (crashed,), self.adopted), due

    def _acknowledged(self, change: Change) -> None:
        if why := self.acknowledged(change):
            journal(why)

    def _found(self, found: Pass) -> dict[str, Any]:
        """What to report of a pass."""
        if is_ready(found.conditions) and found.want.spec.mode == "enforce":
            self.adopted.ready(found)
            self.crashes = 0
        conditions = (*found.conditions, _up_to_date(found, self.adopted))
        there = {"devices": _devices(found), "kubelet": self.machine.kubelet.started()}
        return {**_body(found.want.spec, found.outcomes, conditions, self.adopted), **there}


def _converging(change: Change, last: Pass | None) -> tuple[Condition, ...]:
    """The node differs: whoever reads the report must not find it ready while that is being put right."""
    differs = Condition("Converged", "False", "Converging", str(change))
    return (differs, *(c for c in last.conditions if c.type != differs.type)) if last else (differs,)


def _up_to_date(found: Pass, adopted: Adopted) -> Condition:
    """Whether all of the newest spec is done, or some of it waits for others to go away."""
    if adopted.refusal:
        return Condition(UP_TO_DATE, "False", "Refused", adopted.refusal, severity="warn")
    if found.waiting:
        message = "; ".join(f"{outcome.change}: {outcome.error}" for outcome in found.waiting)
        return Condition(UP_TO_DATE, "False", "Deferred", message, severity="warn")
    return Condition(UP_TO_DATE, "True", "SpecDone", severity="warn")


def _trigger(scope: Scope, due: float) -> str:
    """What the next pass is for, as the history says it."""
    if scope is None:
        return "resync" if due == RESYNC else "retry"
    return f"event {' '.join(sorted(scope))}"


def _due(failures: Failures) -> float:
    retry = failures.next_try()
    return RESYNC if retry is None else min(RESYNC, max(0.05, retry - time.monotonic()))


def _known(found: Pass) -> Known:
    by_ifindex: dict[int, str] = {}
    by_address = {address: address for address in found.want.nics}
    for kind in (links.NAME, vf_links.NAME):
        for address, functions in found.have[kind].items():
            statuses: Mapping[str, links.LinkStatus] = functions
            by_address |= {status.pci: address for status in statuses.values()}
            by_ifindex |= {
                status.link.ifindex: own(address) if target == address else target
                for target, status in statuses.items()
                if status.link
            }
    nics = found.want.nics.items() if found.want.spec.mode == "enforce" else ()
    required = frozenset(address for address, nic in nics if nic.nic.required)
    return Known(by_ifindex, by_address, bool(found.want.missing), required)


def _devices(found: Pass) -> str:
    """A name for the set of the spec's functions that there are: device plugins do not follow its changes."""
    counts: Mapping[str, vfs.VfCount] = found.have[vfs.NAME]
    there = sorted((address, counts[address].count if address in counts else 0) for address in found.want.nics)
    return sha256(json.dumps(there).encode()).hexdigest()[:12]


def _no_spec(refusal: str) -> Condition:
    return Condition("Converged", "False", "NoSpec", refusal)


def _body(
    spec: NodeSpec | None, outcomes: tuple[Outcome, ...], conditions: tuple[Condition, ...], adopted: Adopted
) -> dict[str, Any]:
    return {
        "node_name": spec.node_name if spec else "",
        "spec_hash": spec_hash(spec) if spec else "",
        "ready": is_ready(conditions),
        "up_to_date": all(c.status == "True" for c in conditions if c.type == UP_TO_DATE) and not adopted.refusal,
        "refusal": adopted.refusal,
        "outcomes": to_plain(outcomes),
        "conditions": to_plain(conditions),
    }


def main(
    machine: Machine,
    path: Path,
    run: Path,
    state: Path,
    hung: Collection[str],
    activity_fd: int | None,
    acknowledged: Callable[[Change], str] = lambda change: "",
) -> None:
    """Serve the supervisor at the other end of standard input and output.

    :param run: the folder of what ends with the boot; ``state``: of what does not.
    :param hung: PCI addresses of functions that are left alone, with all of their device.
    :param activity_fd: the memory that the supervisor has made for :class:`Activity`.
    :param acknowledged: as :func:`work` takes it.
    """
    control = os.dup(sys.stdin.fileno())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between our messages
    activity = Activity.at(activity_fd)
    devices = frozenset(physical_function(machine.files, address) for address in hung)
    machine = evolve(machine, hung=devices)
    try:
        originals = Originals.load(run / ORIGINALS)
        work(
            machine,
            path,
            Adopted(state, run, crashed=os.environ.get(CRASHED, "")),
            originals,
            activity,
            control,
            out,
            Requests(run / NAME),
            History(state),
            Failures(),
            acknowledged,
        )
    except BrokenPipeError:
        sys.exit(1)
