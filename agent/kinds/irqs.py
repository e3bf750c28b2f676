"""The CPU that serves each queue's interrupt, placed over the whole node.

smp_affinity_list is compared, not effective_affinity_list. On x86 without interrupt remapping a move takes effect at the next
interrupt, and effective_affinity_list shows the old CPU until then: for an idle interrupt, for ever. If the move fails at that
time, smp_affinity_list shows the old CPUs again (kernel/irq/migration.c, irq_move_masked_irq).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from attrs import evolve

from agent.documents import load
from agent.driver_families import is_passed_through
from agent.hardware.functions import driver, is_away, pci_of
from agent.hardware.interrupts import MANAGEMENT, Irq, function_irqs, hint
from agent.hardware.load import Load
from agent.hardware.placement import Key
from agent.hardware.sysfs import ranges, read_or
from agent.kinds import Reading
from agent.kinds.irq_placement import (
    IRQS,
    NOTHING_KEPT,
    Kept,
    Placement,
    any_cpu,
    each,
    has_vectors,
    kept_of,
    line_of,
    placement,
    pools,
)
from agent.machine import Files, Machine
from agent.report.names import RUN_FOLDER
from agent.report.records import HOST, Change
from agent.report.target import device_of
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = IRQS
# Interrupts belong to channels, and a driver may request them again when its rings change.
AFTER = ("channels", "irqbalance", "rings")
UNKNOWN_UNTIL = ("vfs", "bindings", "links", "vf_links", "channels")
OTHER_WRITERS = ("irqbalance", "tuned", "crio")
OFF = "irqs.pin: false"

FOLLOWING = frozenset({NAME, "napi_threads", "rps", "rps_netdevs", "xps"})
"""The kinds whose values follow from :func:`followed`."""

# The file with the CPUs that have no free interrupt vector, so that `trackbed plan` knows them, too. The kernel shows this only
# by refusing a write (ENOSPC). A CPU counts as full until it goes offline, when its interrupts go elsewhere, or until the next
# boot: each new try would make the node unready for a moment.
FULL = f"{RUN_FOLDER}/full-cpus"

# The file with the CPU that each queue had when the node last matched the spec: JSON, by target and queue. Without it a queue
# that irqbalance moved could stay there, since that placement may have the same loads.
PLACED = f"{RUN_FOLDER}/placement.json"
LARGEST = 4 << 20
"""Bytes of it. That of 4,096 VFs with 64 queues each has three million."""


# The file with the interrupts that the kernel places itself: in each line the target, the number and the name of one. Before
# Linux 6.12 the kernel shows this only by refusing a write, and each new try would make the node unready for a moment, too.
MANAGED = f"{RUN_FOLDER}/managed-irqs"


TOO_MANY = "ask for fewer VFs or channels, or leave fewer CPUs out (irqs.exclude_cpus)"
"""What to do if no CPU of a pool has a free vector."""


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """The interrupts of each PF and its VFs, by target; none for a function that is passed through (vfio).

    Empty if the spec uses no interrupt placement. Under HOST: what is kept of this boot, if anything is.
    """
    if not _places(want):
        return {}
    functions = functions_in_scope(machine.files, want, scope)
    irqs: dict[str, Any] = {
        address: {
            target: () if is_passed_through(driver(machine.files, pci)) else function_irqs(machine, pci)
            for target, pci in of_pf.items()
        }
        for address, of_pf in functions.items()
    }
    for target, cpus in _of_pods(machine, want, functions).items():
        of_pf = irqs[device_of(target)]
        # If the kubelet does not say who has the VF, its interrupts stay where they are.
        there = frozenset(cpu for irq in of_pf[target] for cpu in irq.affinity) if cpus is None else cpus
        of_pf[target] = tuple(evolve(irq, of_pod=there) for irq in of_pf[target])
    files = machine.files
    kept = Kept(_full(files), _managed(files), _parsed(read_or(files, PLACED, "")))
    return {**irqs, HOST: kept} if kept != NOTHING_KEPT else irqs


def _of_pods(
    machine: Machine, want: Wanted, functions: Mapping[str, Mapping[str, str]]
) -> dict[str, frozenset[int] | None]:
    """By target, for each VF with ``irqs_on_pod_cpus``: the CPUs that its pod has for itself; None: the kubelet does not say.

    The kubelet tells both in one answer, which device and which CPUs a pod has, before the VF's netdev goes to the pod. An
    annotation of the pod would need the API server, and a process of the pod in the netdev's namespace starts only later. A
    kubelet that is stopped or has just started knows of no devices at all.
    """
    asked = {address: want.nics[address].vf_settings("irqs_on_pod_cpus") for address in functions}
    away = {
        target: pci
        for address, of_pf in functions.items()
        for target, pci in of_pf.items()
        if asked[address].get(target) and is_away(machine.files, pci)
    }
    if not away:
        return {}
    try:
        known = machine.kubelet.cpus()
    except OSError:
        known = {}
    return {target: known.get(pci, frozenset()) if known else None for target, pci in away.items()}


def remember(machine: Machine, want: Wanted, have: Snapshot) -> None:
    """Record the present placement, to which later ones return. Queues of a device that is absent keep their entry.

    :raises OSError: it cannot be written; then the placement before is kept.
    """
    before, full = kept_of(have).placed, kept_of(have).full
    if not full <= have.topology.cpus.keys():
        machine.files.replace(FULL, format_ranges(full & have.topology.cpus.keys()))
    now = placement(want, have)
    # The moves that are made stand in the load: those that are left failed.
    placed = {**before, **now.homes, **{key: move.was for key, move in now.moves.items()}}
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


def followed(want: Wanted, have: Snapshot) -> object:
    """What pods and the load change at any time: the owner of each CPU, the CPUs of a pod that serve its VF's interrupts, and
    the queues that have moved."""
    return have.topology.owners, placement(want, have).of_pods, have.load.moves


def with_moves(want: Wanted, have: Snapshot) -> Load:
    """The load, with the moves that this pass has made."""
    made = dict(placement(want, have).moves) if want.spec.irqs.follow_load else {}
    for _, target, irq in each(have) if made else ():
        key = (target, str(irq.queue))
        if irq.role != MANAGEMENT and key in made and irq.affinity != (made[key].cpu,):
            del made[key]
    return evolve(have.load, moves={**have.load.moves, **made}) if made else have.load


def _places(want: Wanted) -> bool:
    """Whether the spec asks for anything that depends on where interrupts are."""
    return want.spec.irqs.pin or want.spec.rps.enable or want.spec.xps.enable


def _full(files: Files) -> frozenset[int]:
    try:
        return frozenset(ranges(files, FULL))
    except OSError:
        return frozenset()  # it is damaged: a CPU that is full is found again


def _managed(files: Files) -> frozenset[str]:
    return frozenset(read_or(files, MANAGED, "").splitlines())


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Each queue's interrupts go to one CPU, management interrupts to all CPUs of the pool.

    If no CPU of the pool has a free vector, a queue's interrupts may go to all of them, too. The kernel leaves an interrupt
    that one of them serves where it is, and moves another one to any of them as soon as it has a vector
    (assign_vector_locked, arch/x86/kernel/apic/vector.c).
    """
    if not want.spec.irqs.pin:
        return []
    placed, kept, owned = placement(want, have), kept_of(have), have.topology.owners.of
    local = pools(want, have)
    changes = []
    for address, target, irq in each(have):
        if address not in local or kept.is_managed(target, irq):
            continue
        key = (target, str(irq.queue))
        pool = placed.pools[key] if irq.role != MANAGEMENT else any_cpu(placed, local[address], target, owned)
        one = irq.role != MANAGEMENT and has_vectors(pool, kept.full)
        after = (placed.cpus[key],) if one else tuple(sorted(pool))
        if irq.affinity != after:
            before, note = format_ranges(irq.affinity), _note(key, placed, have) if one else ""
            required = not one or key not in placed.moves
            changes.append(Change(NAME, target, irq.name, before, format_ranges(after), required=required, note=note))
    return changes


def _note(key: Key, now: Placement, have: Snapshot) -> str:
    """Why a queue leaves the CPU that it had in the last verified pass; empty if it does not, or if the spec is the reason."""
    placed, online, home = kept_of(have).placed, have.topology.cpus, now.homes[key]
    goes_to, owners = now.cpus[key], have.topology.owners.of
    if key in now.moves:
        return f"CPU {now.moves[key].was} is busy with packets"
    if key[0] in now.of_pods:
        return f"CPU {goes_to} belongs to {owners[goes_to]}, which has the VF"
    if home != goes_to:
        return f"CPU {home} belongs to {owners[home]}"
    was = placed.get(key)
    if was in (None, home):
        return ""
    if was not in online:
        return f"CPU {was} went offline"
    if was not in now.pools[key]:
        return ""
    offline = {cpu for queue in now.cpus if (cpu := placed.get(queue)) is not None and cpu not in online}
    if offline:
        return f"it makes room, since CPU {format_ranges(offline)} went offline"
    return "placed again, since CPUs or queues have come or gone"


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """One interrupt's affinity. If :func:`observe` reads interrupts, one that it has not found is gone."""
    if kept.device not in want.nics:
        return None
    observed: tuple[Irq, ...] = have[NAME].get(kept.device, {}).get(kept.target, ())
    irqs = observed if _places(want) else function_irqs(machine, pci_of(machine.files, kept.target))
    affinity = next((format_ranges(irq.affinity) for irq in irqs if irq.name == kept.field), None)
    return None if affinity is None else Reading(affinity, want.spec.irqs.pin)


def apply(machine: Machine, change: Change) -> None:
    """Write one interrupt's affinity, after finding its number again."""
    number = _number(machine, change)
    if number is None:
        raise FileNotFoundError(errno.ENOENT, f"{change.target} has no interrupt {change.field} any more")
    try:
        machine.files.write(f"/proc/irq/{number}/smp_affinity_list", str(change.after))
    except OSError as error:
        # EPERM (EIO before Linux 6.12): the kernel manages this interrupt's affinity itself.
        if error.errno in (errno.EPERM, errno.EIO):
            line = line_of(change.target, number, change.field)
            machine.files.replace(MANAGED, "\n".join(sorted({line, *_managed(machine.files)})))
            raise OSError(error.errno, "the kernel places this interrupt itself; it is left alone") from error
        if error.errno == errno.ENOSPC:
            raise OSError(errno.ENOSPC, _refused(machine.files, parse_ranges(str(change.after)))) from error
        raise


def _number(machine: Machine, change: Change) -> int | None:
    irqs = function_irqs(machine, pci_of(machine.files, change.target))
    return next((irq.number for irq in irqs if irq.name == change.field), None)


def undone_by_driver(machine: Machine, change: Change) -> str:
    """The driver, if the interrupt is on the CPUs where the driver wants it: it has put it there itself.

    Some do so whenever they request their interrupts: gve, ionic, mana, mlx5, sfc, hns3, hinic, otx2 and others
    (irq_set_affinity_and_hint, kernel/irq/manage.c). Others remember where an interrupt was put, and put it there again: ice
    and idpf since Linux 6.15, iavf later (netif_set_affinity_auto, net/core/dev.c).
    """
    number = _number(machine, change)
    wish = hint(machine.files, number) if number is not None else ()
    if not wish or format_ranges(wish) != change.before:
        return ""
    return driver(machine.files, pci_of(machine.files, change.target)) or ""


def _refused(files: Files, cpus: tuple[int, ...]) -> str:
    """What the outcome says of CPUs that have no vector left. A single one is left out of placements until the next boot.

    One that was full before gets a queue only if its pool has no other CPU with a vector.
    """
    if len(cpus) > 1 or cpus[0] in _full(files):
        return f"ENOSPC: no CPU of {format_ranges(cpus)} has an interrupt vector left; {TOO_MANY}"
    message = f"ENOSPC: CPU {cpus[0]} has no interrupt vector left"
    try:
        files.replace(FULL, format_ranges({*_full(files), *cpus}))
    except OSError as error:
        return f"{message}; {FULL} cannot be written ({error.strerror}), so it is tried again; make room in /run"
    return f"{message}; it gets no further queue until it was offline, or until the next boot"
