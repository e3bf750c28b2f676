"""What a spec would do to this machine now, with nothing touched."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from agent.engine.cached_machine import CachedMachine
from agent.engine.observation import observed
from agent.engine.originals import Originals
from agent.engine.users import User, taken, users, with_affected
from agent.kinds import bindings, ordered
from agent.machine import Machine
from agent.report.records import Change, Disruption
from agent.spec.node import NodeSpec
from agent.state.snapshot import read_basis
from agent.state.wanted import Wanted, asks_serials, resolve

KNOWN_AFTER = "known after"

# What is missing now and comes with a pending change of another kind to the same device is no blocker of the spec.
BROUGHT_BY = {"vf_attributes": "vfs", "bindings": "vfs", "vf_links": "bindings"}


@frozen
class Preview:
    """What a spec would do to this machine now. ``errors``: why it cannot be had at all."""

    changes: tuple[Change, ...]
    errors: tuple[str, ...]


def preview(machine: Machine, spec: NodeSpec, originals: Originals | None = None) -> Preview:
    """Plan without touching anything; ``originals``: what values were before.

    What cannot be known yet, because the devices come with another change, is one change whose ``after`` says after which kind.
    """
    # Nothing is written, so that what one kind has asked for the next need not ask for again.
    machine = CachedMachine(machine).machine
    have = read_basis(machine, asks_serials(spec))
    want = resolve(spec, have.functions)
    planned: list[Change] = []
    back = (originals or Originals()).returning
    pending: dict[str, set[str]] = {}
    unread: list[str] = []
    seen: dict[str, Mapping[str, tuple[User, ...]]] = {}
    for kind in ordered():
        read = observed(machine, kind, want, have, None)
        want, have = read.want, read.have
        if read.fault is not None:
            unread.append(f"{kind.NAME}: {read.fault}")
            continue
        changes = [
            _judged(machine, want, change, seen)
            for change in (*kind.plan(want, have), *back(machine, kind, want, have))
        ]
        changes = [
            change for change in changes if not (change.skip_if_owned and taken(seen[change.device], change.target))
        ]
        for device in sorted(want.nics):
            first = next((k for k in kind.UNKNOWN_UNTIL if device in pending.get(k, ())), None)
            # A kind that observed nothing of a device was asked for nothing there.
            if first is not None and device in have[kind.NAME]:
                changes = [change for change in changes if change.device != device]
                changes.append(Change(kind.NAME, device, "*", None, f"{KNOWN_AFTER} {first}"))
        pending[kind.NAME] = {change.device for change in changes}
        planned += changes
    errors = [*unread, *(c.message for c in want.missing if c.severity == "required")]
    errors += [f"{c}: {c.blocker}; {c.remedy}" for c in planned if c.blocker and not _comes(c, pending)]
    changes = [evolve(c, blocker="", remedy="") if _comes(c, pending) else c for c in planned]
    return Preview(tuple(c for c in changes if c.blocker or c.field != "netdev"), tuple(errors))


def _judged(machine: Machine, want: Wanted, change: Change, seen: dict[str, Mapping[str, tuple[User, ...]]]) -> Change:
    """A change of a preview with its affected; ``seen`` remembers the users of each device."""
    if change.device not in seen and (change.skip_if_owned or change.disruption > Disruption.NONE):
        seen[change.device] = users(machine, want, change.device) if change.device in want.nics else {}
    if change.disruption == Disruption.NONE:
        return change
    return with_affected(change, want, seen[change.device])


def _comes(change: Change, pending: Mapping[str, set[str]]) -> bool:
    return change.blocker != bindings.NO_VFIO and change.device in pending.get(BROUGHT_BY.get(change.kind, ""), ())
