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

    What was placed before stays while its core is not over the fair share; the rest goes to the least loaded core,
    cache and CPU; then single queues move until no core of a pool has two more than another. The order of the input
    does not matter.
    """
    share = _fair_shares(topology, pools)
    placed: dict[Key, int] = {}
    load = _Load(topology)
    for key in sorted(pools):
        cpu = previous.get(key)
        if cpu in pools[key].cpus and load.of_core(cpu) < share[pools[key]]:
            placed[key] = cpu
            load.add(cpu)
    queues = {pool: _Queue(load, pool) for pool in share}
    for key in sorted(pools.keys() - placed.keys()):
        placed[key] = queues[pools[key]].least()
        load.add(placed[key])
    lightest = {pool: load.lightest(pool) for pool in share}
    for key in sorted(pools):
        if load.of_core(placed[key]) - lightest[pools[key]] > 1:
            best = load.least(pools[key])
            load.remove(placed[key])
            load.add(best)
            placed[key] = best
            lightest = {pool: load.lightest(pool) for pool in share}
    return placed


def _fair_shares(topology: Topology, pools: Mapping[Key, Pool]) -> dict[Pool, int]:
    users = Counter(pools.values())
    cores = {pool: len({topology.cpus[id].core for id in pool.cpus}) for pool in users}
    return {pool: -(-count // cores[pool]) for pool, count in users.items()}


class _Load:
    """How many queues each core, cache and CPU serves."""

    def __init__(self, topology: Topology) -> None:
        self._cpus = topology.cpus
        self._core: Counter[int] = Counter()
        self._llc: Counter[int] = Counter()
        self._cpu: Counter[int] = Counter()

    def add(self, id: int, by: int = 1) -> None:
        cpu = self._cpus[id]
        self._core[cpu.core] += by
        self._llc[cpu.llc] += by
        self._cpu[id] += by

    def remove(self, id: int) -> None:
        self.add(id, -1)

    def of_core(self, id: int) -> int:
        return self._core[self._cpus[id].core]

    def burden(self, id: int) -> tuple[int, int, int]:
        cpu = self._cpus[id]
        return self._core[cpu.core], self._llc[cpu.llc], self._cpu[id]

    def least(self, pool: Pool) -> int:
        return min(pool.cpus, key=self.burden)

    def lightest(self, pool: Pool) -> int:
        """The load of the core that has the least."""
        return min(self._core[self._cpus[id].core] for id in pool.cpus)


class _Queue:
    """A pool's CPUs, the least loaded first, as long as loads only grow: a burden that has grown since is put back."""

    def __init__(self, load: _Load, pool: Pool) -> None:
        self._load = load
        self._heap = [(load.burden(id), position, id) for position, id in enumerate(pool.cpus)]
        heapify(self._heap)

    def least(self) -> int:
        while True:
            burden, position, id = self._heap[0]
            now = self._load.burden(id)
            if burden == now:
                return id
            heapreplace(self._heap, (now, position, id))


def steering(topology: Topology, pool: Pool, queues: int, irq_cpu: int) -> frozenset[int]:
    """The CPUs to which RPS spreads one of ``queues`` receive queues, whose interrupt ``irq_cpu`` takes; none turns RPS off.

    Off where each CPU can have a queue of its own (Documentation/networking/scaling.rst); else the pool's CPUs that
    share the interrupt's last-level cache, without the one that the interrupt already loads.
    """
    if queues >= len(pool.cpus):
        return frozenset()
    near = {id for id in pool.cpus if topology.cpus[id].llc == topology.cpus[irq_cpu].llc} or set(pool.cpus)
    others = near - {irq_cpu}
    return frozenset(others or near)


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
