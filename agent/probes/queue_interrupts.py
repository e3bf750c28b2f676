"""Of each NIC that carries traffic, some interrupts are recognised as those of queues.

Where the kernel does not say which they are, their names do. If the agent does not know the form of a driver's names, all
interrupts of the NIC count as management interrupts, and no queue is pinned to one CPU.
"""

from collections.abc import Iterator

from agent.hardware.interrupts import COMPLETIONS, MANAGEMENT, Irq
from agent.kinds import irq_placement, irqs, links, vf_links
from agent.machine import Link
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault
from agent.report.target import device_of
from agent.spec.ranges import format_ranges
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "QueueInterrupts"

UNRECOGNISED = "NotRecognised"
MAC_LENGTH = len("00:00:00:00:00:00")
SHOWN = 3
"""How many names of interrupts the message has."""


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if none of a required NIC's interrupts is recognised. No condition if the spec does not pin interrupts."""
    if not want.spec.irqs.pin:
        return []
    every = list(_unrecognised(want, have))
    faults = [
        FunctionFault(target, UNRECOGNISED, f"no interrupt of {link.name} is a queue's") for target, link, _ in every
    ]
    unrecognised = [each for each in every if want.nics[device_of(each[0])].nic.required]
    if not unrecognised:
        known = _owned(want, have) or _placed_by_kernel(want, have)
        return [known or condition(TYPE, "Recognised", faults=faults)]
    _, link, requested = unrecognised[0]
    names = list(dict.fromkeys(irq.action for irq in requested))
    more = ", ..." if len(names) > SHOWN else ""
    others = (
        f"; the same holds for {', '.join(other.name for _, other, _ in unrecognised[1:])}" if unrecognised[1:] else ""
    )
    message = (
        f"{link.name} has carrier and {len(requested)} interrupts, and none is recognised as a queue's, so none is pinned"
        f" ({', '.join(names[:SHOWN])}{more}){others}"
    )
    return [condition(TYPE, UNRECOGNISED, message, faults=faults)]


def _owned(want: Wanted, have: Snapshot) -> Condition | None:
    """The NICs all of whose CPUs have an owner, or why owners are unknown; None if there is nothing to say."""
    owners = have.topology.owners
    if owners.fault:
        return condition(TYPE, "OwnersUnknown", owners.fault)
    told = []
    for address, pool in irq_placement.pools(want, have).items():
        names = list(dict.fromkeys(owners.of.get(cpu, "") for cpu in sorted(pool)))
        if "" not in names:
            more = ", ..." if len(names) > SHOWN else ""
            told.append(f"{address} (CPUs {format_ranges(pool)}: {', '.join(names[:SHOWN])}{more})")
    if not told:
        return None
    message = (
        f"interrupts stay on CPUs that belong to somebody, since each that may serve the NIC does: {', '.join(told)}"
    )
    return condition(TYPE, "CpusOwned", message)


def _placed_by_kernel(want: Wanted, have: Snapshot) -> Condition | None:
    """Which interrupts nobody can pin, since their driver asked the kernel to place them; None if there are none."""
    kept = irq_placement.kept_of(have)
    managed = {
        target: len(names)
        for address in sorted(want.nics)
        for target, requested in have[irqs.NAME].get(address, {}).items()
        if (names := [irq.name for irq in requested if kept.is_managed(target, irq)])
    }
    if not managed:
        return None
    named = [f"{count} of {target}" for target, count in managed.items()]
    more = f" and of {len(named) - SHOWN} others" if len(named) > SHOWN else ""
    message = f"the kernel places these interrupts, as their driver asks: {', '.join(named[:SHOWN])}{more}"
    return condition(TYPE, "PlacedByKernel", message)


def _unrecognised(want: Wanted, have: Snapshot) -> Iterator[tuple[str, Link, tuple[Irq, ...]]]:
    """The target, netdev and interrupts of each that carries traffic, and none of whose interrupts is a queue's.

    A single interrupt serves everything, so it need not be named after a queue. An InfiniBand function's netdev (ib_ipoib, with
    an address of 20 octets) may use none of the function's completion vectors.
    """
    for address in sorted(want.nics):
        netdevs = {**have[links.NAME].get(address, {}), **have[vf_links.NAME].get(address, {})}
        for target, requested in have[irqs.NAME].get(address, {}).items():
            link: Link | None = netdevs[target].link if target in netdevs else None
            of_netdev = tuple(irq for irq in requested if irq.role not in COMPLETIONS)
            if link is None or not link.carrier or len(link.mac) != MAC_LENGTH or len(of_netdev) < 2:
                continue
            if all(irq.role == MANAGEMENT for irq in of_netdev):
                yield target, link, of_netdev


PROBES = (Probe(name="queue_interrupts", type=TYPE, stage="device", judge=judge, severity="warn"),)
