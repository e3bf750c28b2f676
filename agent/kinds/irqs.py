"""Which CPU serves which queue's interrupt, over the whole node.

Judged by smp_affinity_list. It shows a move that waits for the next interrupt (x86 without interrupt remapping), which
effective_affinity_list shows only after that: an idle interrupt may lag for ever, and writing again would not help. A move that
fails then is dropped, and smp_affinity_list shows the old CPUs again (kernel/irq/migration.c, irq_move_masked_irq).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from attrs import define, evolve, field, frozen

from agent.hardware.functions import PCI, driver, pci_of
from agent.hardware.placement import Key, Pool, place, pool
from agent.hardware.sysfs import names_or_none, ranges, read_or
from agent.hardware.topology import Topology
from agent.kinds import Reading
from agent.machine import Files, Machine
from agent.report.records import HOST, Change
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted
from agent.vendors import vendor
from agent.vendors.passthrough import VENDOR as PASSTHROUGH

NAME = "irqs"
# Channels are what has interrupts, and a driver may request them anew for other rings.
AFTER = ("channels", "irqbalance", "rings")
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"

MANAGEMENT = "management"


@frozen
class Irq:
    """One requested interrupt of a function; ``role`` and ``queue`` name it, since its number does not last."""

    number: int
    role: str
    queue: int
    affinity: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the interrupt is called in changes: ``rx-0``, ``management-1``."""
        return f"{self.role}-{self.queue}"


# No file of the kernel's tells how many vectors a CPU has left; a refused write does. It is believed until the next boot: a CPU
# that is asked again now and then would take the node's readiness each time. Kept where `trackbed plan` finds it, too.
FULL = "/run/trackbed/full-cpus"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """Each PF's interrupts and its VFs', by target; those of a VF in a process's hands (vfio) are its own business.

    None if nothing is placed by them. Under HOST the CPUs that have no interrupt vector left, if any.
    """
    if not _places(want):
        return {}
    found: dict[str, Any] = {
        address: {target: _placeable(machine.files, pci) for target, pci in functions.items()}
        for address, functions in functions_in_scope(machine.files, want, scope).items()
    }
    if full := _full(machine.files):
        found[HOST] = full
    return found


def _places(want: Wanted) -> bool:
    """Whether anything goes by where interrupts are."""
    return want.spec.irqs.pin or want.spec.rps.enable or want.spec.xps.enable


def _full(files: Files) -> frozenset[int]:
    return frozenset(ranges(files, FULL))


def _placeable(files: Files, pci: str) -> tuple[Irq, ...]:
    return () if driver(files, pci) in PASSTHROUGH.drivers else function_irqs(files, pci)


def function_irqs(files: Files, pci: str) -> tuple[Irq, ...]:
    """The interrupts that a function's driver has requested, by number."""
    pattern = vendor(driver(files, pci)).queue_irqs
    management = 0
    found = []
    for number in sorted(map(int, names_or_none(files, f"{PCI}/{pci}/msi_irqs"))):
        action = read_or(files, f"/sys/kernel/irq/{number}/actions", "")
        affinity = ranges(files, f"/proc/irq/{number}/smp_affinity_list")
        if not action or not affinity:
            continue
        role, queue = _serves(pattern, action)
        if role == MANAGEMENT:
            queue = management
            management += 1
        found.append(Irq(number, role, queue, affinity))
    return tuple(found)


@lru_cache(maxsize=32768)
def _serves(pattern: re.Pattern[str], action: str) -> tuple[str, int]:
    """The role and queue of an interrupt by its name; the same in every pass, and there may be thousands."""
    match = pattern.search(action)
    return (match["role"].lower(), int(match["queue"])) if match else (MANAGEMENT, 0)


def _each(have: Snapshot) -> Iterator[tuple[str, str, Irq]]:
    for address in sorted(have[NAME].keys() - {HOST}):
        functions: Mapping[str, tuple[Irq, ...]] = have[NAME][address]
        for target, irqs in sorted(functions.items(), key=lambda item: _natural(item[0])):
            for irq in irqs:
                yield address, target, irq


def _natural(target: str) -> tuple[str, int]:
    address, _, index = target.partition("#")
    return address, int(index or -1)


def pools(want: Wanted, have: Snapshot) -> dict[str, Pool]:
    """The CPUs that may serve each wanted PF and its VFs, by the PF's address."""
    exclude = frozenset(parse_ranges(want.spec.irqs.exclude_cpus))
    return {address: pool(have.topology, nic.function.numa_node, exclude) for address, nic in want.nics.items()}


@define
class _Placed:
    """The last placement, and what it was made of: several kinds need it in each pass, and most passes find nothing new."""

    want: Wanted | None = None
    irqs: Mapping[str, Any] | None = None
    topology: Topology | None = None
    result: Mapping[Key, int] = field(factory=dict)


_placed = _Placed()


def placement(want: Wanted, have: Snapshot) -> Mapping[Key, int]:
    """The CPU of each queue, by target and queue; a queue's receive and transmit interrupts share it.

    The same object as before while spec, interrupts and CPUs are the same.
    """
    last = _placed
    new = (last.want, last.irqs, last.topology) != (want, have[NAME], have.topology)
    # Kept if they are equal, too: the next kind of this pass then asks about the same objects, which takes no comparing.
    last.want, last.irqs, last.topology = want, have[NAME], have.topology
    if new:
        last.result = _place(want, have)
    return last.result


def _place(want: Wanted, have: Snapshot) -> dict[Key, int]:
    local = pools(want, have)
    full: frozenset[int] = have[NAME].get(HOST, frozenset())
    roomy = {address: _without(pool, full) for address, pool in local.items()}
    keys: dict[Key, Pool] = {}
    previous: dict[Key, int] = {}
    affinities: dict[Key, set[tuple[int, ...]]] = {}
    for address, target, irq in _each(have):
        if irq.role != MANAGEMENT and address in local:
            key = (target, str(irq.queue))
            if len(irq.affinity) == 1:
                previous.setdefault(key, irq.affinity[0])
            affinities.setdefault(key, set()).add(irq.affinity)
            # Who has its vectors on a full CPU keeps them; a queue of which one found none there goes elsewhere, whole.
            stays = previous.get(key) in full and len(affinities[key]) == 1
            keys[key] = (local if stays else roomy)[address]
    return place(have.topology, keys, previous)


def _without(pool: Pool, full: frozenset[int]) -> Pool:
    """The pool's CPUs that take another interrupt; all of them if none does."""
    left = tuple(id for id in pool.cpus if id not in full)
    return evolve(pool, cpus=left) if left else pool


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Queues' interrupts to one CPU each; management ones to any CPU of the pool."""
    if not want.spec.irqs.pin:
        return []
    placed = placement(want, have)
    local = {address: tuple(sorted(pool.cpus)) for address, pool in pools(want, have).items()}
    changes = []
    for address, target, irq in _each(have):
        if address not in local:
            continue
        after = local[address] if irq.role == MANAGEMENT else (placed[target, str(irq.queue)],)
        if irq.affinity != after:
            changes.append(Change(NAME, target, irq.name, format_ranges(irq.affinity), format_ranges(after)))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each interrupt's affinity."""
    return [
        Reading(target, irq.name, format_ranges(irq.affinity), want.spec.irqs.pin)
        for address, target, irq in _each(have)
        if address in want.nics
    ]


def reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """One interrupt's affinity, where they are not observed; one that was and was not found is not sought again."""
    if _places(want) or kept.device not in want.nics:
        return None
    irqs = function_irqs(machine.files, pci_of(machine.files, kept.target))
    affinity = next((format_ranges(irq.affinity) for irq in irqs if irq.name == kept.field), None)
    return None if affinity is None else Reading(kept.target, kept.field, affinity, wanted=False)


def apply(machine: Machine, change: Change) -> None:
    """Write one interrupt's affinity, after finding its number again."""
    pci = pci_of(machine.files, change.target)
    numbers = [irq.number for irq in function_irqs(machine.files, pci) if irq.name == change.field]
    if not numbers:
        raise FileNotFoundError(errno.ENOENT, f"{change.target} has no interrupt {change.field} any more")
    try:
        machine.files.write(f"/proc/irq/{numbers[0]}/smp_affinity_list", str(change.after))
    except OSError as error:
        # EPERM (EIO before Linux 6.12): the kernel manages this interrupt's affinity itself.
        if error.errno in (errno.EPERM, errno.EIO):
            raise OSError(errno.EOPNOTSUPP, "the kernel manages this interrupt's affinity") from error
        if error.errno == errno.ENOSPC:
            said = f"ENOSPC: CPU {change.after} has no interrupt vector left; {_remember_full(machine.files, change)}"
            raise OSError(errno.ENOSPC, said) from error
        raise


def _remember_full(files: Files, change: Change) -> str:
    """Plan without this CPU from now on. :returns: what comes of it."""
    if len(asked := parse_ranges(str(change.after))) == 1:
        try:
            files.replace(FULL, format_ranges({*_full(files), *asked}))
        except OSError as error:
            return f"that cannot be kept ({FULL}: {error.strerror}), so it is tried again; make room there"
    return "another one is next"
