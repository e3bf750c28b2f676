"""The CPU that serves each queue's interrupt, placed over the whole node.

smp_affinity_list is compared, not effective_affinity_list. On x86 without interrupt remapping a move takes effect at the next
interrupt, and effective_affinity_list shows the old CPU until then: for an idle interrupt, for ever. If the move fails at that
time, smp_affinity_list shows the old CPUs again (kernel/irq/migration.c, irq_move_masked_irq).
"""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from attrs import evolve, field, frozen

from agent.documents import load
from agent.driver_families import is_passed_through
from agent.hardware.functions import driver, pci_of
from agent.hardware.interrupts import MANAGEMENT, Irq, function_irqs, hint
from agent.hardware.load import Load, Move, balance, loads
from agent.hardware.placement import Key, Pool, place, pool, without
from agent.hardware.sysfs import ranges, read_or
from agent.hardware.topology import Topology
from agent.kinds import Reading
from agent.kinds.pod_cpus import with_pods
from agent.machine import Files, Machine
from agent.report.names import RUN_FOLDER
from agent.report.records import HOST, Change
from agent.report.target import device_of, is_vf, vf_index
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, absent_among

NAME = "irqs"
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


@frozen
class Kept:
    """The content of these three files: facts about this boot's interrupts that the kernel does not report."""

    full: frozenset[int] = frozenset()
    managed: frozenset[str] = frozenset()
    placed: Mapping[Key, int] = field(factory=dict)

    def is_managed(self, target: str, irq: Irq) -> bool:
        """Whether the kernel places an interrupt itself."""
        return irq.managed or (bool(self.managed) and _line(target, irq.number, irq.name) in self.managed)


NOTHING_KEPT = Kept()


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
    """The interrupts of each PF and its VFs, by target; none for a function that is passed through (vfio).

    Empty if the spec uses no interrupt placement. Under HOST: what is kept of this boot, if anything is.
    """
    if not _places(want):
        return {}
    functions = functions_in_scope(machine.files, want, scope)
    irqs: dict[str, Any] = {
        address: {target: _placeable(machine, pci) for target, pci in of_pf.items()}
        for address, of_pf in functions.items()
    }
    for target, cpus in with_pods(machine, want, functions).items():
        of_pf = irqs[device_of(target)]
        # If the kubelet does not say who has the VF, its interrupts stay where they are.
        there = frozenset(cpu for irq in of_pf[target] for cpu in irq.affinity) if cpus is None else cpus
        of_pf[target] = tuple(evolve(irq, of_pod=there) for irq in of_pf[target])
    files = machine.files
    kept = Kept(_full(files), _managed(files), _parsed(read_or(files, PLACED, "")))
    return {**irqs, HOST: kept} if kept != NOTHING_KEPT else irqs


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
    for _, target, irq in _each(have) if made else ():
        key = (target, str(irq.queue))
        if irq.role != MANAGEMENT and key in made and irq.affinity != (made[key].cpu,):
            del made[key]
    return evolve(have.load, moves={**have.load.moves, **made}) if made else have.load


def kept_of(have: Snapshot) -> Kept:
    """What is kept of this boot."""
    kept: Kept = have[NAME].get(HOST, NOTHING_KEPT)
    return kept


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


def _line(target: str, number: int, name: str) -> str:
    return f"{target} {number} {name}"


def _placeable(machine: Machine, pci: str) -> tuple[Irq, ...]:
    return () if is_passed_through(driver(machine.files, pci)) else function_irqs(machine, pci)


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


@frozen
class Placement:
    """``pools``: the CPUs that may serve each queue, by target and queue; ``cpus``: the CPU that serves it, its receive and
    transmit interrupts alike.

    ``homes``: the CPU that serves it while no CPU has an owner. ``of_pods``: by VF, the CPUs of the pod that has it, if its
    interrupts go there. ``moves``: the queues that follow the load to another CPU now.
    """

    pools: Mapping[Key, Pool]
    cpus: Mapping[Key, int]
    homes: Mapping[Key, int]
    of_pods: Mapping[str, Pool] = field(factory=dict)
    moves: Mapping[Key, Move] = field(factory=dict)

    def settled(self, target: str) -> bool:
        """Whether no queue of a function moves. What a move brings is not required: the node stays ready meanwhile."""
        return all(target != moved for moved, _ in self.moves)


def placement(want: Wanted, have: Snapshot) -> Placement:
    """Place all queues.

    Several kinds need this in each pass, and in most passes interrupts and CPUs are those of the pass before: the result is the
    same object then.
    """
    local = pools(want, have)
    load = have.load if want.spec.irqs.follow_load else None
    absent = absent_among(want, have.functions, (device_of(target) for target, _ in kept_of(have).placed))
    made_from = local, have[NAME], have.topology, load, absent
    return have.memo.get("placement", made_from, lambda: _place(local, have, load, absent))


def _place(local: Mapping[str, Pool], have: Snapshot, load: Load | None, absent: Collection[str]) -> Placement:
    kept = kept_of(have)
    keys: dict[Key, Pool] = {}
    owned = have.topology.owners.of
    affinities: dict[Key, set[tuple[int, ...]]] = {}
    of_pods: dict[str, Pool] = {}
    own: dict[Key, Pool] = {}
    serving: dict[int, Key] = {}
    for address, target, irq in _each(have):
        # The kubelet of Kubernetes 1.20 also tells CPUs that pods share. These have no owner in its file.
        if cpus := irq.of_pod & have.topology.owners.pods.keys() & have.topology.cpus.keys():
            of_pods[target] = tuple(sorted(cpus))
        if irq.role != MANAGEMENT and address in local:
            key = (target, str(irq.queue))
            serving[irq.number] = key
            affinities.setdefault(key, set()).add(irq.affinity)
            # The kernel has chosen the CPU of a managed interrupt.
            fixed = [cpu for cpu in irq.affinity if cpu in have.topology.cpus] if kept.is_managed(target, irq) else []
            keys[key] = (fixed[0],) if fixed else local[address]
            if target in of_pods and not fixed:
                own[key] = of_pods[target]
    # A netdev that is down, as while a pod starts, has no interrupts. Its queues keep their CPUs, so that no other queue moves.
    down = {
        target: local[address]
        for address in have[NAME].keys() & local.keys()
        for target, irqs in have[NAME][address].items()
        if not irqs
    }
    every = {key: down[key[0]] for key in kept.placed if key[0] in down} | keys
    # The queues of a NIC that is missing for a while keep their CPUs, too. Its interrupts and its pool are unknown.
    placed_before = ((key, cpu) for key, cpu in kept.placed.items() if device_of(key[0]) in absent)
    every |= {key: (cpu,) for key, cpu in placed_before if cpu in have.topology.cpus}
    every = _with_vectors(every, affinities, kept)
    # Another interrupt's present CPU does not count: it depends on irqbalance, and on the order in which devices appeared, so
    # each boot would have another placement.
    homes = place(have.topology, every if load is None else _standing(every, kept.placed, load), kept.placed)
    # A queue whose CPU has an owner goes elsewhere in its pool meanwhile, and all others stay. If each CPU of the pool has an
    # owner, it stays, too. Its present CPU counts here: nothing else says where it went before.
    taken = kept.full | owned.keys()
    free = {key: without(keys[key], taken) for key in keys if homes[key] in owned}
    guests = {key: pool for key, pool in free.items() if owned.keys().isdisjoint(pool)}
    own = _with_vectors(own, {key: affinities[key] for key in own}, kept)
    present = {key: affinity[0] for key in guests | own for affinity in sorted(affinities[key]) if len(affinity) == 1}
    busy = [cpu for key, cpu in homes.items() if key not in guests]
    homes = {key: cpu for key, cpu in homes.items() if key in keys}
    # A queue that goes to a pod keeps its place among the guests, so that no other one moves.
    placed = homes | place(have.topology, guests, present, busy) | place(have.topology, own, present)
    moves: dict[Key, Move] = {}
    if load is not None and load.readings:
        to = {key: tuple(cpu for cpu in keys[key] if cpu not in taken) for key in keys if key not in own}
        queues, of_cpus = loads(load, serving, placed)
        movable = {key: queue for key, queue in queues.items() if key in to and homes[key] not in owned}
        moves = balance(movable, of_cpus, load.moves, load.readings[-1].at, to)
    moved = {key: move.cpu for key, move in moves.items()}
    return Placement(every | guests | own, placed | moved, homes | moved, of_pods, moves)


def _standing(every: Mapping[Key, Pool], placed: Mapping[Key, int], load: Load) -> dict[Key, Pool]:
    """Each queue's pool: only the CPU where it is, or to which it has moved, if that is still one of the pool's."""
    cpus = {**placed, **{key: move.cpu for key, move in load.moves.items()}}
    return {key: (cpus[key],) if cpus.get(key) in pool else pool for key, pool in every.items()}


def _with_vectors(
    every: Mapping[Key, Pool], affinities: Mapping[Key, set[tuple[int, ...]]], kept: Kept
) -> dict[Key, Pool]:
    """Each queue's pool without the CPUs that have no free vector; all of the pool if no CPU of it has one.

    A queue whose interrupts are all on one such CPU stays there, up to the CPU's share of the pool's queues. If one of its
    interrupts is elsewhere, the whole queue goes elsewhere: it would find no vector there.
    """
    served: dict[tuple[tuple[int, ...], int], list[Key]] = {}
    for key, of_queue in affinities.items():
        (first, *more), *others = sorted(of_queue)
        if not more and not others and first in kept.full and first in every[key]:
            served.setdefault((every[key], first), []).append(key)
    roomy = {pool: without(pool, kept.full) for pool in every.values()}
    count = Counter(every.values())
    result = {key: roomy[pool] for key, pool in every.items()}
    for (cpus, cpu), queues in served.items():
        share = -(-count[cpus] // len(cpus)) if _has_vectors(roomy[cpus], kept.full) else len(queues)
        for key in sorted(queues, key=lambda key: (kept.placed.get(key) != cpu, key))[:share]:
            result[key] = (cpu,)
    return result


def _has_vectors(pool: Pool, full: frozenset[int]) -> bool:
    return not full.issuperset(pool)


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
    for address, target, irq in _each(have):
        if address not in local or kept.is_managed(target, irq):
            continue
        key = (target, str(irq.queue))
        pool = placed.pools[key] if irq.role != MANAGEMENT else any_cpu(placed, local[address], target, owned)
        one = irq.role != MANAGEMENT and _has_vectors(pool, kept.full)
        after = (placed.cpus[key],) if one else tuple(sorted(pool))
        if irq.affinity != after:
            before, note = format_ranges(irq.affinity), _note(key, placed, have) if one else ""
            required = not one or key not in placed.moves
            changes.append(Change(NAME, target, irq.name, before, format_ranges(after), required=required, note=note))
    return changes


def any_cpu(placed: Placement, local: Pool, target: str, owned: Collection[int]) -> Pool:
    """The CPUs that may serve what belongs to no queue of a function."""
    return placed.of_pods.get(target) or without(local, owned)


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
            line = _line(change.target, number, change.field)
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
