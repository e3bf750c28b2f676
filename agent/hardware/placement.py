"""CPU topology, and which CPU serves which queue: pure functions of what was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from heapq import heapify, heapreplace

from attrs import frozen


@frozen
class Cpu:
    """An online CPU. ``core`` is the lowest CPU of its core, ``llc`` the lowest that shares its last-level cache."""

    id: int
    node: int
    core: int
    llc: int


@frozen
class Topology:
    """The online CPUs by id; those the kernel keeps free (isolcpus, nohz_full); the NUMA nodes' distances."""

    cpus: Mapping[int, Cpu]
    isolated: frozenset[int]
    distances: Mapping[int, Mapping[int, int]]


@frozen
class Pool:
    """The CPUs that may serve a device, in the order in which they are taken. ``degraded``: they are not local to it."""

    cpus: tuple[int, ...]
    degraded: bool = False


def pool(topology: Topology, numa_node: int, exclude: frozenset[int] = frozenset()) -> Pool:
    """The CPUs for a device on ``numa_node`` (-1: no node is nearer than another), never empty.

    A node without a CPU that may be used gives way to the nearest one that has some; if the policy leaves none at all,
    every online CPU serves, because an empty mask would be refused.
    """
    allowed = {id for id in topology.cpus if id not in topology.isolated and id not in exclude}
    if not allowed:
        return Pool(_order(topology, topology.cpus), degraded=True)
    if numa_node < 0:
        return Pool(_order(topology, allowed))
    distances = topology.distances.get(numa_node, {})
    nodes = sorted(
        {topology.cpus[id].node for id in allowed},
        key=lambda node: (node != numa_node, distances.get(node, 255), node),
    )
    local = [id for id in allowed if topology.cpus[id].node == nodes[0]]
    return Pool(_order(topology, local), degraded=nodes[0] != numa_node)


def _order(topology: Topology, ids: Iterable[int]) -> tuple[int, ...]:
    """Round-robin over the last-level caches; a core's siblings only after every core has had one; CPU 0 last."""
    chosen = [topology.cpus[id] for id in sorted(ids)]
    thread: dict[int, int] = {}
    cores_seen: Counter[int] = Counter()
    for cpu in chosen:
        thread[cpu.id] = cores_seen[cpu.core]
        cores_seen[cpu.core] += 1
    turn: dict[int, int] = {}
    taken: Counter[tuple[int, int]] = Counter()
    for cpu in chosen:
        turn[cpu.id] = taken[thread[cpu.id], cpu.llc]
        taken[thread[cpu.id], cpu.llc] += 1
    return tuple(cpu.id for cpu in sorted(chosen, key=lambda c: (c.id == 0, thread[c.id], turn[c.id], c.llc, c.id)))


Key = tuple[str, str]
"""A queue: its function's PCI address and its name ("3"). Never an IRQ number: those change."""


def place(topology: Topology, pools: Mapping[Key, Pool], previous: Mapping[Key, int]) -> dict[Key, int]:
    """Give each queue one CPU of its pool, over the whole node.

    What was placed before stays, the rest goes to the least loaded core, cache and CPU; then queues move, one at a time,
    while a core of their pool has two less than theirs. A CPU that came back gets those back that a first placement gives it.
    Each move leaves the cores' loads more even, or as even and a queue at home: so it ends, and a second placement moves
    nothing. The order of the input does not matter.
    """
    home = _fill(topology, pools, {})
    kept = {key: cpu for key, cpu in previous.items() if key in pools and cpu in pools[key].cpus}
    if not kept or kept == home:
        return home
    placed = _fill(topology, pools, kept)
    load = _Load(topology, placed.values())
    while _go_home(load, placed, home) or _even_out(load, placed, home, pools):
        pass
    return placed


def _fill(topology: Topology, pools: Mapping[Key, Pool], kept: Mapping[Key, int]) -> dict[Key, int]:
    placed = dict(kept)
    load = _Load(topology, placed.values())
    order = {cpus: _Order(load, cpus) for cpus in _distinct(pools)}
    for key in sorted(pools.keys() - placed.keys()):
        placed[key] = order[pools[key].cpus].first()
        load.add(placed[key])
    return placed


def _distinct(pools: Mapping[Key, Pool]) -> set[tuple[int, ...]]:
    return {pool.cpus for pool in pools.values()}


def _go_home(load: _Load, placed: dict[Key, int], home: Mapping[Key, int]) -> bool:
    """Queues on CPUs that serve more than at first, to CPUs that serve fewer than at first."""
    more = Counter(placed.values())
    more.subtract(Counter(home.values()))
    moved = False
    for key in sorted(key for key in home if more[placed[key]] > 0 and more[home[key]] < 0):
        away, back = placed[key], home[key]
        if more[away] > 0 and more[back] < 0 and load.keeps_even(away, back):
            load.move(away, back)
            placed[key] = back
            more[away] -= 1
            more[back] += 1
            moved = True
    return moved


def _even_out(load: _Load, placed: dict[Key, int], home: Mapping[Key, int], pools: Mapping[Key, Pool]) -> bool:
    """One queue to a core that has two less; rather one that is not at home, of a CPU that serves more than at first."""
    more = Counter(placed.values())
    more.subtract(Counter(home.values()))
    least = {cpus: min(load.of_core(id) for id in cpus) for cpus in _distinct(pools)}
    crowded = [key for key, id in placed.items() if load.of_core(id) - least[pools[key].cpus] > 1]
    if not crowded:
        return False
    key = min(
        crowded, key=lambda key: (more[placed[key]] <= 0, placed[key] == home[key], -load.of_core(placed[key]), key)
    )
    best = _Order(load, pools[key].cpus).first()
    load.move(placed[key], best)
    placed[key] = best
    return True


class _Load:
    """How many queues each core, cache and CPU serves."""

    def __init__(self, topology: Topology, ids: Iterable[int]) -> None:
        self._cpus = topology.cpus
        self._core: Counter[int] = Counter()
        self._llc: Counter[int] = Counter()
        self._cpu: Counter[int] = Counter()
        for id in ids:
            self.add(id)

    def add(self, id: int, by: int = 1) -> None:
        cpu = self._cpus[id]
        self._core[cpu.core] += by
        self._llc[cpu.llc] += by
        self._cpu[id] += by

    def move(self, id: int, to: int) -> None:
        self.add(id, -1)
        self.add(to)

    def of_core(self, id: int) -> int:
        return self._core[self._cpus[id].core]

    def keeps_even(self, id: int, to: int) -> bool:
        """Whether the cores' loads are no less even after a move."""
        return self._cpus[id].core == self._cpus[to].core or self.of_core(id) > self.of_core(to)

    def llc(self, id: int) -> int:
        return self._cpus[id].llc

    def of_llc(self, llc: int) -> int:
        return self._llc[llc]

    def on_its_cache(self, id: int, position: int) -> tuple[int, int, int]:
        """What tells the CPUs of one cache apart, the least loaded first; ``position`` decides between equals."""
        return self._core[self._cpus[id].core], self._cpu[id], position


class _Order:
    """The CPUs of a pool by their load (core, cache, CPU, then the pool's order), while loads only grow.

    One heap a cache: what it says of a CPU is a lower bound, and is looked at again before it is believed.
    """

    def __init__(self, load: _Load, cpus: tuple[int, ...]) -> None:
        self._load = load
        self._cpus = cpus
        self._heaps: dict[int, list[tuple[int, int, int]]] = {}
        for position, id in enumerate(cpus):
            self._heaps.setdefault(load.llc(id), []).append(load.on_its_cache(id, position))
        for heap in self._heaps.values():
            heapify(heap)

    def first(self) -> int:
        best: tuple[int, int, int, int] | None = None
        for llc, heap in self._heaps.items():
            while heap[0] != (now := self._load.on_its_cache(self._cpus[heap[0][-1]], heap[0][-1])):
                heapreplace(heap, now)
            core, cpu, position = heap[0]
            candidate = core, self._load.of_llc(llc), cpu, position
            best = candidate if best is None else min(best, candidate)
        assert best is not None  # noqa: S101  a pool is never empty
        return self._cpus[best[-1]]


def steering(topology: Topology, pool: Pool, queues: int, irq_cpu: int) -> frozenset[int]:
    """The CPUs to which RPS spreads one of ``queues`` receive queues, whose interrupt ``irq_cpu`` takes; none turns RPS off.

    Off where each CPU can have a queue of its own (Documentation/networking/scaling.rst); else the pool's CPUs that
    share the interrupt's last-level cache, without the one that the interrupt already loads. Isolated CPUs are left out: the
    kernel strips them from the mask, and what is read back would never be what was written.
    """
    if queues >= len(pool.cpus):
        return frozenset()
    usable = set(pool.cpus) - topology.isolated
    near = {id for id in usable if topology.cpus[id].llc == topology.cpus[irq_cpu].llc} or usable
    others = near - {irq_cpu}
    return frozenset(others or near)


Place = tuple[str, int]
"""Where a CPU is: the name of a level, and which one of that."""

LEVELS = ("cpu", "core", "llc", "node", "machine")


def _places(cpu: Cpu) -> tuple[Place, ...]:
    return tuple(zip(LEVELS, (cpu.id, cpu.core, cpu.llc, cpu.node, 0), strict=True))


class Senders:
    """The CPUs that send, by where they are; netdevs whose interrupts are served alike are answered once."""

    def __init__(self, topology: Topology, ids: Iterable[int]) -> None:
        self._topology = topology
        self._all = frozenset(ids)
        at: dict[Place, set[int]] = {}
        for id in self._all:
            for place in _places(topology.cpus[id]):
                at.setdefault(place, set()).add(id)
        self._at = at
        self._answers: dict[tuple[tuple[int, int], ...], dict[int, frozenset[int]]] = {}

    def transmitting(self, served: Mapping[int, int]) -> dict[int, frozenset[int]]:
        """The CPUs that send through each transmit queue (XPS): each through exactly one, the nearest.

        A queue is where the CPU of its interrupt is (``served``, by the queue's number): its completions are handled there.
        Of queues that are equally near (own CPU, core, last-level cache, node, anywhere) the one with the fewest senders
        is taken.
        """
        question = tuple(sorted(served.items()))
        if question not in self._answers:
            self._answers[question] = self._answer(question)
        return self._answers[question]

    def _answer(self, served: tuple[tuple[int, int], ...]) -> dict[int, frozenset[int]]:
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
