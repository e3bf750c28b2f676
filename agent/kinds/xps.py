"""Transmit packet steering: each CPU sends through one queue of a netdev, that whose interrupt is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agent.change import Change
from agent.cpus import Senders, pool
from agent.kinds import Reading, irqs, queues
from agent.machine import Machine
from agent.nics import Wanted
from agent.ranges import format_ranges, parse_ranges
from agent.snapshot import Scope, Snapshot

NAME: Final = "xps"
AFTER = ("queues",)
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """Nothing of its own: :mod:`agent.kinds.queues` reads the masks."""
    return {}


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ, of netdevs with several transmit queues; those without an interrupt are left alone."""
    if not want.spec.xps.enable:
        return []
    placed = irqs.placement(want, have)
    exclude = frozenset(parse_ranges(want.spec.irqs.exclude_cpus))
    senders = Senders(have.topology, pool(have.topology, -1, exclude).cpus)
    changes = []
    for address, target, found in queues.each(have):
        served = {queue: placed[target, str(queue)] for queue in found.xps if (target, str(queue)) in placed}
        if address not in want.nics or not served:
            continue
        for queue, after in sorted(senders.transmitting(served).items()):
            before = found.xps[queue]
            if before != after:
                changes.append(Change(NAME, target, f"tx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each transmit queue's mask."""
    return queues.readings(want, have, NAME, want.spec.xps.enable)


def apply(machine: Machine, change: Change) -> None:
    """Write one queue's mask, after finding the netdev again."""
    queues.write_mask(machine, change, NAME)
