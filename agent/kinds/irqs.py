"""The CPU that serves each queue's interrupt, placed over the whole node.

smp_affinity_list is compared, not effective_affinity_list. On x86 without interrupt remapping a move takes effect at the next
interrupt, and effective_affinity_list shows the old CPU until then: for an idle interrupt, for ever. If the move fails at that
time, smp_affinity_list shows the old CPUs again (kernel/irq/migration.c, irq_move_masked_irq).
"""

from __future__ import annotations

import errno
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from attrs import evolve, field, frozen

from agent.documents import load
from agent.hardware.functions import PCI, driver, pci_of
from agent.hardware.placement import Key, Pool, place, pool
from agent.hardware.sysfs import names_or_none, numbered, ranges, read_or, whole
from agent.hardware.topology import Topology
from agent.kinds import Reading
from agent.machine import Files, Machine
from agent.report.names import RUN_FOLDER
from agent.report.records import HOST, Change
from agent.report.target import device_of, is_vf, vf_index
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted
from agent.vendors import vendor
from agent.vendors.passthrough import VENDOR as PASSTHROUGH

NAME = "irqs"
# Interrupts belong to channels, and a driver may request them again when its rings change.
AFTER = ("channels", "irqbalance", "rings")
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
REACH = "function"
OTHER_WRITERS = ("irqbalance", "tuned")
OFF = "irqs.pin: false"

MANAGEMENT = "management"
# The role of a queue's interrupt whose name has none.
QUEUE = "queue"


@frozen
class Irq:
    """One requested interrupt of a function. ``role`` and ``queue`` identify it, since its number may change.

    ``action``: what the driver calls it; read only of management interrupts.
    """

    number: int
    role: str
    queue: int
    affinity: tuple[int, ...]
    action: str = ""

    @property
    def name(self) -> str:
        """What the interrupt is called in changes: ``rx-0``, ``management-1``."""
        return f"{self.role}-{self.queue}"


# The file with the CPUs that have no free interrupt vector, so that `trackbed plan` knows them, too. The kernel shows this only
# by refusing a write (ENOSPC). A CPU counts as full until the next boot: each new try would make the node unready for a moment.
FULL = f"{RUN_FOLDER}/full-cpus"

# The file with the CPU that each queue had when the node last matched the spec: JSON, by target and queue. Without it a queue
# that irqbalance moved could stay there, since that placement may have the same loads.
PLACED = f"{RUN_FOLDER}/placement.json"
LARGEST = 4 << 20
"""Bytes of it. That of 4,096 VFs with 64 queues each has three million."""


@frozen
class Kept:
    """The content of :data:`FULL` and :data:`PLACED`: facts about this boot's interrupts that the kernel does not report."""

    full: frozenset[int] = frozenset()
    placed: Mapping[Key, int] = field(factory=dict)


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """The interrupts of each PF and its VFs, by target; none for a function that is passed through (vfio).

    Empty if the spec uses no interrupt placement. Under HOST: what is kept of this boot, if anything is.
    """
    if not _places(want):
        return {}
    irqs: dict[str, Any] = {
        address: {target: _placeable(machine.files, pci) for target, pci in functions.items()}
        for address, functions in functions_in_scope(machine.files, want, scope).items()
    }
    kept = Kept(_full(machine.files), _parsed(read_or(machine.files, PLACED, "")))
    return {**irqs, HOST: kept} if kept != Kept() else irqs


def remember(machine: Machine, want: Wanted, have: Snapshot) -> None:
    """Record the present placement, to which later ones return. Queues of a device that is absent keep their entry.

    :raises OSError: it cannot be written; then the placement before is kept.
    """
    before = _kept(have).placed
    placed = {**before, **placement(want, have)}
    if want.spec.irqs.pin and placed != before:
        queues: dict[str, dict[str, int]] = {}
        for (target, queue), cpu in sorted(placed.items()):
            queues.setdefault(target, {})[queue] = cpu
        machine.files.replace(PLACED, json.dumps(queues))


@lru_cache(maxsize=1)
def _parsed(text: str) -> Mapping[Key, int]:
    """The placement in :data:`PLACED`; empty if it is damaged. Cached: every pass reads the same."""
    try:
        placed = [(target, *each) for target, queues in load(text, LARGEST).items() for each in queues.items()]
    except (ValueError, AttributeError):
        return {}
    return {(target, queue): cpu for target, queue, cpu in placed if isinstance(cpu, int)}


def _kept(have: Snapshot) -> Kept:
    kept: Kept = have[NAME].get(HOST, Kept())
    return kept


def _places(want: Wanted) -> bool:
    """Whether the spec asks for anything that depends on where interrupts are."""
    return want.spec.irqs.pin or want.spec.rps.enable or want.spec.xps.enable


def _full(files: Files) -> frozenset[int]:
    try:
        return frozenset(ranges(files, FULL))
    except OSError:
        return frozenset()  # it is damaged: a CPU that is full is found again


def _placeable(files: Files, pci: str) -> tuple[Irq, ...]:
    return () if vendor(driver(files, pci)) is PASSTHROUGH else function_irqs(files, pci)


def function_irqs(files: Files, pci: str) -> tuple[Irq, ...]:
    """The interrupts that a function's driver has requested, by number."""
    family = vendor(driver(files, pci))
    requested = []
    for number in numbered(names_or_none(files, f"{PCI}/{pci}/msi_irqs")):
        action = read_or(files, f"/sys/kernel/irq/{number}/actions", "")
        affinity = ranges(files, f"/proc/irq/{number}/smp_affinity_list")
        if action and affinity:
            requested.append((number, action, _named(family.queue_irqs, action), affinity))
    named = sum(name is not None for _, _, name, _ in requested)
    management = 0
    irqs = []
    queues = set()
    of_role: Counter[str] = Counter()
    for number, action, name, affinity in requested:
        role, queue = MANAGEMENT, management
        if name:
            said, index = name
            served = family.queue(said, of_role[said] if index is None else index, named)
            role, queue = served or (MANAGEMENT, management)
            of_role[said] += 1
        # A second interrupt with the name of a queue is the driver's own.
        if role == MANAGEMENT or (role, queue) in queues:
            role, queue = MANAGEMENT, management
            management += 1
        queues.add((role, queue))
        irqs.append(Irq(number, role, queue, affinity, action if role == MANAGEMENT else ""))
    return tuple(irqs)


@lru_cache(maxsize=32768)
def _named(pattern: re.Pattern[str], action: str) -> tuple[str, int | None] | None:
    """The role and number in the name of a queue's interrupt. The number is None if the name has none.

    Cached: there may be thousands, the same in every pass.
    """
    match = pattern.search(action)
    if match is None:
        return None
    role = (match["role"] or QUEUE).lower()
    text = match.groupdict().get("queue")
    if text is None:
        return role, None
    number = whole(text)
    return None if number is None else (role, number)


def _each(have: Snapshot) -> Iterator[tuple[str, str, Irq]]:
    for address in sorted(have[NAME].keys() - {HOST}):
        functions: Mapping[str, tuple[Irq, ...]] = have[NAME][address]
        for target, irqs in sorted(functions.items(), key=lambda item: _natural(item[0])):
            for irq in irqs:
                yield address, target, irq


def _natural(target: str) -> tuple[str, int]:
    return device_of(target), vf_index(target) if is_vf(target) else -1


def pools(want: Wanted, have: Snapshot) -> dict[str, Pool]:
    """The CPUs that may serve each wanted PF and its VFs, by the PF's address."""
    nodes = {address: nic.function.numa_node for address, nic in want.nics.items()}
    excluded = want.spec.irqs.exclude_cpus
    return have.memo.get(
        "pools",
        (nodes, excluded, have.topology),
        lambda: _pools(nodes, frozenset(parse_ranges(excluded)), have.topology),
    )


def _pools(nodes: Mapping[str, int], excluded: frozenset[int], topology: Topology) -> dict[str, Pool]:
    return {address: pool(topology, node, excluded) for address, node in nodes.items()}


def placement(want: Wanted, have: Snapshot) -> Mapping[Key, int]:
    """The CPU of each queue, by target and queue; a queue's receive and transmit interrupts share it.

    Several kinds need it in each pass, and in most passes interrupts and CPUs are those of the pass before: it is the same
    object then.
    """
    local = pools(want, have)
    return have.memo.get("placement", (local, have[NAME], have.topology), lambda: _place(local, have))


def _place(local: Mapping[str, Pool], have: Snapshot) -> dict[Key, int]:
    kept = _kept(have)
    full = kept.full
    roomy = {address: _without(pool, full) for address, pool in local.items()}
    keys: dict[Key, Pool] = {}
    previous: dict[Key, int] = {}
    affinities: dict[Key, set[tuple[int, ...]]] = {}
    for address, target, irq in _each(have):
        if irq.role != MANAGEMENT and address in local:
            key = (target, str(irq.queue))
            affinities.setdefault(key, set()).add(irq.affinity)
            # A queue already on a full CPU stays there. If one of its interrupts gets no vector, the whole queue moves.
            stays = len(affinities[key]) == 1 and len(irq.affinity) == 1 and irq.affinity[0] in full
            # Another interrupt's present CPU does not count: it depends on irqbalance, and on the order in which devices
            # appeared, so each boot would have another placement.
            if stays:
                previous[key] = irq.affinity[0]
            keys[key] = (local if stays else roomy)[address]
    # A netdev that is down, as while a pod starts, has no interrupts. Its queues keep their CPUs, so that no other queue moves.
    down = {
        target: address
        for address in have[NAME].keys() & roomy.keys()
        for target, irqs in have[NAME][address].items()
        if not irqs
    }
    every = {key: roomy[down[key[0]]] for key in kept.placed if key[0] in down} | keys
    placed = {key: cpu for key, cpu in kept.placed.items() if key in every and cpu in every[key].cpus}
    result = place(have.topology, every, previous | placed)
    return {key: cpu for key, cpu in result.items() if key in keys}


def _without(pool: Pool, full: frozenset[int]) -> Pool:
    """The pool's CPUs that have a free vector; all of them if none has."""
    left = tuple(id for id in pool.cpus if id not in full)
    return evolve(pool, cpus=left) if left else pool


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Each queue's interrupts go to one CPU, management interrupts to all CPUs of the pool."""
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
    """One interrupt's affinity, if :func:`observe` reads none. If it does, an interrupt that it has not found is gone."""
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
            message = (
                f"ENOSPC: CPU {change.after} has no interrupt vector left; {_remember_full(machine.files, change)}"
            )
            raise OSError(errno.ENOSPC, message) from error
        raise


def _remember_full(files: Files, change: Change) -> str:
    """Leave this CPU out of placements until the next boot. :returns: what happens next, for the message."""
    if len(asked := parse_ranges(str(change.after))) == 1:
        try:
            files.replace(FULL, format_ranges({*_full(files), *asked}))
        except OSError as error:
            return f"{FULL} cannot be written ({error.strerror}), so the same CPU is tried again; make room in /run"
    return "another CPU is tried next"
