"""Which CPU serves each queue of the node, from the interrupts that were read: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from attrs import field, frozen

from agent.hardware.interrupts import MANAGEMENT, Irq
from agent.hardware.load import Load, Move, balance, loads
from agent.hardware.placement import Key, Pool, place, pool, without
from agent.report.records import HOST
from agent.report.target import device_of, is_vf, vf_index
from agent.spec.ranges import parse_ranges
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, absent_among

IRQS = "irqs"
"""The kind that reads the interrupts (:mod:`agent.kinds.irqs`)."""


@frozen
class Kept:
    """Facts about this boot's interrupts that the kernel does not report, as :mod:`agent.kinds.irqs` keeps them in files."""

    full: frozenset[int] = frozenset()
    managed: frozenset[str] = frozenset()
    placed: Mapping[Key, int] = field(factory=dict)

    def is_managed(self, target: str, irq: Irq) -> bool:
        """Whether the kernel places an interrupt itself."""
        return irq.managed or (bool(self.managed) and line_of(target, irq.number, irq.name) in self.managed)


NOTHING_KEPT = Kept()


def line_of(target: str, number: int, name: str) -> str:
    """A managed interrupt in :attr:`Kept.managed`."""
    return f"{target} {number} {name}"


def kept_of(have: Snapshot) -> Kept:
    """What is kept of this boot."""
    kept: Kept = have[IRQS].get(HOST, NOTHING_KEPT)
    return kept


def each(have: Snapshot) -> Iterator[tuple[str, str, Irq]]:
    """PF, target and interrupt of every one that was read, in a stable order."""
    for address in sorted(have[IRQS].keys() - {HOST}):
        functions: Mapping[str, tuple[Irq, ...]] = have[IRQS][address]
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
        lambda: {
            address: pool(have.topology, node, frozenset(parse_ranges(excluded))) for address, node in nodes.items()
        },
    )


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
    made_from = local, have[IRQS], have.topology, load, absent
    return have.memo.get("placement", made_from, lambda: _place(local, have, load, absent))


@frozen
class _Queues:
    """The queues whose interrupts were read, by target and queue.

    ``pools``: the CPUs that may serve each, or the CPU that the kernel has chosen for a managed interrupt. ``affinities``:
    where the interrupts of each are now. ``own``: the CPUs of the pod that has the queue's VF, if its interrupts go there, and
    ``of_pods`` the same by VF. ``of_irqs``: the queue of each interrupt, by its number.
    """

    pools: Mapping[Key, Pool]
    affinities: Mapping[Key, set[tuple[int, ...]]]
    own: Mapping[Key, Pool]
    of_pods: Mapping[str, Pool]
    of_irqs: Mapping[int, Key]


def _queues(local: Mapping[str, Pool], have: Snapshot) -> _Queues:
    kept, online = kept_of(have), have.topology.cpus.keys()
    pools: dict[Key, Pool] = {}
    affinities: dict[Key, set[tuple[int, ...]]] = {}
    own: dict[Key, Pool] = {}
    of_pods: dict[str, Pool] = {}
    of_irqs: dict[int, Key] = {}
    for address, target, irq in each(have):
        # The kubelet of Kubernetes 1.20 also tells CPUs that pods share. These have no owner in its file.
        if irq.of_pod and (cpus := irq.of_pod & have.topology.owners.pods.keys() & online):
            of_pods[target] = tuple(sorted(cpus))
        if irq.role == MANAGEMENT or address not in local:
            continue
        key = (target, str(irq.queue))
        of_irqs[irq.number] = key
        affinities.setdefault(key, set()).add(irq.affinity)
        fixed = [cpu for cpu in irq.affinity if cpu in online] if kept.is_managed(target, irq) else []
        pools[key] = (fixed[0],) if fixed else local[address]
        if target in of_pods and not fixed:
            own[key] = of_pods[target]
    return _Queues(pools, affinities, own, of_pods, of_irqs)


def _place(local: Mapping[str, Pool], have: Snapshot, load: Load | None, absent: Collection[str]) -> Placement:
    kept, topology, owned = kept_of(have), have.topology, have.topology.owners.of
    queues = _queues(local, have)
    every = _with_vectors(_with_unread(queues.pools, local, have, absent), queues.affinities, kept)
    # Another interrupt's present CPU does not count: it depends on irqbalance, and on the order in which devices appeared, so
    # each boot would have another placement.
    of_every = place(topology, every if load is None else _standing(every, kept.placed, load), kept.placed)
    homes = {key: cpu for key, cpu in of_every.items() if key in queues.pools}
    # A queue whose CPU has an owner goes elsewhere in its pool meanwhile, and all others stay. If each CPU of the pool has an
    # owner, it stays, too. Its present CPU counts here: nothing else says where it went before.
    taken = kept.full | owned.keys()
    free = {key: without(queues.pools[key], taken) for key, cpu in homes.items() if cpu in owned}
    guests = {key: pool for key, pool in free.items() if owned.keys().isdisjoint(pool)}
    own = _with_vectors(queues.own, {key: queues.affinities[key] for key in queues.own}, kept)
    present = {
        key: affinity[0] for key in guests | own for affinity in sorted(queues.affinities[key]) if len(affinity) == 1
    }
    busy = [cpu for key, cpu in of_every.items() if key not in guests]
    # A queue that goes to a pod keeps its place among the guests, so that no other one moves.
    placed = homes | place(topology, guests, present, busy) | place(topology, own, present)
    if load is None or not load.readings:
        return Placement(every | guests | own, placed, homes, queues.of_pods)
    movable = {
        key: tuple(cpu for cpu in queues.pools[key] if cpu not in taken)
        for key, cpu in homes.items()
        if key not in own and cpu not in owned
    }
    moves = _moves(load, queues, placed, movable)
    moved = {key: move.cpu for key, move in moves.items()}
    return Placement(every | guests | own, placed | moved, homes | moved, queues.of_pods, moves)


def _with_unread(
    read: Mapping[Key, Pool], local: Mapping[str, Pool], have: Snapshot, absent: Collection[str]
) -> dict[Key, Pool]:
    """The pools of all queues, also of those that cannot be read now. These keep their CPUs, so that no other queue moves."""
    placed = kept_of(have).placed
    # A netdev that is down, as while a pod starts, has no interrupts.
    down = {
        target: local[address]
        for address in have[IRQS].keys() & local.keys()
        for target, irqs in have[IRQS][address].items()
        if not irqs
    }
    # Of a NIC that is missing for a while the pool is unknown, too.
    missing = {key: (cpu,) for key, cpu in placed.items() if device_of(key[0]) in absent and cpu in have.topology.cpus}
    return {key: down[key[0]] for key in placed if key[0] in down} | dict(read) | missing


def _moves(load: Load, queues: _Queues, placed: Mapping[Key, int], movable: Mapping[Key, Pool]) -> dict[Key, Move]:
    """The queues that follow the load to another CPU now. ``movable``: where each may go."""
    of_queues, of_cpus = loads(load, queues.of_irqs, placed)
    may_move = {key: queue for key, queue in of_queues.items() if key in movable}
    return balance(may_move, of_cpus, load.moves, load.readings[-1].at, movable)


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
        share = -(-count[cpus] // len(cpus)) if has_vectors(roomy[cpus], kept.full) else len(queues)
        for key in sorted(queues, key=lambda key: (kept.placed.get(key) != cpu, key))[:share]:
            result[key] = (cpu,)
    return result


def has_vectors(pool: Pool, full: frozenset[int]) -> bool:
    """Whether a CPU of a pool has an interrupt vector left, as far as is known."""
    return not full.issuperset(pool)


def any_cpu(placed: Placement, local: Pool, target: str, owned: Collection[int]) -> Pool:
    """The CPUs that may serve what belongs to no queue of a function."""
    return placed.of_pods.get(target) or without(local, owned)
