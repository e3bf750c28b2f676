"""Transmit packet steering (XPS): each CPU sends through the queue of a netdev whose interrupt is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agent.hardware.placement import Senders, pool
from agent.hardware.topology import Topology
from agent.kinds import Reading, irqs, queues
from agent.machine import Machine
from agent.report.records import Change
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME: Final = "xps"
AFTER = ("queues",)
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"
OTHER_WRITERS = ("tuned",)
OFF = "xps.enable: false"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """Nothing: :mod:`agent.kinds.queues` reads the masks."""
    return {}


def _senders(topology: Topology, excluded: str) -> Senders:
    return Senders(topology, pool(topology, -1, frozenset(parse_ranges(excluded))).cpus)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ, of netdevs with several transmit queues. Queues without an interrupt are left alone."""
    if not want.spec.xps.enable:
        return []
    placed = irqs.placement(want, have)
    excluded = want.spec.irqs.exclude_cpus
    senders = have.memo.get("senders", (placed, have.topology, excluded), lambda: _senders(have.topology, excluded))
    changes = []
    for address, target, observed in queues.each(have):
        if address not in want.nics:
            continue
        served = {queue: cpu for queue in observed.xps if (cpu := placed.get((target, str(queue)))) is not None}
        for queue, after in senders.transmitting(served).items() if served else ():
            before = observed.xps[queue]
            if before != after:
                changes.append(Change(NAME, target, f"tx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each transmit queue's mask."""
    return queues.readings(want, have, NAME, want.spec.xps.enable)


def apply(machine: Machine, change: Change) -> None:
    """Write one queue's mask, after finding the netdev again."""
    queues.write_mask(machine, change, NAME)
