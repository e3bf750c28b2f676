"""The placement compared with every possible one, on machines that are small enough to try all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

import pytest
from attrs import frozen

from agent.hardware.placement import Key, Pool, place, pool
from agent.hardware.topology import Cpu, Topology

pytestmark = pytest.mark.slow

CPUS, QUEUES = 6, 6
MOST = 5000
"""The most placements of one machine that are tried."""


def machine(chance: random.Random) -> Topology:
    """Cores may have one thread or several, caches may be shared or not, and CPUs may be isolated."""
    count = chance.randint(1, CPUS)
    cores, nodes = chance.randint(1, count), chance.randint(1, 2)
    llc = {core: core if chance.random() < 0.3 else CPUS + core % nodes for core in range(cores)}
    cpus = {id: Cpu(id, id % cores % nodes, id % cores, llc[id % cores]) for id in range(count)}
    isolated = frozenset(id for id in cpus if chance.random() < 0.1)
    return Topology(cpus, isolated, {a: {b: 10 if a == b else 20 for b in range(nodes)} for a in range(nodes)})


def pools(topology: Topology, chance: random.Random, cut: bool) -> dict[Key, Pool]:
    """The queues of some NICs. ``cut``: some CPUs have no vector left, but for some queues, which stay on one of them."""
    queues: dict[Key, Pool] = {}
    full = frozenset(id for id in topology.cpus if cut and chance.random() < 0.3)
    for nic in range(chance.randint(1, 3)):
        local = pool(topology, chance.randint(-1, 1))
        for queue in range(chance.randint(1, QUEUES - len(queues)) if len(queues) < QUEUES else 0):
            left = tuple(id for id in local.cpus if id not in full) or local.cpus
            own = [id for id in local.cpus if id in full and chance.random() < 0.3]
            queues[f"0000:{nic:02x}:00.0", str(queue)] = Pool((own[0],) if own else left)
    return queues


@frozen
class Case:
    """``previous``: where some of the queues were before, some of them on CPUs that are not in their pool."""

    topology: Topology
    pools: dict[Key, Pool]
    previous: dict[Key, int]

    def every(self) -> Iterator[dict[Key, int]]:
        """Every placement that the pools allow."""
        keys = sorted(self.pools)
        for cpus in product(*(self.pools[key].cpus for key in keys)):
            yield dict(zip(keys, cpus, strict=True))

    def unevenness(self, placed: dict[Key, int]) -> tuple[int, int]:
        """Two sums of squares: one of the cores' loads, one of the CPUs' loads."""
        return _squares(self.topology.cpus[id].core for id in placed.values()), _squares(placed.values())


def _squares(places: Iterable[int]) -> int:
    return sum(load * load for load in Counter(places).values())


def cases(seed: int, count: int, cut: bool) -> Iterator[Case]:
    chance = random.Random(seed)  # noqa: S311  the same machines each time
    while count:
        topology = machine(chance)
        queues = pools(topology, chance, cut)
        previous = {key: chance.choice([*topology.cpus, 99]) for key in queues if chance.random() < 0.6}
        case = Case(topology, queues, previous)
        size = 1
        for taken in queues.values():
            size *= len(taken.cpus)
        if size <= MOST:
            count -= 1
            yield case


@pytest.mark.parametrize("cut", [False, True], ids=["whole pools", "pools with full CPUs"])
def test_no_placement_is_more_even_on_cores_nor_then_on_cpus(cut: bool) -> None:
    for case in cases(1, 1500, cut):
        least = min(map(case.unevenness, case.every()))
        for placed in (place(case.topology, case.pools, {}), place(case.topology, case.pools, case.previous)):
            assert all(id in case.pools[key].cpus for key, id in placed.items())
            assert case.unevenness(placed) == least, case
