"""The placement of queues on CPUs: examples, then properties that hold on any machine."""

import random
from collections import Counter
from collections.abc import Callable, Set
from itertools import combinations
from typing import TypeVar

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.hardware.placement import Key, Pool, Senders, from_mask, mask, place, pool, steering
from agent.hardware.topology import Cpu, Topology

Pools = dict[Key, Pool]
Test = TypeVar("Test", bound=Callable[..., None])


def relaxed(test: Test) -> Test:
    """A slow test. A machine that is busy with other things is no finding."""
    marked: Test = pytest.mark.slow(settings(deadline=None)(test))
    return marked


def machine(
    nodes: int = 2,
    cores: int = 4,
    threads: int = 2,
    caches: int = 1,
    isolated: frozenset[int] = frozenset(),
    stride: int = 1,
    offline: frozenset[int] = frozenset(),
    without_memory_of_its_own: bool = False,
) -> Topology:
    """Numbered as Linux does, first threads first; ``stride`` leaves ids out, ``offline`` positions are not there.

    The distances also name a node that has memory and no CPU.
    """
    total = nodes * cores
    cpus = {}
    per_cache = max(1, -(-cores // caches))
    for position in range(total * threads):
        core = position % total
        node = core // cores
        if position in offline:
            continue
        id = position * stride
        cache = node * cores + core % cores // per_cache * per_cache
        cpus[id] = Cpu(id, node, core * stride, cache * stride)
    if not cpus:
        cpus[0] = Cpu(0, 0, 0, 0)
    seen = range(nodes + without_memory_of_its_own)
    distances = {a: {b: 10 if a == b else 20 + abs(a - b) for b in seen} for a in seen}
    return Topology(cpus, isolated, distances)


machines = st.builds(
    machine,
    nodes=st.integers(1, 4),
    cores=st.integers(1, 12),
    threads=st.integers(1, 2),
    caches=st.integers(1, 3),
    stride=st.sampled_from([1, 2, 4, 37]),
    offline=st.frozensets(st.integers(0, 20), max_size=6),
    without_memory_of_its_own=st.booleans(),
)
# A NIC: its node (-1: unknown, 4: one without CPUs) and its queues.
nics = st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 24)), min_size=1, max_size=5)
# With a NIC of an unknown node, pools overlap: a queue may then move for one that moved.
nics_with_nodes = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("topology", "node", "exclude", "chosen"),
    [
        # First threads first, and CPU 0 last.
        (machine(), 0, (), (1, 2, 3, 8, 9, 10, 11, 0)),
        (machine(), 1, (), (4, 5, 6, 7, 12, 13, 14, 15)),
        # It goes round the caches.
        (machine(nodes=1, cores=4, threads=1, caches=2), 0, (), (2, 1, 3, 0)),
        (machine(isolated=frozenset(range(4, 8))), 1, (12,), (13, 14, 15)),
        # A node without a usable CPU gives way to the nearest.
        (machine(nodes=3, cores=2, threads=1, isolated=frozenset({4, 5})), 2, (), (2, 3)),
        # If all CPUs are excluded, the pool has them nevertheless, but not the isolated ones.
        (machine(nodes=1, cores=2, threads=1), 0, (0, 1), (1, 0)),
        (machine(nodes=1, cores=4, threads=1, isolated=frozenset({2, 3})), 0, (0, 1), (1, 0)),
    ],
)
def test_a_pool_has_the_cpus_of_its_node_in_the_order_in_which_they_are_taken(
    topology: Topology, node: int, exclude: tuple[int, ...], chosen: Pool
) -> None:
    assert pool(topology, node, frozenset(exclude)) == chosen


def test_a_thread_that_is_off_changes_no_other_core_s_turn() -> None:
    """Two caches of two cores with two threads: without CPU 4, its core's second thread, CPU 6 is still before CPU 5."""
    cpus = {id: Cpu(id, 0, id % 4, id % 4 // 2) for id in range(8)}
    orders = [pool(Topology({id: cpus[id] for id in ids}, frozenset(), {}), 0) for ids in (range(8), {*range(8)} - {4})]
    assert orders == [(2, 1, 3, 4, 6, 5, 7, 0), (2, 1, 3, 6, 5, 7, 0)]


def test_the_pool_of_an_unknown_numa_node_has_all_cpus() -> None:
    assert set(pool(machine(), -1)) == set(range(16))


@given(machines, st.data())
def test_on_any_machine_any_queues_are_spread_evenly_and_stay(topology: Topology, data: st.DataObject) -> None:
    nodes = sorted({cpu.node for cpu in topology.cpus.values()})
    pools: dict[Key, Pool] = {
        (f"0000:{nic:02x}:00.0", str(queue)): pool(topology, node)
        for nic, node in enumerate(data.draw(st.lists(st.sampled_from(nodes), max_size=4)))
        for queue in range(data.draw(st.integers(1, 40)))
    }
    everything = st.sampled_from([*topology.cpus, 9999])
    previous = {key: data.draw(everything) for key in pools if data.draw(st.booleans())}
    placed = place(topology, pools, previous)

    assert placed.keys() == pools.keys()
    assert all(placed[key] in pools[key] for key in pools)
    for shared in set(pools.values()):
        cores = {topology.cpus[id].core: 0 for id in shared}
        for key, taken in pools.items():
            if taken == shared:
                cores[topology.cpus[placed[key]].core] += 1
        assert max(cores.values()) - min(cores.values()) <= 1

    shuffled, had = list(pools.items()), list(previous.items())
    for items in (shuffled, had):
        random.Random(7).shuffle(items)  # noqa: S311
    assert place(topology, dict(shuffled), dict(had)) == placed
    assert place(topology, pools, placed) == placed, "a second plan moves nothing"


@pytest.mark.parametrize(
    ("topology", "queues", "steered"),
    [
        # Every CPU has a queue.
        (machine(), 8, set()),
        (machine(), 1, {0, 2, 3, 8, 9, 10, 11}),
        # It stays in the cache of the interrupt's CPU, unless no other CPU shares it.
        (machine(nodes=1, cores=4, threads=1, caches=2), 1, {0}),
        (machine(nodes=1, cores=4, threads=1, caches=4), 1, {0, 2, 3}),
    ],
)
def test_rps_leaves_out_the_interrupt_s_own_cpu(topology: Topology, queues: int, steered: set[int]) -> None:
    assert steering(topology, pool(topology, 0), queues, 1) == steered


def test_rps_uses_only_cpus_of_the_pool() -> None:
    assert steering(machine(nodes=1, cores=4, threads=1, caches=4), (1, 2, 3), 1, 2) == {1, 3}


def test_where_only_the_threads_of_a_core_share_a_cache_rps_uses_the_other_cores_too() -> None:
    """QEMU may show no cache of the third level (https://github.com/containers/nri-plugins/pull/716)."""
    topology = machine(nodes=1, cores=4, threads=2, caches=4)
    assert steering(topology, pool(topology, 0), 1, 1) == {0, 2, 3, 4, 5, 6, 7}


def test_of_queues_that_are_equally_near_a_cpu_sends_through_the_one_with_the_fewest_senders() -> None:
    topology = machine(nodes=1, cores=8, threads=1)
    masks = Senders(topology, topology.cpus).transmitting({0: 0, 1: 1})
    assert [len(cpus) for cpus in masks.values()] == [4, 4]


@given(st.frozensets(st.integers(0, 2047)))
def test_a_mask_is_parsed_to_the_cpus_it_was_made_of(cpus: frozenset[int]) -> None:
    assert from_mask(mask(cpus)) == cpus
    assert all(len(group) == 8 for group in mask(cpus).split(","))


# --- properties: hypothesis searches for a counterexample ----------------------------------------------------------------


def pools_of(topology: Topology, wanted: list[tuple[int, int]]) -> Pools:
    return {
        (f"0000:{nic:02x}:00.0", str(queue)): pool(topology, node)
        for nic, (node, queues) in enumerate(wanted)
        for queue in range(queues)
    }


def with_full(pools: Pools, full: frozenset[int], chance: random.Random) -> Pools:
    """Some CPUs have no free vector. Some queues stay on one of them; others have the rest of their pool, if there is any."""
    left = {key: tuple(id for id in taken if id not in full) or taken for key, taken in pools.items()}
    there = {key: [id for id in taken if id in full] for key, taken in pools.items()}
    return {
        key: (chance.choice(there[key]),) if there[key] and chance.random() < 0.4 else cpus
        for key, cpus in left.items()
    }


def loads(topology: Topology, placed: dict[Key, int]) -> list[int]:
    """How many queues the cores serve, the least loaded first."""
    load = Counter(topology.cpus[cpu].core for cpu in placed.values())
    return sorted(load[core] for core in {cpu.core for cpu in topology.cpus.values()})


def most_even(topology: Topology, pools: Pools) -> list[int]:
    """What :func:`loads` says of the most even placement that there is.

    One queue after another takes the least loaded core that it, or a queue that makes room for it, can reach. This is
    algorithm ASM1 of Harvey and others, "Semi-matchings for bipartite graphs and load balancing", which proves it optimal.
    """
    cores = {key: {topology.cpus[id].core for id in taken} for key, taken in pools.items()}
    at: dict[Key, int] = {}
    load = Counter({cpu.core: 0 for cpu in topology.cpus.values()})
    for new in pools:
        came: dict[int, tuple[Key, int | None]] = {}
        ahead: list[tuple[Key, int | None]] = [(new, None)]
        for key, before in ahead:
            for core in cores[key] - came.keys():
                came[core] = key, before
                ahead += [(other, core) for other, there in at.items() if there == core]
        fuller = min(came, key=lambda core: load[core])
        load[fuller] += 1
        to: int | None = fuller
        while to is not None:
            key, before = came[to]
            at[key], to = to, before
    return sorted(load.values())


def uneven_siblings(topology: Topology, pools: Pools, placed: dict[Key, int]) -> list[tuple[Key, int]]:
    """Queues that could go to a sibling of their CPU that serves at least two less."""
    load = Counter(placed.values())
    return [
        (key, other)
        for key, cpu in placed.items()
        for other in pools[key]
        if topology.cpus[other].core == topology.cpus[cpu].core and load[cpu] - load[other] > 1
    ]


def moved(before: dict[Key, int], after: dict[Key, int]) -> set[Key]:
    return {key for key in before.keys() & after.keys() if before[key] != after[key]}


def without_cpus(topology: Topology, off: Set[int]) -> Topology:
    return evolve(topology, cpus={id: cpu for id, cpu in topology.cpus.items() if id not in off})


@relaxed
@given(
    machines, st.frozensets(st.integers(0, 60)), st.frozensets(st.integers(0, 60)), st.frozensets(st.integers(0, 60))
)
def test_two_pools_are_disjoint_or_one_contains_the_other(
    topology: Topology, isolated: frozenset[int], excluded: frozenset[int], full: frozenset[int]
) -> None:
    """The placement depends on it, for CPUs and for cores."""
    topology = evolve(topology, isolated=isolated & topology.cpus.keys())
    every = [set(pool(topology, node, excluded)) for node in range(-1, 5)]
    for left in ([cpus - full or cpus for cpus in every], every):
        for one, other in combinations(left, 2):
            for place_of in (int, lambda id: topology.cpus[id].core):
                a, b = set(map(place_of, one)), set(map(place_of, other))
                assert a <= b or b <= a or not a & b


@relaxed
@given(machines, nics_with_nodes, st.data())
def test_a_queue_more_moves_no_other_and_a_queue_less_moves_one_at_most(
    topology: Topology, wanted: list[tuple[int, int]], data: st.DataObject
) -> None:
    pools = pools_of(topology, wanted)
    one = data.draw(st.sampled_from(sorted(pools)))
    less = {key: taken for key, taken in pools.items() if key != one}
    with_it, without = place(topology, pools, {}), place(topology, less, {})
    assert moved(without, place(topology, pools, without)) == set()
    assert len(moved(with_it, place(topology, less, with_it))) <= 1


@relaxed
@given(machines, nics_with_nodes, st.data())
def test_a_cpu_off_moves_only_what_it_served(
    topology: Topology, wanted: list[tuple[int, int]], data: st.DataObject
) -> None:
    off = data.draw(st.sampled_from(sorted(topology.cpus)))
    rest = without_cpus(topology, {off})
    if not rest.cpus:
        return
    before = place(topology, pools_of(topology, wanted), {})
    after = place(rest, pools_of(rest, wanted), before)
    served = {key for key, cpu in before.items() if cpu == off}
    assert served <= moved(before, after)
    # Without CPU 0, which comes last, its core's sibling becomes a first thread, and comes first.
    assert len(moved(before, after) - served) <= (len(served) + 1 if off == 0 else 0)


@relaxed
@given(machines, nics, st.data())
def test_cpus_that_go_off_and_on_together_get_their_queues_back(
    topology: Topology, wanted: list[tuple[int, int]], data: st.DataObject
) -> None:
    off = data.draw(st.frozensets(st.sampled_from(sorted(topology.cpus)), max_size=len(topology.cpus) - 1))
    rest = without_cpus(topology, off)
    first = place(topology, pools_of(topology, wanted), {})
    meanwhile = place(rest, pools_of(rest, wanted), first)
    assert place(topology, pools_of(topology, wanted), meanwhile) == first


@relaxed
@given(machines, nics, st.frozensets(st.integers(0, 30)), st.randoms())
def test_no_placement_is_more_even(
    topology: Topology, wanted: list[tuple[int, int]], full: frozenset[int], chance: random.Random
) -> None:
    """Whatever was before, and whichever CPUs are full: in a first placement, too."""
    pools = with_full(pools_of(topology, wanted), full, chance)
    previous = {key: chance.choice([*topology.cpus, 9999]) for key in pools if chance.random() < 0.5}
    optimum = most_even(topology, pools)
    for placed in (place(topology, pools, previous), place(topology, pools, {})):
        assert placed.keys() == pools.keys()
        assert all(cpu in pools[key] for key, cpu in placed.items())
        assert loads(topology, placed) == optimum
        assert not uneven_siblings(topology, pools, placed)


@relaxed
@given(machines, nics, st.frozensets(st.integers(0, 30)), st.randoms())
def test_no_more_queues_move_than_a_first_placement_s_loads_need(
    topology: Topology, wanted: list[tuple[int, int]], full: frozenset[int], chance: random.Random
) -> None:
    pools = with_full(pools_of(topology, wanted), full, chance)
    previous = {key: chance.choice(pools[key]) for key in pools}
    first = Counter((pools[key], cpu) for key, cpu in place(topology, pools, {}).items())
    surplus = Counter((pools[key], cpu) for key, cpu in previous.items()) - first
    assert len(moved(previous, place(topology, pools, previous))) == surplus.total()


@relaxed
@given(machines, nics, st.data())
def test_whatever_changes_some_cpu_of_the_pool_serves_each_queue(
    topology: Topology, wanted: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Also where pools overlap: CPUs come and go, and every placement stays one that a second does not move."""
    placed: dict[Key, int] = {}
    for _ in range(3):
        off = data.draw(st.frozensets(st.sampled_from(sorted(topology.cpus)), max_size=len(topology.cpus) - 1))
        rest = without_cpus(topology, off)
        pools = pools_of(rest, wanted)
        placed = place(rest, pools, placed)
        assert all(placed[key] in pools[key] for key in pools)
        assert place(rest, pools, placed) == placed


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(st.integers(65, 130), st.integers(1, 8))
def test_more_than_64_and_more_than_1024_cpus_each_serve_their_share(cores: int, nodes: int) -> None:
    topology = machine(nodes=nodes, cores=cores, threads=2)
    pools = pools_of(topology, [(node, cores) for node in range(nodes)])
    placed = place(topology, pools, {})
    assert len(set(placed.values())) == nodes * cores, "a core for each queue"
    last = f"0000:{nodes - 1:02x}:00.0"
    assert all(topology.cpus[cpu].node == nodes - 1 for (nic, _), cpu in placed.items() if nic == last)


@relaxed
@given(machines, st.integers(1, 64), st.randoms())
def test_each_cpu_sends_through_one_queue_and_the_nearest(
    topology: Topology, queues: int, chance: random.Random
) -> None:
    served = {queue: chance.choice(sorted(topology.cpus)) for queue in range(queues)}
    masks = Senders(topology, topology.cpus).transmitting(served)
    assert sorted(id for cpus in masks.values() for id in cpus) == sorted(topology.cpus)
    assert masks.keys() == served.keys()
    for queue, cpus in masks.items():
        for id in cpus:
            near = topology.cpus[served[queue]]
            if near.node != topology.cpus[id].node:
                assert topology.cpus[id].node not in {topology.cpus[cpu].node for cpu in served.values()}
            if near.core != topology.cpus[id].core:
                assert topology.cpus[id].core not in {topology.cpus[cpu].core for cpu in served.values()}
    shuffled = dict(sorted(served.items(), key=lambda item: -item[0]))
    assert Senders(topology, sorted(topology.cpus, reverse=True)).transmitting(shuffled) == masks
