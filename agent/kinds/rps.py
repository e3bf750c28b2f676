"""Receive packet steering: where a netdev has fewer queues than its CPUs, the others share the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agent.change import Change
from agent.cpus import steering
from agent.kinds import Reading, irqs, queues
from agent.machine import Machine
from agent.nics import Wanted
from agent.ranges import format_ranges
from agent.snapshot import Scope, Snapshot

NAME: Final = "rps"
AFTER = ("queues",)
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """Nothing of its own: :mod:`agent.kinds.queues` reads the masks."""
    return {}


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ from what the placement of the queues' interrupts asks for."""
    if not want.spec.rps.enable:
        return []
    placed = irqs.placement(want, have)
    local = irqs.pools(want, have)
    changes = []
    steered: dict[tuple[str, int, int], frozenset[int]] = {}
    for address, target, found in queues.each(have):
        for queue, before in sorted(found.rps.items()):
            cpu = placed.get((target, str(queue)))
            if address not in local or cpu is None:
                continue  # a netdev that is down has requested no interrupts
            question = address, len(found.rps), cpu
            if question not in steered:
                steered[question] = steering(have.topology, local[address], len(found.rps), cpu)
            after = steered[question]
            if before != after:
                changes.append(Change(NAME, target, f"rx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each receive queue's mask."""
    return queues.readings(want, have, NAME, want.spec.rps.enable)


def apply(machine: Machine, change: Change) -> None:
    """Write one queue's mask, after finding the netdev again."""
    queues.write_mask(machine, change, NAME)
