"""A dry run: what a spec would change on this machine now. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from agent.engine.attempts import brings_up
from agent.engine.cached_machine import CachedMachine
from agent.engine.observation import observed
from agent.engine.originals import Originals
from agent.engine.users import User, is_owned, may_disturb, users, with_affected
from agent.kinds import Kind, by_name, ordered
from agent.machine import Machine
from agent.report.records import WHOLE_KIND, Change
from agent.spec.node import NodeSpec
from agent.state.snapshot import Snapshot, read_basis
from agent.state.wanted import Wanted, asked, resolve

KNOWN_AFTER = "known after"


@frozen
class DryRun:
    """The changes that a spec would bring to this machine now.

    ``errors``: why the machine cannot match the spec. ``names``: the NICs' names in the spec, by PCI address. ``have``: what
    was read, by which a pass may begin; None if a part of it could not be read.
    """

    changes: tuple[Change, ...]
    errors: tuple[str, ...]
    names: Mapping[str, str]
    have: Snapshot | None = None


def dry_run(machine: Machine, spec: NodeSpec, originals: Originals | None = None) -> DryRun:
    """Plan all changes of a spec, and write nothing.

    If a kind's changes of a device depend on what another kind's change creates, one change stands for all of them. Its
    ``after`` names the other kind.

    :param originals: the values that are restored if the spec does not give them.
    """
    # Nothing is written, so what one kind has read is still valid for the next.
    machine = CachedMachine(machine).machine
    have = read_basis(machine, asked(spec))
    want = resolve(spec, have.functions)
    planned: list[Change] = []
    restoring = (originals or Originals()).restoring
    pending: dict[str, set[str]] = {}
    errors: list[str] = []
    users_of: dict[str, Mapping[str, tuple[User, ...]]] = {}
    for kind in ordered():
        read = observed(machine, kind, want, have, None)
        want, have = read.want, read.have
        if read.fault is not None:
            errors.append(f"{kind.NAME}: {read.fault}")
            continue
        if not isinstance(kind, Kind):
            continue
        changes = [
            _with_users(machine, want, change, users_of)
            for change in kind.arranged(kind.plan(want, have) + restoring(machine, kind, want, have))
        ]
        changes = [
            change
            for change in changes
            if not (change.skip_if_owned and is_owned(users_of[change.device], change.target))
            # An original that the device cannot have now: it is restored once it can.
            and not (change.original and change.blocker)
        ]
        for device in sorted(want.nics):
            first = next((k for k in kind.UNKNOWN_UNTIL if device in pending.get(k, ())), None)
            # If the kind has no state of the device, the spec sets nothing of this kind there.
            if first is not None and device in have[kind.NAME]:
                changes = [change for change in changes if change.device != device]
                changes.append(Change(kind.NAME, device, WHOLE_KIND, None, f"{KNOWN_AFTER} {first}"))
        pending[kind.NAME] = {change.device for change in changes}
        planned += changes
    errors += [c.text for c in want.missing if c.severity == "required"]
    errors += [f"{c}: {c.blocker}; {c.remedy}" for c in planned if c.blocker and not _is_pending(c, pending)]
    changes = _as_made([evolve(c, blocker="", remedy="") if _is_pending(c, pending) else c for c in planned])
    names = {address: wanted.nic.name for address, wanted in want.nics.items()}
    is_complete = not errors and not any(function.unreadable for function in have.functions)
    return DryRun(
        tuple(c for c in changes if c.blocker or c.field != "netdev"),
        tuple(errors),
        names,
        have if is_complete else None,
    )


def _as_made(changes: list[Change]) -> list[Change]:
    """The changes of all kinds in the order in which a pass makes them: a netdev's settings come before its link comes up."""
    kinds, ups = by_name(), {change.target: change.kind for change in changes if brings_up(change)}
    places = {name: place for place, name in enumerate(kinds)}

    def place(change: Change) -> tuple[int, int]:
        if brings_up(change):
            return places[change.kind], 2
        if change.target in ups and kinds[change.kind].BEFORE_UP:
            return places[ups[change.target]], 1
        return places[change.kind], 0

    return sorted(changes, key=place)


def _with_users(
    machine: Machine, want: Wanted, change: Change, users_of: dict[str, Mapping[str, tuple[User, ...]]]
) -> Change:
    """A planned change with the users whom it would disturb. ``users_of``: a cache, the users of each device."""
    if change.device not in users_of and (change.skip_if_owned or may_disturb(change)):
        users_of[change.device] = users(machine, want, change.device) if change.device in want.nics else {}
    if not may_disturb(change):
        return change
    return with_affected(change, want, users_of[change.device])


def _is_pending(change: Change, pending: Mapping[str, set[str]]) -> bool:
    """Whether a pending change of another kind to the same device removes a change's blocker."""
    return change.device in pending.get(by_name()[change.kind].lifted_by(change), ())
