"""A pass: observe, plan and apply, then observe again, until the plan of a new reading is empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from attrs import evolve, frozen

from agent.engine.attempts import announce, attempts, is_required, make, sets_state, write_of
from agent.engine.context import SILENT, Callbacks, Goal, Memory, PassContext
from agent.engine.nic_verdicts import nic_verdicts, of_needed_nics
from agent.engine.observation import Observed, not_observed, observed, unreadable
from agent.engine.readiness import Judge, at_once
from agent.hardware.functions import links_to_vfs, rediscover
from agent.kinds import Kind, by_name, ethtool, irqs, links, ordered, vf_links, vfs
from agent.machine import Machine
from agent.report.records import HOST, Change, Condition, Disruption, FunctionFault, NicVerdict, Outcome, Status
from agent.report.target import device_of
from agent.spec.nic import Nic
from agent.state.scope import Scope, alone, devices, in_scope, own
from agent.state.snapshot import Snapshot, read_basis
from agent.state.wanted import Wanted, asked, resolve

ROUNDS = 5
"""How often a pass observes and plans. A change may create what another kind sets (VFs, netdevs, interrupts), and no chain of
such changes is longer."""


@frozen
class Pass:
    """The result of one pass. ``outcomes``: first the applied changes, then all that still differs.

    ``engine``: the conditions that come from the engine. ``conditions``: these, as they count, and those of the probes.
    ``waiting``: changes of a new spec that are deferred or blocked; they do not affect readiness.
    ``baseline_want`` and ``baseline_have``: what the probes compare, usually ``want`` and ``have``. While a new spec waits,
    they are of the last verified spec, and the snapshot has all that this spec needs.
    ``nics``: the verdict on each NIC, by the same.
    """

    want: Wanted
    have: Snapshot
    outcomes: tuple[Outcome, ...]
    engine: tuple[Condition, ...]
    waiting: tuple[Outcome, ...]
    baseline_want: Wanted
    baseline_have: Snapshot
    conditions: tuple[Condition, ...] = ()
    nics: tuple[NicVerdict, ...] = ()

    @property
    def as_wanted(self) -> bool:
        """Whether the last reading was as the spec wants: no required value differs, and no change of the spec waits."""
        return not self.waiting and any(c.type == "Converged" and c.status == "True" for c in self.engine)


@frozen
class _State:
    """How far a pass has come: what is wanted, what was read, and the outcomes of the changes."""

    want: Wanted
    have: Snapshot
    applied: tuple[Outcome, ...] = ()
    remaining: tuple[Outcome, ...] = ()

    def adding(self, outcomes: Sequence[Outcome]) -> _State:
        applied = tuple(outcome for outcome in outcomes if outcome.result == "applied")
        remaining = tuple(outcome for outcome in outcomes if outcome.result != "applied")
        return evolve(self, applied=self.applied + applied, remaining=self.remaining + remaining)


def converge(
    machine: Machine,
    goal: Goal,
    memory: Memory,
    last: Snapshot | None = None,
    scope: Scope = None,
    callbacks: Callbacks = SILENT,
    just_read: Snapshot | None = None,
) -> Pass:
    """Make the machine match the goal's spec, as far as that is allowed now. The result says what was done and what is left.

    :param last: the snapshot of the pass before; None reads everything.
    :param scope: the devices that events named; None reads everything.
    :param just_read: the snapshot of a dry run of the same spec. It stands for the first reading of everything. An event that
        came since then must still be taken after the pass.
    :raises OSError: a device went away while it was read; the caller starts again.
    """
    callbacks.doing("devices", "read")
    context = PassContext.begin(machine, goal, memory, callbacks)
    state = _rounds(context, last, scope, just_read)
    _note_seen(context, state)
    whole = last is None or scope is None
    if whole:
        state = _restore_devices_that_left(context, state)
    state = state.adding(_unreadable(context, state.want, state.have))
    load = irqs.with_moves(state.want, state.have)
    state = evolve(state, have=evolve(state.have, flapped=_flapped(state.applied), load=load))
    _remember(memory, state, whole)
    waiting = _waiting(goal, state.have, state.remaining)
    callbacks.doing("probes", "read")
    outcomes, engine = (*state.applied, *state.remaining), _engine_conditions(memory, state, waiting)
    result = Pass(state.want, state.have, outcomes, engine, waiting, *_baseline(context, state, waiting))
    result = judged(result, callbacks.judge or at_once(context.cache.machine))
    if result.as_wanted and goal.spec.mode == "enforce":
        for kind in by_name().values():
            # If /run is full, the report says so already, and the next such pass tries again.
            with suppress(OSError):
                kind.remember(machine, result.want, result.have)
    return result


def _rounds(context: PassContext, last: Snapshot | None, scope: Scope, just_read: Snapshot | None) -> _State:
    """Observe, plan and apply until nothing more can be applied."""
    machine = context.cache.machine
    spec = context.goal.spec
    needed = asked(spec)
    if last is not None and spec.mode == "enforce":
        _announce_lost_vfs(context, last, scope)
    if last is None or scope is None:
        have, scope = just_read or read_basis(machine, needed, last), None
    else:
        have = last
    if scope is not None:
        # A device that could not be read before has no state yet: read all of it.
        scope |= devices(scope) & {function.address for function in have.functions if function.unreadable}
    applied: tuple[Outcome, ...] = ()
    for number in range(1, ROUNDS + 1):
        if scope is not None:
            # A netdev that was created again may have another name, or another permanent MAC, from which its VFs' MACs derive.
            whole = frozenset(name for name in scope if device_of(name) == name != HOST)
            owns = frozenset(device for device in devices(scope) if own(device) in scope)
            context.callbacks.doing("devices", "read")
            have = evolve(have, functions=rediscover(machine, have.functions, whole, owns, needed))
        want = resolve(spec, have.functions)
        if scope is not None and _asked(want) != have.nics:
            # A NIC that was not wanted before, or with other settings, has no state yet, or an outdated one.
            have, scope = read_basis(machine, needed, have), None
            want = resolve(spec, have.functions)
        want, have, outcomes = _round(context, want, have, scope, unread=frozenset() if have is just_read else scope)
        done = [outcome for outcome in outcomes if outcome.result == "applied"]
        state = _State(want, have, applied).adding(outcomes)
        if not done:
            return state
        applied = state.applied
        if number == ROUNDS:
            break  # the next pass takes the events
        # Read again what was written, and what new events name.
        written = frozenset(name for outcome in done for name in _reread(outcome.change))
        events = context.callbacks.new_events()
        context.cache.forget()
        # An owner of before the reading must not decide about what it finds: a pod may have returned its VF.
        context.users.forget()
        have, scope = (read_basis(machine, needed, have), None) if events is None else (have, written | events)
    context.cache.forget()
    return state.adding([_unverified(context, outcome) for outcome in done])


def _announce_lost_vfs(context: PassContext, last: Snapshot, scope: Scope) -> None:
    """Announce that VFs are gone before anything is read of which the kernel holds the locks while it deletes them.

    It holds the PF's own lock, which sriov_numvfs_show waits for, and again and again rtnetlink's. Before it takes a VF from
    its driver, it removes the VF's link from the PF's folder, whose listing waits for neither (pci_iov_remove_virtfn,
    drivers/pci/iov.c).
    """
    counts: Mapping[str, vfs.VfCount] = last[vfs.NAME]
    before = {address: state.count for address, state in counts.items() if state.count}
    if not before:
        return
    want = resolve(context.goal.spec, last.functions)
    for address in in_scope(want, scope):
        wanted = want.nics[address].vf_count() or 0
        try:
            there = len(links_to_vfs(context.cache.machine.files, address))
        except OSError:
            continue  # the reading names a device that cannot be read
        if there < min(wanted, before.get(address, 0)):
            announce(context, want, Change(vfs.NAME, address, "count", there, wanted))


def _round(
    context: PassContext, want: Wanted, have: Snapshot, scope: Scope, unread: Scope
) -> tuple[Wanted, Snapshot, list[Outcome]]:
    """Observe, plan and apply each kind once, in the order of kinds.

    :param unread: the part of ``scope`` that must be read. What the round changes is added to it.
    """
    outcomes: list[Outcome] = []
    machine, originals = context.cache.machine, context.memory.originals

    def plan(kind: Kind, want: Wanted, have: Snapshot) -> list[Change]:
        return kind.plan(want, have) + originals.restoring(machine, kind, want, have, whole=scope is None)

    for kind in ordered():
        context.callbacks.doing(kind.NAME, "read")
        read = observed(machine, kind, want, have, unread) if unread != frozenset() else Observed(want, have)
        want, have = read.want, read.have
        if read.fault is not None:
            outcomes.append(not_observed(kind, read.fault))
            context.remember_failure(outcomes[-1])
            continue
        if not isinstance(kind, Kind):
            continue
        if changes := plan(kind, want, have):
            want, have, made = make(context, want, have, kind, changes, plan)
            outcomes += made
            unread = unread if unread == scope else (unread or frozenset()).union(*(_reread(o.change) for o in made))
    return want, evolve(have, nics=_asked(want)), outcomes


def _asked(want: Wanted) -> dict[str, Nic]:
    return {address: wanted.nic for address, wanted in want.nics.items()}


def _unverified(context: PassContext, outcome: Outcome) -> Outcome:
    """The failure of a change that was written in the last round, and not read back. The next pass reads it soon."""
    error = f"it was still being changed after {ROUNDS} rounds, and has not been read again"
    failed = evolve(outcome, result="failed", error=error, remedy="see who else sets it: trackbed history")
    context.remember_failure(failed)
    return failed


def _restore_devices_that_left(context: PassContext, state: _State) -> _State:
    machine, originals, have = context.cache.machine, context.memory.originals, state.have
    restoring = partial(originals.restoring, machine, device_left=True)
    left = originals.removed_devices(state.want, have.functions)
    outcomes: list[Outcome] = []
    down: list[Change] = []
    for kind in ordered() if left.nics else ():
        context.callbacks.doing(kind.NAME, "read")
        read = observed(machine, kind, left, have, frozenset(left.nics))
        left, have = read.want, read.have
        if read.fault is None and isinstance(kind, Kind):
            changes = restoring(kind, left, have)
            down += [change for change in changes if _takes_pf_down(change)]
            changes = [change for change in changes if not _takes_pf_down(change)]
            left, have, made = make(context, left, have, kind, changes, restoring)
            outcomes += made
    # Without a link a driver may refuse the other values (igb and ixgbe: max_tx_rate).
    kept = {outcome.change.device for outcome in outcomes if outcome.result != "applied"}
    waiting = [
        evolve(change, blocker="its other values are restored first") for change in down if change.device in kept
    ]
    now = [change for change in down if change.device not in kept]
    outcomes += attempts(context, left, have, by_name()[links.NAME], waiting + now)
    return evolve(state, have=have).adding(outcomes)


def _flapped(applied: Sequence[Outcome]) -> frozenset[str]:
    """The PFs that may have lost their carrier by the changes. It counts also where no flap follows from it.

    mlx5 has none for an instant whenever it opens other channels (mlx5e_switch_priv_channels in en_main.c).
    """
    return frozenset(
        o.change.device
        for o in applied
        if o.change.disruption >= Disruption.LINK_FLAP or sets_state(o.change) or _reopens_pf(o.change)
    )


def _reopens_pf(change: Change) -> bool:
    reopens = change.field == "mtu" or change.kind in [each.NAME for each in ethtool.KINDS]
    return reopens and change.target == change.device


def _takes_pf_down(change: Change) -> bool:
    return sets_state(change) and change.kind == links.NAME and change.after == "down"


def _note_seen(context: PassContext, state: _State) -> None:
    """Note the changes whose effect the pass has read: they were made, and are not planned any more."""
    remaining = {outcome.change.key for outcome in state.remaining}
    for outcome in state.applied:
        change = outcome.change
        if change.key not in remaining:
            context.callbacks.doing(change.kind, "read")
            context.memory.originals.seen(context.machine, by_name()[change.kind], change)


def _unreadable(context: PassContext, want: Wanted, have: Snapshot) -> list[Outcome]:
    """The failures of devices that cannot be read. The next pass soon tries them again."""
    outcomes = unreadable(want, have)
    for outcome in outcomes:
        context.remember_failure(outcome)
    return outcomes


def _remember(memory: Memory, state: _State, whole: bool) -> None:
    """Note what was written, and forget the failures of changes that are no longer planned.

    :param whole: the pass also looked at the devices that are no longer in the spec.
    """
    contention, index = memory.failures.contention, partial(vf_links.index, state.have)
    planned = {outcome.change.key for outcome in state.remaining}
    memory.failures.keep(planned if whole else planned | memory.failures.of_others({HOST, *state.want.nics}))
    contention.left(index)
    contention.keep(write_of(index, state.have, outcome.change) for outcome in state.remaining)
    contention.wrote((write_of(index, state.have, outcome.change) for outcome in state.applied), memory.clock())


def _reread(change: Change) -> frozenset[str]:
    if by_name()[change.kind].REACH == "device" or change.device == HOST:
        return frozenset({change.device})
    # The attributes that a PF grants to a VF are read from the PF.
    return frozenset({own(change.device), alone(change.target)})


def _waiting(goal: Goal, have: Snapshot, remaining: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The deferred and blocked changes that only the new spec asks for. The verified spec is true there."""
    held = tuple(
        outcome
        for outcome in remaining
        # A blocked original is none of the spec's values: it waits for its device.
        if outcome.result == "deferred" or (outcome.result == "blocked" and not outcome.change.original)
    )
    if not held or goal.verified is None or goal.verified == goal.spec:
        return ()
    want = resolve(goal.verified, have.functions)
    differing = {change.place for kind in by_name().values() for change in kind.plan(want, have)}
    return tuple(outcome for outcome in held if outcome.change.place not in differing)


def _baseline(context: PassContext, state: _State, waiting: Sequence[Outcome]) -> tuple[Wanted, Snapshot]:
    """What the probes compare: while changes of a new spec wait, the verified spec."""
    verified = context.goal.verified
    if not waiting or verified is None:
        return state.want, state.have
    want, have = resolve(verified, state.have.functions), state.have
    for kind in ordered():
        if kind.read_for(want) != kind.read_for(state.want):
            read = observed(context.cache.machine, kind, want, have, None)
            want, have = read.want, read.have
    return want, have


def _engine_conditions(memory: Memory, state: _State, waiting: Sequence[Outcome]) -> tuple[Condition, ...]:
    counted = [outcome for outcome in state.remaining if outcome not in waiting]
    index = partial(vf_links.index, state.have)
    required = [write_of(index, state.have, o.change) for o in counted if is_required(state.want, o.change)]
    kept = memory.originals.condition
    return (
        _converged(state.want, counted),
        memory.failures.contention.condition(required),
        *([kept] if kept is not None else []),
    )


def judged(result: Pass, judge: Judge) -> Pass:
    """The result with its conditions, those of the engine first; the probes are judged now."""
    conditions = (*result.engine, *judge(result.baseline_want, result.baseline_have))
    if result.want.spec.mode == "observe":
        # In observe mode the agent writes nothing, so no condition is required.
        conditions = tuple(
            evolve(each, severity="warn", faults=tuple(evolve(fault, severity="warn") for fault in each.faults))
            for each in conditions
        )
    nics = nic_verdicts(result.baseline_want, result.baseline_have, conditions)
    readiness = result.baseline_want.spec.readiness
    if readiness.granularity == "device":
        conditions = tuple(of_needed_nics(readiness, conditions, nics))
    return evolve(result, conditions=conditions, nics=nics)


def _converged(want: Wanted, remaining: Sequence[Outcome]) -> Condition:
    """``Converged``: False while a required change is not made; the message names the first."""
    if not remaining:
        return Condition("Converged", "True", "AsWanted")
    required = [outcome for outcome in remaining if is_required(want, outcome.change)]
    first, *others = required or remaining
    more = f" (and {len(others)} more)" if others else ""
    message = f"{first.change}: {first.error}{more}"
    status: Status
    if want.spec.mode == "observe":
        status, reason = "False", "Observing"
    elif not required:
        status, reason = "True", "OptionalDiffers"
    else:
        status, reason = "False", first.result.capitalize()
    faults = tuple(
        FunctionFault(o.change.target, o.result.capitalize(), f"{o.change}: {o.error}")
        for o in remaining
        if o.change.required
    )
    return Condition("Converged", status, reason, message, remedy=first.remedy, faults=faults)
