"""Each NAPI instance's thread (``napi.threaded``) runs on the CPU of its queue's interrupt, which wakes the thread.

Documentation/networking/napi.rst recommends it. The kernel names threads and interrupts of instances since Linux 6.8.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import suppress

from attrs import frozen

from agent.hardware.functions import pci_of
from agent.hardware.interrupts import MANAGEMENT
from agent.hardware.sysfs import whole
from agent.kinds import Reading, irq_placement, irqs
from agent.kinds.ethtool import given
from agent.kinds.napi import INSTANCES, SWITCH, instances_of
from agent.machine import Machine
from agent.report.records import Change
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "napi_threads"
AFTER = (INSTANCES.name, irqs.NAME)
UNKNOWN_UNTIL = (*irqs.UNKNOWN_UNTIL, INSTANCES.name)
OTHER_WRITERS = ("tuned",)
OFF = irqs.OFF

FIELD = "thread-"
"""The name of a thread in a change ends with its instance's place in the netdev: numbers of processes and instances change."""


@frozen
class Thread:
    """``irq``: the interrupt of its instance; 0 if the driver does not tell it."""

    pid: int
    irq: int
    cpus: tuple[int, ...]


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Mapping[int, Thread]]]:
    """The threads of each function whose instances shall have some, by target and place; none if it is away."""
    asked = {address: _asked(want, address) for address in want.nics} if want.spec.irqs.pin else {}
    # Most specs ask for none: for them not even the functions are listed.
    functions = functions_in_scope(machine.files, want, scope) if any(asked.values()) else {}
    return {
        address: {target: _threads(machine, pci) for target, pci in of_pf.items() if target in asked[address]}
        for address, of_pf in functions.items()
    }


def _asked(want: Wanted, address: str) -> frozenset[str]:
    """The functions of a PF whose instances shall have threads."""
    return frozenset(target for target, asked in given("napi")(want.nics[address]).items() if asked.get(SWITCH))


def _threads(machine: Machine, pci: str) -> Mapping[int, Thread]:
    _, instances = instances_of(machine, pci) or ("", {})
    threads = {}
    for place, (_, has) in enumerate(sorted(instances.items())):
        if pid := has.get("pid"):
            with suppress(ProcessLookupError):  # it has ended
                threads[place] = Thread(pid, has.get("irq", 0), machine.processes.affinity(pid))
    return threads


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The threads that are not on the CPU of their interrupt; if that is unknown, on the CPUs that may serve the NIC."""
    return list(_plan(want, have)) if want.spec.irqs.pin else []


def _plan(want: Wanted, have: Snapshot) -> Iterator[Change]:
    placement, pools, owned = (
        irq_placement.placement(want, have),
        irq_placement.pools(want, have),
        have.topology.owners.of,
    )
    placed = placement.cpus
    for address in sorted(have[NAME].keys() & pools.keys()):
        for target, threads in have[NAME][address].items():
            any_cpu = tuple(sorted(irq_placement.any_cpu(placement, pools[address], target, owned)))
            of_queues = (irq for irq in have[irqs.NAME].get(address, {}).get(target, ()) if irq.role != MANAGEMENT)
            cpus = {irq.number: (placed[target, str(irq.queue)],) for irq in of_queues}
            for place, thread in threads.items():
                after = cpus.get(thread.irq, any_cpu)
                if thread.cpus != after:
                    values = format_ranges(thread.cpus), format_ranges(after)
                    yield Change(NAME, target, f"{FIELD}{place}", *values, required=placement.settled(target))


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """One thread's CPUs. A thread that has ended reads as it was before, so that its original is forgotten."""
    wanted = kept.device in want.nics and want.spec.irqs.pin and kept.target in _asked(want, kept.device)
    thread = _thread(machine, kept)
    return Reading(kept.before if thread is None else format_ranges(thread.cpus), wanted)


def _thread(machine: Machine, change: Change) -> Thread | None:
    return _threads(machine, pci_of(machine.files, change.target)).get(whole(change.field.removeprefix(FIELD)) or 0)


def apply(machine: Machine, change: Change) -> None:
    """Have one thread run on these CPUs only, after finding it again."""
    if (thread := _thread(machine, change)) is None:
        raise FileNotFoundError(errno.ENOENT, f"{change.target} has no {change.field} any more")
    machine.processes.set_affinity(thread.pid, parse_ranges(str(change.after)))
