"""Receive packet steering: where a netdev has fewer queues than its CPUs, the others share the work."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from agent.change import Change
from agent.cpus import from_mask, mask, steering
from agent.kinds import Reading, functions_in_scope, irqs
from agent.machine import Machine, names_or_none, read_or
from agent.nics import Wanted, netdev, netdev_of
from agent.ranges import format_ranges, parse_ranges
from agent.snapshot import Scope, Snapshot

NAME = "rps"
AFTER = ("irqs",)
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"

QUEUES = "/sys/class/net/{name}/queues"


@frozen
class RxQueues:
    """The CPUs that each receive queue of a netdev is steered to, by the queue's number."""

    cpus: Mapping[int, frozenset[int]]


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, RxQueues]]:
    """The masks of each PF and its VFs, by target; a netdev in another namespace shows none."""
    return {
        address: {target: _queues(machine, netdev(machine.files, pci)) for target, pci in functions.items()}
        for address, functions in functions_in_scope(machine.files, want, scope).items()
    }


def _queues(machine: Machine, name: str | None) -> RxQueues:
    if name is None:
        return RxQueues({})
    folder = QUEUES.format(name=name)
    receive = [queue for queue in names_or_none(machine.files, folder) if queue.startswith("rx-")]
    return RxQueues({int(q[3:]): from_mask(read_or(machine.files, f"{folder}/{q}/rps_cpus", "0")) for q in receive})


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ from what the placement of the queues' interrupts asks for."""
    if not want.spec.rps.enable:
        return []
    placed = irqs.placement(want, have)
    local = irqs.pools(want, have)
    changes = []
    for address, netdevs in sorted(have[NAME].items()):
        for target, queues in netdevs.items():
            for queue, before in sorted(queues.cpus.items()):
                cpu = placed.get((target, str(queue)))
                if address not in local or cpu is None:
                    continue  # a netdev that is down has requested no interrupts
                after = steering(have.topology, local[address], len(queues.cpus), cpu)
                if before != after:
                    changes.append(Change(NAME, target, f"rx-{queue}", format_ranges(before), format_ranges(after)))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each receive queue's mask."""
    found: Mapping[str, Mapping[str, RxQueues]] = have[NAME]
    return [
        Reading(target, f"rx-{queue}", format_ranges(cpus), want.spec.rps.enable)
        for address, netdevs in sorted(found.items())
        if address in want.nics
        for target, queues in netdevs.items()
        for queue, cpus in sorted(queues.cpus.items())
    ]


def apply(machine: Machine, change: Change) -> None:
    """Write one queue's mask, after finding the netdev again."""
    name = netdev_of(machine.files, change.target)
    cpus = mask(parse_ranges(str(change.after)))
    machine.files.write(f"{QUEUES.format(name=name)}/{change.field}/rps_cpus", cpus)
