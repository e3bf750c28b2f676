"""One change after the other: whether it may be made now, and the making."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from attrs import define, evolve, field, frozen

from agent.engine.cached_machine import CachedMachine
from agent.engine.contention import Write
from agent.engine.disruption_policy import Allowed, allowed
from agent.engine.originals import Originals
from agent.engine.retry import Failures, Identity, identity
from agent.engine.users import User, owners, reaches, taken, users, with_affected
from agent.hardware.functions import REMEDY
from agent.kinds import Kind, bindings, links, vf_attributes, vf_links
from agent.machine import Machine
from agent.report.activity import Mode
from agent.report.records import Change, Disruption, Outcome
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

WRITES = 2
"""How often one pass writes a value that the driver takes, and that then reads as before."""

FRESH = 0.2
"""Seconds for which a look at users answers for changes that disturb nobody; longer where the look itself took longer."""

FOR_GOOD = frozenset({errno.EINVAL, errno.ERANGE, errno.EOPNOTSUPP, errno.ENOSYS})
"""What a driver answers that does not take a value at all."""


@frozen
class _Seen:
    """The users that were found, until when they count, and of which functions of a device they are (None: of all).

    ``complete``: all of them, not only those to whom a function can have been handed.
    """

    until: float
    targets: frozenset[str] | None
    complete: bool
    users: Mapping[str, tuple[User, ...]]

    def answers(self, change: Change, complete: bool, now: float) -> bool:
        """Whether they still are those of all that a change reaches."""
        reached = self.targets is None or reaches(change) in self.targets
        return reached and self.complete >= complete and now <= self.until


@define
class Work:
    """What stays the same through a pass, and what was written in it. ``reading``: the machine as it is observed."""

    machine: Machine
    reading: CachedMachine
    allow: Disruption | None
    now: datetime
    failures: Failures
    clock: Callable[[], float]
    announce: Callable[[Change], None]
    acknowledged: Callable[[Change], None]
    doing: Callable[[str, Mode], None]
    originals: Originals
    announced: Change | None = None
    waited: bool = False
    writes: Counter[Identity] = field(factory=Counter)
    planned: Sequence[Change] = ()
    seen: dict[str, _Seen] = field(factory=dict)

    def users(self, want: Wanted, change: Change) -> Mapping[str, tuple[User, ...]]:
        """Who used, not long ago, what a change reaches.

        Enough to leave a change alone. Before a write that disturbs, :meth:`users_now` is asked as well.
        """
        return self._lately(want, change, complete=True)

    def owners(self, want: Wanted, change: Change) -> Mapping[str, tuple[User, ...]]:
        """Of these, at least those to whom something was handed."""
        return self._lately(want, change, complete=False)

    def users_now(self, want: Wanted, change: Change) -> Mapping[str, tuple[User, ...]]:
        """Who uses what a change reaches, looked at now, and only there."""
        target = reaches(change)
        return self._look(want, change.device, True, None if target is None else frozenset({target})).users

    def _lately(self, want: Wanted, change: Change, complete: bool) -> Mapping[str, tuple[User, ...]]:
        device = change.device
        seen = self.seen.get(device)
        if seen is None or not seen.answers(change, complete, self.clock()):
            # The other changes of its kind come next: one look answers for all of them.
            reached = [reaches(each) for each in (change, *self.planned) if each.device == device]
            targets = None if None in reached else frozenset(target for target in reached if target)
            seen = self.seen[device] = self._look(want, device, complete, targets)
        return seen.users

    def _look(self, want: Wanted, device: str, complete: bool, targets: frozenset[str] | None) -> _Seen:
        if device not in want.nics:
            return _Seen(0.0, targets, complete, {})
        self.doing("users", "read")
        began = self.clock()
        found = (users if complete else owners)(self.machine, want, device, targets)
        ended = self.clock()
        return _Seen(ended + max(FRESH, ended - began), targets, complete, found)

    def allowed(self, want: Wanted, device: str) -> Allowed:
        """What may be done to a device now."""
        nic = want.nics.get(device)
        return allowed(want.spec.disruption, nic.nic.disruption if nic else None, self.allow, self.now)


def attempts(work: Work, want: Wanted, have: Snapshot, kind: Kind, changes: Sequence[Change]) -> list[Outcome]:
    """Make those of a kind's changes that may be made, one after the other."""
    work.planned = changes
    found = (_attempt(work, want, have, kind, change) for change in changes)
    return [outcome for outcome in found if outcome is not None]


def _attempt(work: Work, want: Wanted, have: Snapshot, kind: Kind, change: Change) -> Outcome | None:
    """Make a change if it may be made; None: it is somebody else's to make."""
    try:
        if change.skip_if_owned and taken(work.owners(want, change), change.target):
            return None
        held = _held_back(work, want, have, change)
        if held is not None:
            return held
        _tell(work, want, change)
        if change.disruption > Disruption.NONE:
            # Whoever took the device since it was planned must not lose it: nothing but the write comes after this look.
            found = work.users_now(want, change)
            if change.skip_if_owned and taken(found, change.target):
                return None
            change, held = _disturbing(work, want, change, found)
            if held is not None:
                return held
    except OSError as error:
        # Nothing is disturbed on a guess.
        message = f"who uses it cannot be told: {error}"
        outcome = Outcome(change, "failed", message, REMEDY)
        work.failures.add(outcome, work.clock())
        return outcome
    return _written_too_often(work, change) or _write(work, kind, change)


def _held_back(work: Work, want: Wanted, have: Snapshot, change: Change) -> Outcome | None:
    """Why a change is not made now; None: nothing that was seen lately is in its way."""
    if change.blocker:
        return Outcome(change, "blocked", change.blocker, change.remedy)
    work.failures.wait(change, work.clock())
    if (held := work.failures.held_back(change, work.clock())) is not None:
        return evolve(held, change=change)
    if want.spec.mode == "observe":
        error, remedy = "mode: observe, nothing is written", "set mode to enforce once the plan is as you want it"
        return Outcome(change, "deferred", error, remedy)
    fought = work.failures.contention.held_back(write_of(have, change), have.processes, work.clock())
    if fought is not None:
        return evolve(fought, change=change)
    if change.disruption > Disruption.NONE:
        return _disturbing(work, want, change, work.users(want, change))[1]
    return None


def _tell(work: Work, want: Wanted, change: Change) -> None:
    """Before the first change that counts, and again before the first that disturbs: the node is not ready from then on."""
    if work.announced is None and is_required(want, change):
        work.announced = change
        work.announce(change)
    if work.announced and not work.waited and change.disruption > Disruption.NONE:
        work.waited = True
        work.doing("publication", "read")
        work.acknowledged(work.announced)


def _disturbing(
    work: Work, want: Wanted, change: Change, found: Mapping[str, tuple[User, ...]]
) -> tuple[Change, Outcome | None]:
    """The change with those of the users ``found`` whom it would disturb, and, unless it may, what comes of it."""
    change = with_affected(change, want, found)
    may = work.allowed(want, change.device)
    if change.disruption > may.level:
        error = f"{change.disruption} is not allowed now (at most {may.level}{may.until})"
        remedy = change.remedy or f"allow it: trackbed apply --allow {change.disruption}"
        return change, Outcome(change, "deferred", error, remedy)
    if change.affected and not may.force:
        error = f"it would disturb {', '.join(change.affected)}"
        return change, Outcome(change, "deferred", error, "move them away; it is done as soon as they are gone")
    return change, None


def _written_too_often(work: Work, change: Change) -> Outcome | None:
    work.writes[identity(change)] += 1
    if work.writes[identity(change)] <= WRITES:
        return None
    error = f"written {WRITES} times, and it still reads {change.before}"
    remedy = change.remedy or "see who else sets it, and the kernel's log for the driver's reason"
    outcome = Outcome(change, "failed", error, remedy)
    work.failures.add(outcome, work.clock())
    work.originals.give_up(change)
    return outcome


def _write(work: Work, kind: Kind, change: Change) -> Outcome:
    work.reading.forget()
    work.originals.keep(kind, change)
    work.doing(kind.NAME, "write")
    try:
        kind.apply(work.machine, change)
    except OSError as error:
        if error.errno in FOR_GOOD:
            work.originals.give_up(change)
        unsupported = error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
        message = error.strerror or str(error)
        outcome = Outcome(change, "unsupported" if unsupported else "failed", message, _remedy(error, change))
        work.failures.add(outcome, work.clock())
        return outcome
    work.originals.made(change)
    return Outcome(change, "applied")


def write_of(have: Snapshot, change: Change) -> Write:
    """A change, and which netdev it would be made to, or was."""
    if change.field == "mac" and change.kind in (vf_attributes.NAME, bindings.NAME):
        # To have the driver take it, its netdev is made anew each time.
        return change, 0
    statuses = have[vf_links.NAME if "#" in change.target else links.NAME].get(change.device, {})
    status: links.LinkStatus | None = statuses.get(change.target)
    return change, status.link.ifindex if status is not None and status.link is not None else 0


def _remedy(error: OSError, change: Change) -> str:
    if change.remedy:
        return change.remedy
    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
        return f"take {change.field} out of the spec, or mark the NIC required: false"
    return "it is tried again; see the kernel's log (dmesg) for the driver's reason"


def is_required(want: Wanted, change: Change) -> bool:
    """Whether the node is not ready without a change."""
    known = want.nics.get(change.device)
    nic = known.nic if known is not None else want.unreadable.get(change.device)
    return change.required and (nic is None or nic.required)
