"""CPU topology, and which CPU serves which queue: pure functions of what was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from heapq import heapify, heapreplace

from agent.hardware.topology import Cpu, Topology

Pool = tuple[int, ...]
"""The CPUs that may serve a device, in the order in which they are taken."""


def pool(topology: Topology, numa_node: int, exclude: frozenset[int] = frozenset()) -> Pool:
    """The CPUs for a device on ``numa_node`` (-1: no node is nearer than another), never empty.

    A node without a CPU that may be used gives way to the nearest one that has some. If ``exclude`` leaves none at all, it has
    no effect; if all CPUs are isolated, every one serves, because an empty mask would be refused.
    """
    housekeeping = topology.cpus.keys() - topology.isolated
    allowed = housekeeping - exclude
    if not allowed:
        return _order(topology, housekeeping or topology.cpus)
    if numa_node < 0:
        return _order(topology, allowed)
    distances = topology.distances.get(numa_node, {})
    nearest = min(
        {topology.cpus[id].node for id in allowed},
        key=lambda node: (node != numa_node, distances.get(node, 255), node),
    )
    return _order(topology, [id for id in allowed if topology.cpus[id].node == nearest])


def _order(topology: Topology, ids: Iterable[int]) -> tuple[int, ...]:
    """Round-robin over the last-level caches; a core's siblings only after every core has had one; CPU 0 last."""
    chosen = [topology.cpus[id] for id in sorted(ids)]
    thread: dict[int, int] = {}
    cores_seen: Counter[int] = Counter()
    for cpu in chosen:
        thread[cpu.id] = cores_seen[cpu.core]
        cores_seen[cpu.core] += 1
    # The turn of a core, and not of a thread: without one thread of a core, the threads of other cores keep their turns.
    turn: dict[int, int] = {}
    cores_of: Counter[int] = Counter()
    for core, llc in sorted({(cpu.core, cpu.llc) for cpu in chosen}):
        turn[core] = cores_of[llc]
        cores_of[llc] += 1
    return tuple(cpu.id for cpu in sorted(chosen, key=lambda c: (c.id == 0, thread[c.id], turn[c.core], c.llc, c.id)))


def without(pool: Pool, taken: Collection[int]) -> Pool:
    """A pool without the CPUs that are taken; all of it if none is left."""
    if not taken:
        return pool  # quick, since each of thousands of interrupts asks, and few nodes have a CPU that is taken
    return tuple(id for id in pool if id not in taken) or pool


Key = tuple[str, str]
"""A queue: its function's PCI address and its name ("3"). Never an IRQ number: those change."""


def place(
    topology: Topology, pools: Mapping[Key, Pool], previous: Mapping[Key, int], busy: Iterable[int] = ()
) -> dict[Key, int]:
    """Give each queue one CPU of its pool, over the whole node. ``busy``: the CPUs of queues that have theirs already.

    A fresh placement, as if no queue had a CPU yet, says how many queues of each pool a CPU serves. A queue keeps its previous
    CPU as far as these numbers allow. So the loads are always those of a fresh placement, as few queues as possible move, and
    placing again moves nothing.

    A queue that must move goes to its CPU of the fresh placement, if that serves too few queues now. So a CPU that went
    offline gets its queues back when it returns. Only if other CPUs came or went meanwhile, queues of one pool may stay
    exchanged. The order of the input does not matter.

    Any two pools must be disjoint, or one must contain the other, also in terms of their cores: those of :func:`pool` are so,
    and with the same CPUs left out of each, and those of one CPU.
    """
    rank = _ranks(pools)
    fresh = _fresh(topology, pools, rank, busy)
    kept = {key: cpu for key, cpu in previous.items() if key in pools and cpu in pools[key]}
    if not kept or kept == fresh:
        return fresh
    missing = Counter((rank[key], cpu) for key, cpu in fresh.items())
    placed: dict[Key, int] = {}

    def place_if_missing(key: Key, cpu: int) -> None:
        if missing[rank[key], cpu] > 0:
            missing[rank[key], cpu] -= 1
            placed[key] = cpu

    for key in sorted(kept, key=lambda key: (kept[key] != fresh[key], key)):
        place_if_missing(key, kept[key])
    for key in sorted(fresh.keys() - placed.keys()):
        place_if_missing(key, fresh[key])
    pool_of = {rank[key]: cpus for key, cpus in pools.items()}
    left = {number: [cpu for cpu in cpus for _ in range(missing[number, cpu])] for number, cpus in pool_of.items()}
    for key in sorted(fresh.keys() - placed.keys(), reverse=True):
        placed[key] = left[rank[key]].pop()
    return placed


def _ranks(pools: Mapping[Key, Pool]) -> dict[Key, int]:
    """The number of each queue's pool. Equal pools have one number, and a pool with fewer CPUs has a lower number."""
    distinct = sorted({*pools.values()}, key=lambda cpus: (len(cpus), cpus))
    number = {cpus: position for position, cpus in enumerate(distinct)}
    return {key: number[pool] for key, pool in pools.items()}


def _fresh(
    topology: Topology, pools: Mapping[Key, Pool], rank: Mapping[Key, int], busy: Iterable[int]
) -> dict[Key, int]:
    """A placement of queues that have no CPU yet: each goes to the least loaded core, CPU and cache.

    Queues with fewer CPUs to choose from go first. Since any two pools are disjoint, or one contains the other, the cores'
    loads are then as even as the pools allow.
    """
    placed: dict[Key, int] = {}
    load = _Load(topology)
    for id in busy:
        load.add(id)
    order: dict[int, _Order] = {}
    # By their numbers, and not as texts: a netdev with fewer channels than interrupts uses the first ones.
    for key in sorted(pools, key=lambda key: (rank[key], key[0], len(key[1]), key[1])):
        if rank[key] not in order:
            order[rank[key]] = _Order(load, pools[key])
        placed[key] = order[rank[key]].least_loaded()
        load.add(placed[key])
    return placed


class _Load:
    def __init__(self, topology: Topology) -> None:
        self.cpus = topology.cpus
        self.llc: Counter[int] = Counter()
        self._core: Counter[int] = Counter()
        self._cpu: Counter[int] = Counter()

    def add(self, id: int) -> None:
        cpu = self.cpus[id]
        self._core[cpu.core] += 1
        self.llc[cpu.llc] += 1
        self._cpu[id] += 1

    def on_its_cache(self, id: int, position: int) -> tuple[int, int, int]:
        """The sort key of a CPU among those of its cache, the least loaded first; ``position`` decides between equals."""
        return self._core[self.cpus[id].core], self._cpu[id], position


class _Order:
    """Finds the least loaded CPU of a pool: by the load of its core, of itself, of its cache, then in the pool's order.

    Loads may only grow. So a heap, one for each cache, may have a CPU with a load that is too low, and never too high: the
    first CPU of a heap is compared with its present load before it is taken.
    """

    def __init__(self, load: _Load, cpus: tuple[int, ...]) -> None:
        self._load = load
        self._cpus = cpus
        self._heaps: dict[int, list[tuple[int, int, int]]] = {}
        for position, id in enumerate(cpus):
            self._heaps.setdefault(load.cpus[id].llc, []).append(load.on_its_cache(id, position))
        for heap in self._heaps.values():
            heapify(heap)

    def least_loaded(self) -> int:
        best: tuple[int, int, int, int] | None = None
        for llc, heap in self._heaps.items():
            while heap[0] != (now := self._load.on_its_cache(self._cpus[heap[0][-1]], heap[0][-1])):
                heapreplace(heap, now)
            core, cpu, position = heap[0]
            candidate = core, cpu, self._load.llc[llc], position
            best = candidate if best is None else min(best, candidate)
        assert best is not None  # noqa: S101  a pool is never empty
        return self._cpus[best[-1]]


def steering(topology: Topology, pool: Pool, queues: int, irq_cpu: int) -> frozenset[int]:
    """The CPUs to which RPS spreads a receive queue whose interrupt ``irq_cpu`` takes. Without any, RPS is off.

    RPS is off if each CPU can have a queue of its own (Documentation/networking/scaling.rst). Otherwise these are the pool's
    CPUs that share the last-level cache of ``irq_cpu``, without that one, which the interrupt loads already. If no other core
    shares it (many virtual machines show a cache for each core at most), they are the pool's other CPUs. CPUs with an owner are
    left out, and isolated ones: the kernel removes these from the mask, so the mask that is read back would differ from the one
    that was written.

    :param queues: how many receive queues the netdev has.
    """
    unowned = frozenset(pool) - topology.owners.of.keys()
    if queues >= len(unowned):
        return frozenset()
    others = unowned - topology.isolated - {irq_cpu}
    own = topology.cpus[irq_cpu]
    near = frozenset(id for id in others if topology.cpus[id].llc == own.llc)
    return near if any(topology.cpus[id].core != own.core for id in near) else others


Place = tuple[str, int]
"""Where a CPU is: the name of a level, and the number of the CPU's place in that level."""

LEVELS = ("cpu", "core", "llc", "node", "machine")


def _places(cpu: Cpu) -> tuple[Place, ...]:
    return tuple(zip(LEVELS, (cpu.id, cpu.core, cpu.llc, cpu.node, 0), strict=True))


class Senders:
    """Assigns the CPUs that may send to a netdev's transmit queues. Netdevs whose queues have the same CPUs share a result."""

    def __init__(self, topology: Topology, ids: Iterable[int]) -> None:
        self._topology = topology
        self._all = frozenset(ids)
        at: dict[Place, set[int]] = {}
        for id in self._all:
            for place in _places(topology.cpus[id]):
                at.setdefault(place, set()).add(id)
        self._at = at
        self._results: dict[tuple[tuple[int, int], ...], dict[int, frozenset[int]]] = {}

    def transmitting(self, served: Mapping[int, int]) -> dict[int, frozenset[int]]:
        """The CPUs that send through each transmit queue (XPS). Each CPU sends through one queue, the nearest.

        :param served: the CPU of each queue's interrupt, by the queue's number. That CPU handles the queue's completions, so
            a queue is as near as that CPU: the same CPU, core, last-level cache or node, or anywhere else. Of queues that are
            equally near, a CPU gets the one with the fewest senders.
        """
        key = tuple(sorted(served.items()))
        if key not in self._results:
            self._results[key] = self._assigned(key)
        return self._results[key]

    def _assigned(self, served: tuple[tuple[int, int], ...]) -> dict[int, frozenset[int]]:
        near: dict[Place, list[int]] = {}
        for queue, id in served:
            for place in _places(self._topology.cpus[id]):
                near.setdefault(place, []).append(queue)
        taken: dict[int, list[int]] = {queue: [] for queue, _ in served}
        left = set(self._all)
        for level in LEVELS:
            # On one level neither places nor the queues in them overlap.
            for place in [place for place in near if place[0] == level]:
                heap = [(len(taken[queue]), queue) for queue in near[place]]
                heapify(heap)
                here = left & self._at.get(place, set())
                for id in sorted(here):
                    count, queue = heap[0]
                    taken[queue].append(id)
                    heapreplace(heap, (count + 1, queue))
                left -= here
        return {queue: frozenset(ids) for queue, ids in taken.items()}


def mask(cpus: Iterable[int]) -> str:
    """CPUs as the kernel's bitmap text: hexadecimal, groups of 32 bits, no 0x (which gives EINVAL)."""
    bits = sum(1 << id for id in cpus)
    groups: list[str] = []
    while bits or not groups:
        groups.append(f"{bits & 0xFFFFFFFF:08x}")
        bits >>= 32
    return ",".join(reversed(groups))


@lru_cache(maxsize=1024)
def from_mask(text: str) -> frozenset[int]:
    """The inverse of :func:`mask`; a node has many queues and few masks."""
    bits = int(text.replace(",", "") or "0", 16)
    return frozenset(id for id in range(bits.bit_length()) if bits >> id & 1)
