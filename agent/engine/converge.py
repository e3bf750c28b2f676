"""The pass: observe, plan, apply, observe again, until a fresh reading gives an empty plan."""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

from attrs import define, evolve, field, frozen

from agent.engine.cached_machine import Remembered
from agent.engine.contention import Contention, Write
from agent.engine.disruption_policy import Allowed, allowed
from agent.engine.originals import Originals
from agent.engine.readiness import Judge, at_once
from agent.engine.users import User, reaches, taken, takers, users, with_victims
from agent.hardware.functions import Wanted, asks_serials, rediscover
from agent.kinds import Kind, bindings, by_name, irqbalance, links, ordered, rdma, vf_attributes, vf_links
from agent.machine import Machine
from agent.report.activity import Mode
from agent.report.records import HOST, SETTLING, Change, Condition, Disruption, Outcome, Value
from agent.spec.node import NodeSpec
from agent.state.selection import resolve
from agent.state.snapshot import Scope, Snapshot, devices, own, read_basis

# A change may bring up what another kind must see (VFs, netdevs, interrupts); deeper chains do not exist.
ROUNDS = 5
# A value that a driver takes, and that then reads as before, is written this often in one pass.
WRITES = 2
FIRST_RETRY = 0.25
HASTENED_RETRY = 1.0
LAST_RETRY = 300.0
# Where each try costs every VF of the device.
FIRST_COSTLY_RETRY = 60.0
LAST_COSTLY_RETRY = 3600.0

# What a driver answers that does not take a value at all.
FOR_GOOD = frozenset({errno.EINVAL, errno.ERANGE, errno.EOPNOTSUPP, errno.ENOSYS})

# How long (seconds) it may be since users were looked for when a device is disturbed: many VFs are seen to in a row. Where
# looking takes long, as many times that.
FRESH = 0.2
FRESH_LOOKS = 10

# What probes judge of them is read only as far as a spec asks for it.
ASKED_FOR = (irqbalance, rdma)

Identity = tuple[str, str, str, Value]


@frozen
class _Failure:
    outcome: Outcome
    count: int
    tried: float
    not_before: float


@define
class Failures:
    """What failed lately, and when (seconds of a monotonic clock) it may be tried again; and what others put back."""

    contention: Contention = field(factory=Contention)
    _found: dict[Identity, _Failure] = field(factory=dict)

    def held_back(self, change: Change, now: float) -> Outcome | None:
        """The last outcome of a change that it is too early to try again."""
        failure = self._found.get(_identity(change))
        return failure.outcome if failure is not None and now < failure.not_before else None

    def wait(self, change: Change, now: float) -> None:
        """Hold a change back for its patience, counted from the first time that it was planned."""
        if change.patience and _identity(change) not in self._found:
            outcome = Outcome(change, "blocked", SETTLING, f"wait {change.patience:.0f} s")
            self._found[_identity(change)] = _Failure(outcome, 0, math.inf, now + change.patience)

    def add(self, outcome: Outcome, now: float) -> None:
        """Remember a failure; each one doubles the wait."""
        identity = _identity(outcome.change)
        count = self._found[identity].count + 1 if identity in self._found else 0
        wait = LAST_RETRY if outcome.result == "unsupported" else min(FIRST_RETRY * 2 ** min(count, 16), LAST_RETRY)
        if _is_costly(outcome.change):
            wait = min(FIRST_COSTLY_RETRY * 2 ** min(count, 16), LAST_COSTLY_RETRY)
        self._found[identity] = _Failure(outcome, count, now, now + wait)

    def hasten(self, scope: Scope) -> None:
        """Something happened to the devices in ``scope``: try again soon, but not at once.

        A failing write may be what caused the event; without a pause the two would chase each other.
        """
        for identity, failure in self._found.items():
            concerned = scope is None or failure.outcome.change.device in devices(scope)
            if concerned and not _is_costly(failure.outcome.change):
                soon = min(failure.not_before, failure.tried + HASTENED_RETRY)
                self._found[identity] = evolve(failure, not_before=soon)

    def forget(self) -> None:
        """Another spec: nothing of it has failed yet."""
        self._found.clear()
        self.contention.forget()

    def next_try(self) -> float | None:
        """When the first of them may be tried again."""
        return min((failure.not_before for failure in self._found.values()), default=None)

    def keep(self, identities: set[Identity]) -> None:
        """Drop what is no longer wanted."""
        for identity in self._found.keys() - identities:
            del self._found[identity]


def _is_costly(change: Change) -> bool:
    return change.disruption >= Disruption.VF_RESET


def _identity(change: Change) -> Identity:
    return change.kind, change.target, change.field, change.after


@frozen
class Pass:
    """What one pass found and did. ``outcomes``: first what was applied, then all that still differs.

    ``waiting``: those of them that the node was not asked for before and that nothing was done about: it is as ready as it was.
    ``standard``: what the probes judge the node by: the spec before, as long as something waits; ``seen``: what they judge,
    ``have`` with what only that spec asks for.
    """

    want: Wanted
    have: Snapshot
    outcomes: tuple[Outcome, ...]
    conditions: tuple[Condition, ...]
    applied: int
    waiting: tuple[Outcome, ...]
    standard: Wanted
    seen: Snapshot


def converge(
    machine: Machine,
    spec: NodeSpec,
    last: Snapshot | None,
    scope: Scope,
    failures: Failures,
    clock: Callable[[], float],
    allow: Disruption | None = None,
    announce: Callable[[Change], None] = lambda change: None,
    acknowledged: Callable[[Change], None] = lambda change: None,
    verified: NodeSpec | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    heard: Callable[[], Scope] = frozenset,
    judge: Judge | None = None,
    doing: Callable[[str, Mode], None] = lambda kind, mode: None,
    originals: Originals | None = None,
) -> Pass:
    """Make the machine what ``spec`` says, as far as is allowed, and say what came of it.

    :param last: the snapshot of the pass before; None reads everything.
    :param scope: what a wake-up named.
    :param allow: the most disruptive level; the spec's own if None.
    :param announce: called with the first change to a required NIC before it is made: the node is not ready from then on.
    :param acknowledged: called after that, before the first change that disturbs a required NIC is made: it returns once the
        node is published as not ready, or cannot be. Whoever took a device meanwhile keeps it.
    :param verified: the spec that was last seen to be true; what a newer one still waits for does not make the node unready.
    :param now: the time of day, for maintenance windows.
    :param heard: takes what has happened meanwhile, our own writes' events included: it is read before the pass ends.
    :param judge: what asks the probes; here and now if None.
    :param doing: called with each kind whose state is read or written next.
    :param originals: what values were before; those that leave the spec get them back.
    :raises OSError: a device went away while it was read; the caller starts again.
    """
    doing("devices", "read")
    reading = Remembered(machine)
    work = _Work(
        machine,
        reading,
        allow,
        now(),
        failures,
        clock,
        announce,
        acknowledged,
        doing,
        originals or Originals(),
    )
    machine = reading.machine
    serials = asks_serials(spec)
    have, scope = (read_basis(machine, serials), None) if last is None or scope is None else (last, scope)
    whole = scope is None
    applied: list[Outcome] = []
    for _ in range(ROUNDS):
        if scope is not None:
            # Names, and the permanent address that the VFs' are made from, come with a netdev: it may be a new one.
            have = evolve(have, functions=rediscover(machine, have.functions, _pfs(scope), serials))
        want = resolve(spec, have.functions)
        have, outcomes = _round(work, want, have, scope)
        done = [outcome for outcome in outcomes if outcome.result == "applied"]
        remaining = [outcome for outcome in outcomes if outcome.result != "applied"]
        applied += done
        if not done:
            break
        # Everything else was read in this pass already; what was written is what must be read again.
        scope = frozenset(name for outcome in done for name in _touched(outcome.change))
        meanwhile = heard()
        reading.forget()
        have, scope = (read_basis(machine, serials), None) if meanwhile is None else (have, scope | meanwhile)
    else:
        remaining += [_unverified(work, outcome) for outcome in done]
    given_back = _give_back(work, work.originals.left(want, have.functions), have) if whole else []
    applied += [outcome for outcome in given_back if outcome.result == "applied"]
    remaining += [outcome for outcome in given_back if outcome.result != "applied"]
    failures.keep({_identity(outcome.change) for outcome in remaining})
    failures.contention.keep(_write(have, outcome.change) for outcome in remaining)
    failures.contention.wrote((_write(have, outcome.change) for outcome in applied), clock())
    waiting = _waiting(spec, verified, have, remaining)
    doing("probes", "read")
    judged = [outcome for outcome in remaining if outcome not in waiting]
    required = [_write(have, outcome.change) for outcome in judged if is_required(want, outcome.change)]
    standard, seen = want, have
    if waiting and verified is not None:
        standard = resolve(verified, have.functions)
        for kind in ASKED_FOR if _asks(standard) != _asks(want) else ():
            seen = seen.merged(kind.NAME, None, kind.observe(machine, standard, None))
    found = Pass(want, have, (*applied, *remaining), (), len(applied), waiting, standard, seen)
    own = (_converged(want, judged), failures.contention.condition(required))
    return _judged(found, own, judge or at_once(machine))


def _asks(want: Wanted) -> tuple[object, ...]:
    """What of a spec :data:`ASKED_FOR` goes by."""
    return want.spec.irqs.irqbalance, {address: nic.nic.rdma for address, nic in want.nics.items()}


def _unverified(work: _Work, outcome: Outcome) -> Outcome:
    """What was written in the last round was not read again: it is looked at in another pass, and soon."""
    error = f"it was still being changed after {ROUNDS} rounds, and has not been read again"
    found = evolve(outcome, result="failed", error=error, remedy="see who else sets it: trackbed history")
    work.failures.add(found, work.clock())
    return found


def judged_again(found: Pass, judge: Judge) -> Pass:
    """What a pass found, with what the probes say by now."""
    return _judged(found, found.conditions[:2], judge)


def _judged(found: Pass, own: tuple[Condition, ...], judge: Judge) -> Pass:
    """A pass with its conditions: the engine's two first."""
    conditions = (*own, *judge(found.standard, found.seen))
    if found.want.spec.mode == "observe":
        # Nothing was in our hands, so nothing is held against the node: whoever put it into service answers for it.
        conditions = tuple(evolve(condition, severity="warn") for condition in conditions)
    return evolve(found, conditions=conditions)


def _pfs(scope: frozenset[str]) -> frozenset[str]:
    """The PFs whose own function a scope means."""
    whole = {name for name in scope if "#" not in name and name != HOST}
    return frozenset(whole | {device for device in devices(scope) if own(device) in scope})


def _touched(change: Change) -> frozenset[str]:
    """What must be read again after a change."""
    if by_name()[change.kind].REACH == "device":
        return frozenset({change.device})
    # What a PF grants to a VF is read from the PF.
    return frozenset({own(change.device), change.target} - {change.device})


def _waiting(
    spec: NodeSpec, verified: NodeSpec | None, have: Snapshot, remaining: Sequence[Outcome]
) -> tuple[Outcome, ...]:
    """What of a new spec was not done because of others, and does not differ from the spec before."""
    held = tuple(outcome for outcome in remaining if outcome.result in ("deferred", "blocked"))
    if not held or verified is None or verified == spec:
        return ()
    want = resolve(verified, have.functions)
    differing = {_place(change) for kind in ordered() for change in kind.plan(want, have)}
    return tuple(outcome for outcome in held if _place(outcome.change) not in differing)


def _place(change: Change) -> tuple[str, str, str]:
    return change.kind, change.target, change.field


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
class _Work:
    """What stays the same through a pass, and what was written in it. ``reading``: the machine as it is observed."""

    machine: Machine
    reading: Remembered
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
        """Who uses, as of now, what a change reaches; and what the others of its kind reach, which come next."""
        return self._look(want, change, complete=True)

    def takers(self, want: Wanted, change: Change) -> Mapping[str, tuple[User, ...]]:
        """Of these, at least those to whom something was handed."""
        return self._look(want, change, complete=False)

    def _look(self, want: Wanted, change: Change, complete: bool) -> Mapping[str, tuple[User, ...]]:
        device = change.device
        if device not in want.nics:
            return {}
        self.doing("users", "read")
        began = self.clock()
        seen = self.seen.get(device)
        if seen is None or not seen.answers(change, complete, began):
            reached = [reaches(each) for each in (change, *self.planned) if each.device == device]
            targets = None if None in reached else frozenset(target for target in reached if target)
            found = (users if complete else takers)(self.machine, want, device, targets)
            ended = self.clock()
            until = ended + max(FRESH, FRESH_LOOKS * (ended - began))
            seen = self.seen[device] = _Seen(until, targets, complete, found)
        return seen.users

    def allowed(self, want: Wanted, device: str) -> Allowed:
        """What may be done to a device now."""
        nic = want.nics.get(device)
        return allowed(want.spec.disruption, nic.nic.disruption if nic else None, self.allow, self.now)


def _round(work: _Work, want: Wanted, have: Snapshot, scope: Scope) -> tuple[Snapshot, list[Outcome]]:
    outcomes: list[Outcome] = []
    machine = work.reading.machine
    for kind in ordered():
        work.doing(kind.NAME, "read")
        have = have.merged(kind.NAME, scope, kind.observe(machine, want, scope))
        changes = kind.plan(want, have) + work.originals.returning(machine, kind, want, have, whole=scope is None)
        outcomes += _attempts(work, want, have, kind, changes)
    return have, outcomes


def _give_back(work: _Work, left: Wanted, have: Snapshot) -> list[Outcome]:
    """What was set on devices that are no longer in the spec gets its original value back."""
    outcomes: list[Outcome] = []
    machine = work.reading.machine
    for kind in ordered() if left.nics else ():
        work.doing(kind.NAME, "read")
        have = have.merged(kind.NAME, frozenset(left.nics), kind.observe(machine, left, None))
        changes = work.originals.returning(machine, kind, left, have, left=True)
        outcomes += _attempts(work, left, have, kind, changes)
    return outcomes


def _attempts(work: _Work, want: Wanted, have: Snapshot, kind: Kind, changes: Sequence[Change]) -> list[Outcome]:
    """Make those of a kind's changes that may be made, one after the other."""
    work.planned = changes
    attempts = (_attempt(work, want, have, kind, change) for change in changes)
    return [outcome for outcome in attempts if outcome is not None]


def _attempt(work: _Work, want: Wanted, have: Snapshot, kind: Kind, change: Change) -> Outcome | None:
    """Make a change if it may be made; None: it is somebody else's to make."""
    if change.yields and taken(work.takers(want, change), change.target):
        return None
    if change.obstacle:
        return Outcome(change, "blocked", change.obstacle, change.remedy)
    work.failures.wait(change, work.clock())
    if (held := work.failures.held_back(change, work.clock())) is not None:
        return evolve(held, change=change)
    if want.spec.mode == "observe":
        error, remedy = "mode: observe, nothing is written", "set mode to enforce once the plan is as you want it"
        return Outcome(change, "deferred", error, remedy)
    if (fought := work.failures.contention.held_back(_write(have, change), have.processes, work.clock())) is not None:
        return evolve(fought, change=change)
    if change.disruption > Disruption.NONE:
        change, held = _disturbing(work, want, change)
        if held is not None:
            return held
    if work.announced is None and is_required(want, change):
        work.announced = change
        work.announce(change)
    if work.announced and not work.waited and change.disruption > Disruption.NONE:
        work.waited = True
        work.doing("publication", "read")
        began = work.clock()
        work.acknowledged(work.announced)
        if work.clock() - began > FRESH:
            # Pods may have come until the world knew.
            work.seen.pop(change.device, None)
        change, held = _disturbing(work, want, change)
        if held is not None:
            return held
    work.writes[_identity(change)] += 1
    if work.writes[_identity(change)] > WRITES:
        error = f"written {WRITES} times, and it still reads {change.before}"
        remedy = change.remedy or "see who else sets it, and the kernel's log for the driver's reason"
        outcome = Outcome(change, "failed", error, remedy)
        work.failures.add(outcome, work.clock())
        work.originals.give_up(change)
        return outcome
    work.reading.forget()
    work.originals.keep(kind, change)
    work.doing(kind.NAME, "write")
    try:
        kind.apply(work.machine, change)
    except OSError as error:
        work.originals.not_made()
        if error.errno in FOR_GOOD:
            work.originals.give_up(change)
        unsupported = error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
        message = error.strerror or str(error)
        outcome = Outcome(change, "unsupported" if unsupported else "failed", message, _remedy(error, change))
        work.failures.add(outcome, work.clock())
        return outcome
    return Outcome(change, "applied")


def _disturbing(work: _Work, want: Wanted, change: Change) -> tuple[Change, Outcome | None]:
    """The change with those whom it would disturb now, and, unless it may, what comes of it."""
    # Whoever took the device since it was planned must not lose it.
    change = with_victims(change, want, work.users(want, change))
    may = work.allowed(want, change.device)
    if change.disruption > may.level:
        error = f"{change.disruption} is not allowed now (at most {may.level}{may.until})"
        remedy = change.remedy or f"allow it: trackbed apply --allow {change.disruption}"
        return change, Outcome(change, "deferred", error, remedy)
    if change.victims and not may.force:
        error = f"it would disturb {', '.join(change.victims)}"
        return change, Outcome(change, "deferred", error, "move them away; it is done as soon as they are gone")
    return change, None


def _write(have: Snapshot, change: Change) -> Write:
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


def _converged(want: Wanted, remaining: list[Outcome]) -> Condition:
    """Whether the wanted state is all there, judged on the NICs that are required."""
    required = [o for o in remaining if is_required(want, o.change)]
    if not remaining:
        return Condition("Converged", "True", "AsWanted")
    first = (required or remaining)[0]
    more = f" (and {len(required or remaining) - 1} more)" if len(required or remaining) > 1 else ""
    message = f"{first.change}: {first.error}; {first.remedy}{more}"
    if want.spec.mode == "observe":
        return Condition("Converged", "False", "Observing", message)
    if not required:
        return Condition("Converged", "True", "OptionalDiffers", message)
    return Condition("Converged", "False", first.result.capitalize(), message)


def is_required(want: Wanted, change: Change) -> bool:
    """Whether the node is not ready without a change."""
    nic = want.nics.get(change.device)
    return change.required and (nic is None or nic.nic.required)
