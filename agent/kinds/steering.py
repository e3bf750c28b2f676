"""Packet steering on the spec's own NICs: RPS of receive queues, and XPS of transmit queues.

Receive packet steering: if a netdev has fewer queues than CPUs, the other CPUs share the work. Transmit packet steering: each
CPU sends through the queue of a netdev whose interrupt is nearest. :mod:`agent.kinds.queues` reads and writes the masks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from attrs import evolve

from agent.hardware.functions import netdev, pci_of
from agent.hardware.placement import Senders, pool, steering
from agent.hardware.topology import Topology
from agent.kinds import Kind, Reading, irqs, queues, rps_netdevs, vf_links
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

XPS: Final = "xps"


def _plan_rps(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ from those that follow from the placement of the queues' interrupts."""
    if not want.spec.rps.enable:
        return []
    placed = irqs.placement(want, have)
    local = irqs.pools(want, have)
    changes = []
    # By PF, number of queues, and CPU of the interrupt: netdevs of one PF mostly have the same masks.
    masks: dict[tuple[str, int, int], frozenset[int]] = have.memo.get("rps masks", (placed, local, have.topology), dict)
    for address, target, observed in queues.each(have):
        if address not in local:
            continue
        for queue, before in observed.rps.items():
            if (cpu := placed.get((target, str(queue)))) is None:
                continue  # a netdev that is down has no interrupts
            question = address, len(observed.rps), cpu
            if (after := masks.get(question)) is None:
                after = masks[question] = steering(have.topology, local[address], len(observed.rps), cpu)
            if before != after:
                changes.append(Change(queues.RPS, target, f"rx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def _rps_readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each receive queue's mask, without those that ``rps.netdevs`` sets since the NIC has left the spec."""
    masks = queues.readings(want, have, queues.RPS, want.spec.rps.enable)
    others = rps_netdevs.indexes(want, have)
    return [mask for mask in masks if vf_links.index(have, mask.target) not in others] if others else masks


def _rps_originals(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The queue's mask; under the netdev's name if it was noted under that before (``rps.netdevs``)."""
    name = netdev(machine.files, pci_of(machine.files, change.target))
    by_name = rps_netdevs.NAME, HOST, f"{name}/{change.field}"
    return [evolve(change, kind=by_name[0], target=HOST, field=by_name[2]) if by_name in known else change]


def _senders(topology: Topology, excluded: str) -> Senders:
    return Senders(topology, pool(topology, -1, frozenset(parse_ranges(excluded))).cpus)


def _plan_xps(want: Wanted, have: Snapshot) -> list[Change]:
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
                changes.append(Change(XPS, target, f"tx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def _xps_readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each transmit queue's mask."""
    return queues.readings(want, have, XPS, want.spec.xps.enable)


def _read_by_queues(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    return {}


_PARTS: dict[str, Any] = {
    "AFTER": (queues.NAME,),
    "UNKNOWN_UNTIL": ("vfs", "bindings", "links", "vf_links", "channels"),
    "REACH": "function",
    "OTHER_WRITERS": ("tuned",),
    "observe": _read_by_queues,
}
KINDS = (
    Kind(
        NAME=queues.RPS,
        OFF="rps.enable: false",
        plan=_plan_rps,
        readings=_rps_readings,
        originals_of=_rps_originals,
        apply=partial(queues.write_mask, masks=queues.RPS),
        **_PARTS,
    ),
    Kind(
        NAME=XPS,
        OFF="xps.enable: false",
        plan=_plan_xps,
        readings=_xps_readings,
        apply=partial(queues.write_mask, masks=XPS),
        **_PARTS,
    ),
)
