"""Receive packet steering (RPS): if a netdev has fewer queues than CPUs, the other CPUs share the work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from attrs import evolve

from agent.hardware.functions import netdev, pci_of
from agent.hardware.placement import steering
from agent.kinds import Reading, irqs, queues, rps_netdevs, vf_links
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.spec.ranges import format_ranges
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME: Final = queues.RPS
AFTER = ("queues",)
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"
OTHER_WRITERS = ("tuned",)
OFF = "rps.enable: false"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """Nothing: :mod:`agent.kinds.queues` reads the masks."""
    return {}


def plan(want: Wanted, have: Snapshot) -> list[Change]:
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
                changes.append(Change(NAME, target, f"rx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each receive queue's mask, without those that ``rps.netdevs`` sets since the NIC has left the spec."""
    masks = queues.readings(want, have, NAME, want.spec.rps.enable)
    others = rps_netdevs.indexes(want, have)
    return [mask for mask in masks if vf_links.index(have, mask.target) not in others] if others else masks


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The queue's mask; under the netdev's name if it was noted under that before (``rps.netdevs``)."""
    name = netdev(machine.files, pci_of(machine.files, change.target))
    by_name = rps_netdevs.NAME, HOST, f"{name}/{change.field}"
    return [evolve(change, kind=by_name[0], target=HOST, field=by_name[2]) if by_name in known else change]


def apply(machine: Machine, change: Change) -> None:
    """Write one queue's mask, after finding the netdev again."""
    queues.write_mask(machine, change, NAME)
