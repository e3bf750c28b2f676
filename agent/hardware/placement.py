"""CPU topology, and which CPU serves which queue: pure functions of what was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import combinations

from attrs import frozen

from agent.hardware.topology import Cpu, Topology


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

    A first placement says how many queues of each pool a CPU serves. Queues that were placed before stay as far as these
    numbers allow: the loads are always those of a first placement, they are reached in the fewest moves, and a second
    placement moves nothing. A queue that must move goes to its CPU of the first placement if that has room, so what a CPU
    served before it went offline comes back to it, unless other CPUs went or came in between: then queues of one pool may
    stay exchanged. The order of the input does not matter.
    """
    rank = _ranks(pools)
    home = _first(topology, pools, rank)
    kept = {key: cpu for key, cpu in previous.items() if key in pools and cpu in pools[key].cpus}
    if not kept or kept == home:
        return home
    room = Counter((rank[key], cpu) for key, cpu in home.items())
    placed: dict[Key, int] = {}

    def seat(key: Key, cpu: int) -> None:
        if room[rank[key], cpu] > 0:
            room[rank[key], cpu] -= 1
            placed[key] = cpu

    for key in sorted(kept, key=lambda key: (kept[key] != home[key], key)):
        seat(key, kept[key])
    for key in sorted(home.keys() - placed.keys()):
        seat(key, home[key])
    left = {number: [cpu for cpu in cpus for _ in range(room[number, cpu])] for number, cpus in _by_rank(pools, rank)}
    for key in sorted(home.keys() - placed.keys(), reverse=True):
        placed[key] = left[rank[key]].pop()
    return placed


def _ranks(pools: Mapping[Key, Pool]) -> dict[Key, int]:
    """A number for the pool of each queue; equal pools have the same, and a pool with fewer CPUs has a lower one."""
    distinct = sorted({pool.cpus for pool in pools.values()}, key=lambda cpus: (len(cpus), cpus))
    number = {cpus: position for position, cpus in enumerate(distinct)}
    return {key: number[pool.cpus] for key, pool in pools.items()}


def _first(topology: Topology, pools: Mapping[Key, Pool], rank: Mapping[Key, int]) -> dict[Key, int]:
    """A first placement: each queue to the least loaded core, CPU and cache; queues with fewer CPUs to choose from go first.

    This makes the cores' loads as even as the pools allow where any two pools are disjoint or one contains the other.
    Where two pools overlap otherwise, :func:`_even_out` does.
    """
    placed: dict[Key, int] = {}
    load = _Load(topology)
    order: dict[int, _Order] = {}
    for key in sorted(pools, key=lambda key: (rank[key], key)):
        if rank[key] not in order:
            order[rank[key]] = _Order(load, pools[key].cpus)
        placed[key] = order[rank[key]].first()
        load.add(placed[key])
    core = {id: cpu.core for id, cpu in topology.cpus.items()}
    distinct = dict(_by_rank(pools, rank))
    if not _nested(distinct.values(), {id: id for id in core}) or not _nested(distinct.values(), core):
        _even_out(core, placed, rank, distinct)
    return placed


def _by_rank(pools: Mapping[Key, Pool], rank: Mapping[Key, int]) -> list[tuple[int, tuple[int, ...]]]:
    """The distinct pools, those with the fewest CPUs first."""
    return sorted({rank[key]: pools[key].cpus for key in pools}.items())


def _nested(pools: Iterable[tuple[int, ...]], place: Mapping[int, int]) -> bool:
    """Whether any two pools are disjoint, or one contains the other, by the places of their CPUs."""
    sets = [frozenset(place[id] for id in cpus) for cpus in pools]
    return all(a.isdisjoint(b) or a <= b or b <= a for a, b in combinations(sets, 2))


def _even_out(
    core: Mapping[int, int], placed: dict[Key, int], rank: Mapping[Key, int], pools: Mapping[int, tuple[int, ...]]
) -> None:
    """Move queues while that makes the cores' loads more even, or leaves these as they are and makes the CPUs' more even.

    A step takes a queue from one core to another that serves at least two less; where no pool has both, by way of queues
    that make room for each other. When there is no such step, no placement has more even cores, nor a smaller largest load
    (Harvey and others, "Semi-matchings for bipartite graphs and load balancing"). Each step lowers the sum of the squares of
    the loads, so it ends.
    """
    own = {id: id for id in core}
    while _step(core, core, placed, rank, pools) or _step(own, core, placed, rank, pools):
        pass


def _step(
    place: Mapping[int, int],
    core: Mapping[int, int],
    placed: dict[Key, int],
    rank: Mapping[Key, int],
    pools: Mapping[int, tuple[int, ...]],
) -> bool:
    """One step between places: cores, or CPUs of one core or of two that exchange their loads by it."""
    load = Counter(place[id] for id in placed.values())
    cores = load if place is core else Counter(core[id] for id in placed.values())
    serving = {(rank[key], place[id]): key for key, id in sorted(placed.items(), reverse=True)}
    at = {number: sorted({place[id] for id in cpus}) for number, cpus in pools.items()}
    for start in pools:
        came = _reached(start, serving, at)
        full = [place for place in at[start] if (start, place) in serving]
        most = max(load[high] for high in full)
        for low in sorted((low for low in came if load[low] < most - 1), key=lambda low: (load[low], low)):
            for high in full:
                even = place is core or cores[core[high]] - cores[core[low]] == (core[high] != core[low])
                if load[high] - load[low] > 1 and even:
                    _shift(high, low, came, place, placed, serving, pools)
                    return True
    return False


def _reached(
    start: int, serving: Mapping[tuple[int, int], Key], at: Mapping[int, list[int]]
) -> dict[int, tuple[int, int | None]]:
    """The places that a queue of the pool ``start`` can make fuller: the last pool on the way to each, and the place before."""
    came: dict[int, tuple[int, int | None]] = {}
    ahead: list[tuple[int, int | None]] = [(start, None)]
    seen = {start}
    for number, before in ahead:
        for place in at[number]:
            came.setdefault(place, (number, before))
            new = [other for other in at if other not in seen and (other, place) in serving]
            ahead += [(other, place) for other in new]
            seen.update(new)
    return came


def _shift(
    high: int,
    low: int,
    came: Mapping[int, tuple[int, int | None]],
    place: Mapping[int, int],
    placed: dict[Key, int],
    serving: Mapping[tuple[int, int], Key],
    pools: Mapping[int, tuple[int, ...]],
) -> None:
    """Take a queue of each pool on the way from ``high`` to ``low`` one place on, to the least loaded CPU there."""
    to: int | None = low
    while to is not None:
        number, before = came[to]
        key = serving[number, high if before is None else before]
        load = Counter(placed.values())
        placed[key] = min((id for id in pools[number] if place[id] == to), key=lambda id: (load[id], id))
        to = before


class _Load:
    """How many queues each core, cache and CPU serves."""

    def __init__(self, topology: Topology) -> None:
        self._cpus = topology.cpus
        self._core: Counter[int] = Counter()
        self._llc: Counter[int] = Counter()
        self._cpu: Counter[int] = Counter()

    def add(self, id: int) -> None:
        cpu = self._cpus[id]
        self._core[cpu.core] += 1
        self._llc[cpu.llc] += 1
        self._cpu[id] += 1

    def llc(self, id: int) -> int:
        return self._cpus[id].llc

    def of_llc(self, llc: int) -> int:
        return self._llc[llc]

    def on_its_cache(self, id: int, position: int) -> tuple[int, int, int]:
        """The sort key of a CPU among those of its cache, the least loaded first; ``position`` decides between equals."""
        return self._core[self._cpus[id].core], self._cpu[id], position


class _Order:
    """The CPUs of a pool, the least loaded first: by the load of the core, of the CPU, of the cache, then in the pool's order.

    Loads must only grow meanwhile.

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
            candidate = core, cpu, self._load.of_llc(llc), position
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
"""Where a CPU is: the name of a level, and the number of the CPU's place in that level."""

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
