"""The pass: observe, plan, apply, observe again, until a fresh reading gives an empty plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from attrs import evolve, frozen

from agent.engine.attempts import Work, attempts, is_required, write_of
from agent.engine.cached_machine import CachedMachine
from agent.engine.observation import not_observed, observed, unreadable
from agent.engine.originals import Originals
from agent.engine.readiness import Judge, at_once
from agent.engine.retry import Failures, identity
from agent.hardware.functions import rediscover
from agent.kinds import by_name, irqbalance, ordered, rdma
from agent.machine import Machine
from agent.report.activity import Mode
from agent.report.records import HOST, Change, Condition, Disruption, Outcome
from agent.spec.node import NodeSpec
from agent.state.scope import Scope, devices, own
from agent.state.snapshot import Snapshot, read_basis
from agent.state.wanted import Wanted, asks_serials, resolve

# A change may bring up what another kind must see (VFs, netdevs, interrupts); deeper chains do not exist.
ROUNDS = 5
# What probes judge of them is read only as far as a spec asks for it.
ASKED_FOR = (irqbalance, rdma)


# The conditions that no probe says.
OWN = frozenset({"Converged", "Uncontended", "OriginalsKept"})


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
    reading = CachedMachine(machine)
    work = Work(
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
    if scope is not None:
        # Of a device that could not be read before, all is read.
        scope |= devices(scope) & {function.address for function in have.functions if function.unreadable}
    whole = scope is None
    applied: list[Outcome] = []
    for _ in range(ROUNDS):
        if scope is not None:
            # Names, and the permanent address that the VFs' are made from, come with a netdev: it may be a new one.
            have = evolve(have, functions=rediscover(machine, have.functions, _pfs(scope), serials))
        want, have, outcomes = _round(work, resolve(spec, have.functions), have, scope)
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
    if whole:
        have, given_back = _give_back(work, work.originals.left(want, have.functions), have)
    else:
        given_back = []
    applied += [outcome for outcome in given_back if outcome.result == "applied"]
    remaining += [outcome for outcome in given_back if outcome.result != "applied"]
    remaining += _quarantined(work, want, have)
    failures.keep({identity(outcome.change) for outcome in remaining})
    failures.contention.keep(write_of(have, outcome.change) for outcome in remaining)
    failures.contention.wrote((write_of(have, outcome.change) for outcome in applied), clock())
    waiting = _waiting(spec, verified, have, remaining)
    doing("probes", "read")
    judged = [outcome for outcome in remaining if outcome not in waiting]
    required = [write_of(have, outcome.change) for outcome in judged if is_required(want, outcome.change)]
    standard, seen = want, have
    if waiting and verified is not None:
        standard = resolve(verified, have.functions)
        for kind in ASKED_FOR if _asks(standard) != _asks(want) else ():
            read = observed(machine, kind, standard, seen, None)
            standard, seen = read.want, read.have
    found = Pass(want, have, (*applied, *remaining), (), len(applied), waiting, standard, seen)
    own = [_converged(want, judged), failures.contention.condition(required)]
    own += [trouble] if (trouble := work.originals.trouble) is not None else []
    return _judged(found, tuple(own), judge or at_once(machine))


def _asks(want: Wanted) -> tuple[object, ...]:
    """What of a spec :data:`ASKED_FOR` goes by."""
    return want.spec.irqs.irqbalance, {address: nic.nic.rdma for address, nic in want.nics.items()}


def _unverified(work: Work, outcome: Outcome) -> Outcome:
    """What was written in the last round was not read again: it is looked at in another pass, and soon."""
    error = f"it was still being changed after {ROUNDS} rounds, and has not been read again"
    found = evolve(outcome, result="failed", error=error, remedy="see who else sets it: trackbed history")
    work.failures.add(found, work.clock())
    return found


def judged_again(found: Pass, judge: Judge) -> Pass:
    """What a pass found, with what the probes say by now."""
    return _judged(found, tuple(c for c in found.conditions if c.type in OWN), judge)


def _judged(found: Pass, own: tuple[Condition, ...], judge: Judge) -> Pass:
    """A pass with its conditions: the engine's ``own`` first."""
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


def _quarantined(work: Work, want: Wanted, have: Snapshot) -> list[Outcome]:
    """What cannot be read is looked at in another pass, and soon."""
    found = unreadable(want, have)
    for outcome in found:
        work.failures.add(outcome, work.clock())
    return found


def _round(work: Work, want: Wanted, have: Snapshot, scope: Scope) -> tuple[Wanted, Snapshot, list[Outcome]]:
    outcomes: list[Outcome] = []
    machine = work.reading.machine
    for kind in ordered():
        work.doing(kind.NAME, "read")
        read = observed(machine, kind, want, have, scope)
        want, have = read.want, read.have
        if read.fault is not None:
            outcomes.append(not_observed(kind, read.fault))
            work.failures.add(outcomes[-1], work.clock())
            continue
        changes = kind.plan(want, have) + work.originals.returning(machine, kind, want, have, whole=scope is None)
        outcomes += attempts(work, want, have, kind, changes)
    return want, have, outcomes


def _give_back(work: Work, left: Wanted, have: Snapshot) -> tuple[Snapshot, list[Outcome]]:
    """What was set on devices that are no longer in the spec gets its original value back."""
    outcomes: list[Outcome] = []
    machine = work.reading.machine
    for kind in ordered() if left.nics else ():
        work.doing(kind.NAME, "read")
        read = observed(machine, kind, left, have, frozenset(left.nics))
        left, have = read.want, read.have
        if read.fault is None:
            changes = work.originals.returning(machine, kind, left, have, left=True)
            outcomes += attempts(work, left, have, kind, changes)
    return have, outcomes


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
