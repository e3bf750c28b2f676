"""Receive packet steering: where a netdev has fewer queues than its CPUs, the others share the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field

from agent.hardware.placement import Key, steering
from agent.kinds import Reading, irqs, queues
from agent.machine import Machine
from agent.report.records import Change
from agent.spec.ranges import format_ranges
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME: Final = "rps"
AFTER = ("queues",)
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """Nothing of its own: :mod:`agent.kinds.queues` reads the masks."""
    return {}


@define
class _Steered:
    """The masks by PF, number of queues and CPU of the interrupt, for as long as a placement holds."""

    placed: Mapping[Key, int] | None = None
    masks: dict[tuple[str, int, int], frozenset[int]] = field(factory=dict)


_steered = _Steered()


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ from what the placement of the queues' interrupts asks for."""
    if not want.spec.rps.enable:
        return []
    placed = irqs.placement(want, have)
    local = irqs.pools(want, have)
    changes = []
    if _steered.placed is not placed:
        _steered.placed, _steered.masks = placed, {}
    masks = _steered.masks
    for address, target, found in queues.each(have):
        if address not in local:
            continue
        for queue, before in found.rps.items():
            if (cpu := placed.get((target, str(queue)))) is None:
                continue  # a netdev that is down has requested no interrupts
            question = address, len(found.rps), cpu
            if (after := masks.get(question)) is None:
                after = masks[question] = steering(have.topology, local[address], len(found.rps), cpu)
            if before != after:
                changes.append(Change(NAME, target, f"rx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each receive queue's mask."""
    return queues.readings(want, have, NAME, want.spec.rps.enable)


def apply(machine: Machine, change: Change) -> None:
    """Write one queue's mask, after finding the netdev again."""
    queues.write_mask(machine, change, NAME)
