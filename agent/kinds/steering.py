"""Packet steering on the spec's own NICs: RPS and RFS of receive queues, and XPS of transmit queues.

Receive packet steering: if a netdev has fewer queues than CPUs, the other CPUs share the work. Transmit packet steering: each
CPU sends through the queue of a netdev whose interrupt is nearest. :mod:`agent.kinds.queues` reads and writes the masks.

Receive flow steering: a packet goes to the CPU where the application last read from its flow. There is one table for the node
(net.core.rps_sock_flow_entries) and one for each receive queue (rps_flow_cnt). Writing a table's size empties it, even if the
size stays the same, so a size is written only when it differs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

from attrs import evolve

from agent.hardware.functions import netdev, pci_of
from agent.hardware.placement import Key, Senders, pool, steering, without
from agent.hardware.sysfs import number_or
from agent.hardware.topology import Topology
from agent.kinds import Kind, Reading, irq_placement, queues, rps_netdevs, vf_links
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

XPS: Final = "xps"
RFS = "rfs"
ENTRIES = "net.core.rps_sock_flow_entries"
NOWHERE = frozenset[int]()


def _plan_rps(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ from those that follow from the placement of the queues' interrupts."""
    if not want.spec.rps.enable:
        return []
    placement = irq_placement.placement(want, have)
    placed = placement.cpus
    local = irq_placement.pools(want, have)
    changes = []
    # By PF, number of queues, and CPU of the interrupt: netdevs of one PF mostly have the same masks.
    masks: dict[tuple[str, int, int], frozenset[int]] = have.memo.get("rps masks", (placed, local, have.topology), dict)
    for address, target, observed in queues.each(have):
        if address not in local:
            continue
        served = _served(placed, target, observed.rps)  # none while the netdev is down
        for queue, cpu in served.items():
            before, question = observed.rps[queue], (address, len(served), cpu)
            # With interrupts on the CPUs of a pod, no other CPU processes its packets.
            if (after := NOWHERE if target in placement.of_pods else masks.get(question)) is None:
                after = masks[question] = steering(have.topology, local[address], len(served), cpu)
            if before != after:
                values = format_ranges(before), format_ranges(after)
                changes.append(Change(queues.RPS, target, f"rx-{queue}", *values, required=placement.settled(target)))
    return changes


def _served(placed: Mapping[Key, int], target: str, numbers: Iterable[int]) -> dict[int, int]:
    """The queues of a netdev that interrupts serve, and the CPU of each."""
    return {queue: cpu for queue in numbers if (cpu := placed.get((target, str(queue)))) is not None}


def _rps_reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """A receive queue's mask; None if ``rps.netdevs`` sets it since the NIC has left the spec."""
    if rps_netdevs.steers(want, have, vf_links.index(have, kept.target)):
        return None
    return queues.reading(machine, want, have, kept, queues.RPS, want.spec.rps.enable)


def _rps_originals(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The queue's mask; under the netdev's name if it was noted under that before (``rps.netdevs``)."""
    name = netdev(machine.files, pci_of(machine.files, change.target))
    by_name = rps_netdevs.NAME, HOST, f"{name}/{change.field}"
    return [evolve(change, kind=by_name[0], target=HOST, field=by_name[2]) if by_name in known else change]


def _senders(topology: Topology, excluded: str) -> Senders:
    usable = pool(topology, -1, frozenset(parse_ranges(excluded)))
    return Senders(topology, without(usable, topology.owners.of))


def _plan_xps(want: Wanted, have: Snapshot) -> list[Change]:
    """The masks that differ, of netdevs with several transmit queues. Queues without an interrupt are left alone."""
    if not want.spec.xps.enable:
        return []
    placement = irq_placement.placement(want, have)
    placed = placement.cpus
    excluded = want.spec.irqs.exclude_cpus
    senders = have.memo.get("senders", (placed, have.topology, excluded), lambda: _senders(have.topology, excluded))
    changes = []
    for address, target, observed in queues.each(have):
        if address not in want.nics:
            continue
        served = _served(placed, target, observed.xps)
        own = placement.of_pods.get(target)
        sending = Senders(have.topology, own) if own else senders
        for queue, after in sending.transmitting(served).items() if served else ():
            before = observed.xps[queue]
            if before != after:
                values = format_ranges(before), format_ranges(after)
                changes.append(Change(XPS, target, f"tx-{queue}", *values, required=placement.settled(target)))
    return changes


def _observe_rfs(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, int]:
    """The size of the node's table; :mod:`agent.kinds.queues` reads those of the queues' tables."""
    return {HOST: _entries(machine)} if host_in_scope(scope) else {}


def _entries(machine: Machine) -> int:
    return number_or(machine.files, queues.ENTRIES, 0)


def _plan_rfs(want: Wanted, have: Snapshot) -> list[Change]:
    """The tables whose size differs. The node's entries are divided evenly among the queues of each netdev that receive."""
    wanted = want.spec.rfs
    entries: int | None = have[RFS].get(HOST)
    if not wanted.enable or entries is None:
        return []
    if have.topology.isolated and not wanted.isolated:
        isolated = format_ranges(have.topology.isolated)
        blocker = f"RFS steers packets to the CPUs where applications run, and CPUs {isolated} are isolated"
        remedy = "set rfs.isolated: true, or rfs.enable: false"
        return [Change(RFS, HOST, ENTRIES, entries, wanted.entries, blocker=blocker, remedy=remedy)]
    changes = []
    if entries != wanted.entries:
        changes.append(Change(RFS, HOST, ENTRIES, entries, wanted.entries))
    placed = irq_placement.placement(want, have).cpus
    for address, target, observed in queues.each(have):
        served = _served(placed, target, observed.flows) or observed.flows
        share = _rounded(wanted.entries // max(1, len(served)))
        changes += [
            Change(RFS, target, f"rx-{queue}", observed.flows[queue], share)
            for queue in sorted(served)
            if observed.flows[queue] != share and address in want.nics
        ]
    return changes


def _rounded(flows: int) -> int:
    """Rounded up to a power of two, as store_rps_dev_flow_table_cnt() does."""
    return 1 << max(0, flows - 1).bit_length()


def _rfs_reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    if kept.target == HOST:
        return Reading(_entries(machine), want.spec.rfs.enable)
    return queues.reading(machine, want, have, kept, "flows", want.spec.rfs.enable)


def _write_rfs(machine: Machine, change: Change) -> None:
    if change.target == HOST:
        machine.files.write(queues.ENTRIES, str(change.after))
    else:
        queues.write(machine, change, "flows")


_PARTS: dict[str, Any] = {
    "AFTER": (queues.NAME,),
    "UNKNOWN_UNTIL": ("vfs", "bindings", "links", "vf_links", "channels"),
    "OTHER_WRITERS": ("tuned",),
    "observe": lambda machine, want, scope: {},  # agent.kinds.queues reads them
}
KINDS = (
    Kind(
        NAME=queues.RPS,
        OFF="rps.enable: false",
        plan=_plan_rps,
        reading=_rps_reading,
        originals_of=_rps_originals,
        apply=partial(queues.write, table=queues.RPS),
        **_PARTS,
    ),
    Kind(
        NAME=XPS,
        OFF="xps.enable: false",
        plan=_plan_xps,
        reading=lambda machine, want, have, kept: queues.reading(machine, want, have, kept, XPS, want.spec.xps.enable),
        apply=partial(queues.write, table=XPS),
        **_PARTS,
    ),
    Kind(
        NAME=RFS,
        OFF="rfs.enable: false",
        plan=_plan_rfs,
        reading=_rfs_reading,
        apply=_write_rfs,
        **_PARTS | {"AFTER": (queues.NAME, queues.RPS), "REACH": "device", "observe": _observe_rfs},
    ),
)
