"""The placement compared with every possible one, on machines that are small enough to try all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

import pytest
from attrs import evolve, frozen

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

    def served(self, placed: dict[Key, int]) -> Counter[tuple[tuple[int, ...], int]]:
        """How many queues of each pool each CPU serves."""
        return Counter((self.pools[key].cpus, id) for key, id in placed.items())

    def moved(self, placed: dict[Key, int]) -> int:
        """How many queues are not where they were, of those that could have stayed."""
        return sum(id in self.pools[key].cpus and placed[key] != id for key, id in self.previous.items())


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


@pytest.mark.parametrize("cut", [False, True], ids=["whole pools", "pools with full CPUs"])
def test_no_placement_with_the_same_loads_has_fewer_moves(cut: bool) -> None:
    for case in cases(2, 1500, cut):
        loads = case.served(place(case.topology, case.pools, {}))
        placed = place(case.topology, case.pools, case.previous)
        assert case.served(placed) == loads
        fewest = min(case.moved(other) for other in case.every() if case.served(other) == loads)
        assert case.moved(placed) == fewest, case
        assert place(case.topology, case.pools, placed) == placed


def after(topology: Topology, nics: list[tuple[int, int]], offline: Iterable[frozenset[int]]) -> list[dict[Key, int]]:
    """The placements while these CPUs are off, one after the other."""
    placed: list[dict[Key, int]] = []
    for off in offline:
        rest = evolve(topology, cpus={id: cpu for id, cpu in topology.cpus.items() if id not in off})
        local = {
            (f"{nic}", f"{queue}"): pool(rest, node) for nic, (node, count) in enumerate(nics) for queue in range(count)
        }
        placed.append(place(rest, local, placed[-1] if placed else {}))
    return placed


def test_cpus_that_were_off_get_their_queues_back() -> None:
    """All of one time off return together: the first placement does, too. Else queues of one pool may stay exchanged."""
    chance = random.Random(3)  # noqa: S311  as above
    exchanged = 0
    for _ in range(300):
        topology = machine(chance)
        nics = [(chance.randint(-1, 1), chance.randint(1, 6)) for _ in range(chance.randint(1, 2))]
        some = frozenset(chance.sample(sorted(topology.cpus), min(2, len(topology.cpus) - 1)))
        one = frozenset(list(some)[:1])
        first, _, back = after(topology, nics, (frozenset(), some, frozenset()))
        assert back == first
        first, *_, back = after(topology, nics, (frozenset(), one, some, some - one, frozenset()))
        local = {key: pool(topology, nics[int(key[0])][0]) for key in first}
        case = Case(topology, local, {})
        assert case.served(back) == case.served(first)
        exchanged += back != first
    assert exchanged, "the decision says that this happens (docs/decisions/0012)"
