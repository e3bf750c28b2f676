"""The pass: observe, plan, apply, observe again, until a fresh reading gives an empty plan."""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Callable, Mapping

from attrs import define, evolve, field, frozen

from agent.change import HOST, Change, Condition, Disruption, Outcome, Value
from agent.kinds import Kind, ordered, users
from agent.machine import Machine
from agent.nics import Wanted, rediscover, resolve
from agent.probes import probes
from agent.snapshot import Scope, Snapshot, read_basis
from agent.spec import NodeSpec

# A change may bring up what another kind must see (VFs, netdevs, interrupts); deeper chains do not exist.
ROUNDS = 5
# A value that a driver takes, and that then reads as before, is written this often in one pass.
WRITES = 2
FIRST_RETRY = 0.25
HASTENED_RETRY = 1.0
LAST_RETRY = 300.0

KNOWN_AFTER = "known after"

Identity = tuple[str, str, str, Value]


@frozen
class _Failure:
    outcome: Outcome
    count: int
    tried: float
    not_before: float


@define
class Failures:
    """What failed lately, and when (seconds of a monotonic clock) it may be tried again."""

    _found: dict[Identity, _Failure] = field(factory=dict)

    def held_back(self, change: Change, now: float) -> Outcome | None:
        """The last outcome of a change that it is too early to try again."""
        failure = self._found.get(_identity(change))
        return failure.outcome if failure is not None and now < failure.not_before else None

    def wait(self, change: Change, now: float) -> None:
        """Hold a change back for its patience, counted from the first time that it was planned."""
        if change.patience and _identity(change) not in self._found:
            outcome = Outcome(change, "blocked", "it may come right by itself", f"wait {change.patience:.0f} s")
            self._found[_identity(change)] = _Failure(outcome, 0, math.inf, now + change.patience)

    def add(self, outcome: Outcome, now: float) -> None:
        """Remember a failure; each one doubles the wait."""
        identity = _identity(outcome.change)
        count = self._found[identity].count + 1 if identity in self._found else 0
        wait = LAST_RETRY if outcome.result == "unsupported" else min(FIRST_RETRY * 2 ** min(count, 16), LAST_RETRY)
        if outcome.change.disruption >= Disruption.VF_RESET:
            # Each try costs every VF of the device: only another spec is a reason for one.
            wait = math.inf
        self._found[identity] = _Failure(outcome, count, now, now + wait)

    def hasten(self, scope: Scope) -> None:
        """Something happened to the devices in ``scope``: try again soon, but not at once.

        A failing write may be what caused the event; without a pause the two would chase each other.
        """
        for identity, failure in self._found.items():
            if math.isfinite(failure.not_before) and (scope is None or failure.outcome.change.device in scope):
                soon = min(failure.not_before, failure.tried + HASTENED_RETRY)
                self._found[identity] = evolve(failure, not_before=soon)

    def forget(self) -> None:
        """Another spec: nothing of it has failed yet."""
        self._found.clear()

    def next_try(self) -> float | None:
        """When the first of them may be tried again."""
        return min((failure.not_before for failure in self._found.values()), default=None)

    def keep(self, identities: set[Identity]) -> None:
        """Drop what is no longer wanted."""
        for identity in self._found.keys() - identities:
            del self._found[identity]


def _identity(change: Change) -> Identity:
    return change.kind, change.target, change.field, change.after


@frozen
class Pass:
    """What one pass found and did. ``outcomes``: first what was applied, then all that still differs."""

    want: Wanted
    have: Snapshot
    outcomes: tuple[Outcome, ...]
    conditions: tuple[Condition, ...]
    applied: int


def converge(
    machine: Machine,
    spec: NodeSpec,
    last: Snapshot | None,
    scope: Scope,
    failures: Failures,
    clock: Callable[[], float],
    allow: Disruption | None = None,
    announce: Callable[[Change], None] = lambda change: None,
) -> Pass:
    """Make the machine what ``spec`` says, as far as is allowed, and say what came of it.

    :param last: the snapshot of the pass before; None reads everything.
    :param scope: the PFs that a wake-up named.
    :param allow: the most disruptive level; the spec's own if None.
    :param announce: called with the first change to a required NIC before it is made: the node is not ready from then on.
    :raises OSError: a device went away while it was read; the caller starts again.
    """
    limit = Disruption.parse(spec.disruption.allow) if allow is None else allow
    work = _Work(machine, limit, failures, clock, announce)
    have, scope = (read_basis(machine), None) if last is None or scope is None else (last, scope)
    applied: list[Outcome] = []
    for _ in range(ROUNDS):
        if scope is not None:
            # Names, and the permanent address that the VFs' are made from, come with a netdev: it may be a new one.
            have = evolve(have, functions=rediscover(machine, have.functions, scope - {HOST}))
        want = resolve(spec, have.functions)
        have, outcomes = _round(work, want, have, scope)
        done = [outcome for outcome in outcomes if outcome.result == "applied"]
        remaining = [outcome for outcome in outcomes if outcome.result != "applied"]
        applied += done
        if not done:
            break
        # Everything else was read in this pass already; what was written is what must be read again.
        scope = frozenset(outcome.change.device for outcome in done)
    failures.keep({_identity(outcome.change) for outcome in remaining})
    conditions = [_converged(want, remaining)]
    for probe in probes():
        conditions += probe.check(machine, want, have)
    return Pass(want, have, (*applied, *remaining), tuple(conditions), len(applied))


@define
class _Work:
    """What stays the same through a pass, and what was written in it."""

    machine: Machine
    limit: Disruption
    failures: Failures
    clock: Callable[[], float]
    announce: Callable[[Change], None]
    announced: bool = False
    writes: Counter[Identity] = field(factory=Counter)


def _round(work: _Work, want: Wanted, have: Snapshot, scope: Scope) -> tuple[Snapshot, list[Outcome]]:
    outcomes: list[Outcome] = []
    for kind in ordered():
        have = have.merged(kind.NAME, scope, kind.observe(work.machine, want, scope))
        outcomes += [_attempt(work, want, have, kind, change) for change in kind.plan(want, have)]
    return have, outcomes


def _attempt(work: _Work, want: Wanted, have: Snapshot, kind: Kind, change: Change) -> Outcome:
    if change.obstacle:
        return Outcome(change, "blocked", change.obstacle, change.remedy)
    work.failures.wait(change, work.clock())
    if (held := work.failures.held_back(change, work.clock())) is not None:
        return evolve(held, change=change)
    if change.disruption > Disruption.NONE:
        # Whoever took the device since it was planned must not lose it.
        device = frozenset({change.device})
        fresh = have.merged(users.NAME, device, users.observe(work.machine, want, device))
        change = evolve(change, victims=users.of(fresh, change.target))
        if change.victims:
            error = f"it would disturb {', '.join(change.victims)}"
            return Outcome(change, "deferred", error, "move them away; it is done as soon as they are gone")
        if change.disruption > work.limit:
            error = f"{change.disruption} is not allowed now (at most {work.limit})"
            return Outcome(change, "deferred", error, f"allow it: trackbed apply --allow {change.disruption}")
    if not work.announced and _is_required(want, change):
        work.announced = True
        work.announce(change)
    work.writes[_identity(change)] += 1
    if work.writes[_identity(change)] > WRITES:
        error = f"written {WRITES} times, and it still reads {change.before}"
        outcome = Outcome(change, "failed", error, "see who else sets it, and the kernel's log for the driver's reason")
        work.failures.add(outcome, work.clock())
        return outcome
    try:
        kind.apply(work.machine, change)
    except OSError as error:
        unsupported = error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
        message = error.strerror or str(error)
        outcome = Outcome(change, "unsupported" if unsupported else "failed", message, _remedy(error, change))
        work.failures.add(outcome, work.clock())
        return outcome
    return Outcome(change, "applied")


def _remedy(error: OSError, change: Change) -> str:
    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
        return f"take {change.field} out of the spec, or mark the NIC required: false"
    return "it is tried again; see the kernel's log (dmesg) for the driver's reason"


def _converged(want: Wanted, remaining: list[Outcome]) -> Condition:
    """Whether the wanted state is all there, judged on the NICs that are required."""
    required = [o for o in remaining if _is_required(want, o.change)]
    if not remaining:
        return Condition("Converged", "True", "AsWanted")
    first = (required or remaining)[0]
    more = f" (and {len(required or remaining) - 1} more)" if len(required or remaining) > 1 else ""
    message = f"{first.change}: {first.error}; {first.remedy}{more}"
    if not required:
        return Condition("Converged", "True", "OptionalDiffers", message)
    return Condition("Converged", "False", first.result.capitalize(), message)


def _is_required(want: Wanted, change: Change) -> bool:
    nic = want.nics.get(change.device)
    return change.required and (nic is None or nic.nic.required)


@frozen
class Preview:
    """What a spec would do to this machine now. ``errors``: why it cannot be had at all."""

    changes: tuple[Change, ...]
    errors: tuple[str, ...]


def preview(machine: Machine, spec: NodeSpec) -> Preview:
    """Plan without touching anything.

    What cannot be known yet, because the devices come with another change, is one change whose ``after`` says after which kind.
    """
    have = read_basis(machine)
    want = resolve(spec, have.functions)
    planned: list[Change] = []
    pending: dict[str, set[str]] = {}
    for kind in ordered():
        have = have.merged(kind.NAME, None, kind.observe(machine, want, None))
        changes = kind.plan(want, have)
        for device in sorted(want.nics):
            first = next((k for k in kind.UNKNOWN_UNTIL if device in pending.get(k, ())), None)
            if first is not None:
                changes = [change for change in changes if change.device != device]
                changes.append(Change(kind.NAME, device, "*", None, f"{KNOWN_AFTER} {first}"))
        pending[kind.NAME] = {change.device for change in changes}
        planned += changes
    errors = [c.message for c in want.missing if c.severity == "required"]
    errors += [
        f"{change}: {change.obstacle}; {change.remedy}"
        for change in planned
        if change.obstacle and not _comes_with(change, pending)
    ]
    return Preview(tuple(c for c in planned if not (c.obstacle and _comes_with(c, pending))), tuple(errors))


def _comes_with(change: Change, pending: Mapping[str, set[str]]) -> bool:
    """A netdev that is missing now and comes once its VF is made and bound is no obstacle of the spec."""
    return change.kind == "vf_links" and change.device in pending.get("bindings", ())
