"""The placement algorithm, on machines of every shape."""

import random

from hypothesis import given
from hypothesis import strategies as st

from agent.hardware.placement import Key, Pool, from_mask, mask, place, pool, steering
from agent.hardware.topology import Cpu, Topology


def machine(
    nodes: int = 2, cores: int = 4, threads: int = 2, caches: int = 1, isolated: frozenset[int] = frozenset()
) -> Topology:
    """Numbered as Linux does: first threads of all cores first."""
    total = nodes * cores
    cpus = {}
    for id in range(total * threads):
        core = id % total
        node = core // cores
        cpus[id] = Cpu(id, node, core, node * cores + core % cores // max(1, cores // caches) * max(1, cores // caches))
    distances = {a: {b: 10 if a == b else 20 + abs(a - b) for b in range(nodes)} for a in range(nodes)}
    return Topology(cpus, isolated, distances)


machines = st.builds(
    machine,
    nodes=st.integers(1, 4),
    cores=st.integers(1, 24),
    threads=st.integers(1, 2),
    caches=st.integers(1, 3),
)


def test_a_pool_takes_first_threads_first_and_cpu_0_last() -> None:
    assert pool(machine(), 0).cpus == (1, 2, 3, 8, 9, 10, 11, 0)
    assert pool(machine(), 1).cpus == (4, 5, 6, 7, 12, 13, 14, 15)


def test_a_pool_goes_round_the_caches() -> None:
    assert pool(machine(nodes=1, cores=4, threads=1, caches=2), 0).cpus == (2, 1, 3, 0)


def test_a_thread_that_is_off_changes_no_other_core_s_turn() -> None:
    """Two caches of two cores with two threads: without CPU 4, its core's second thread, CPU 6 is still before CPU 5."""
    cpus = {id: Cpu(id, 0, id % 4, id % 4 // 2) for id in range(8)}
    orders = [
        pool(Topology({id: cpus[id] for id in ids}, frozenset(), {}), 0).cpus for ids in (range(8), {*range(8)} - {4})
    ]
    assert orders == [(2, 1, 3, 4, 6, 5, 7, 0), (2, 1, 3, 6, 5, 7, 0)]


def test_isolated_and_excluded_cpus_are_left_alone() -> None:
    topology = machine(isolated=frozenset(range(4, 8)))
    assert pool(topology, 1, exclude=frozenset({12})).cpus == (13, 14, 15)


def test_a_node_without_a_usable_cpu_gives_way_to_the_nearest() -> None:
    topology = machine(nodes=3, cores=2, threads=1, isolated=frozenset({4, 5}))
    assert pool(topology, 2) == Pool((2, 3), degraded=True)


def test_if_all_cpus_are_excluded_the_pool_has_them_nevertheless() -> None:
    assert pool(machine(nodes=1, cores=2, threads=1), 0, frozenset({0, 1})) == Pool((1, 0), degraded=True)


def test_if_all_other_cpus_are_excluded_the_isolated_ones_are_left_alone() -> None:
    topology = machine(nodes=1, cores=4, threads=1, isolated=frozenset({2, 3}))
    assert pool(topology, 0, frozenset({0, 1})) == Pool((1, 0), degraded=True)


def test_the_pool_of_an_unknown_numa_node_has_all_cpus() -> None:
    assert set(pool(machine(), -1).cpus) == set(range(16))


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
    assert all(placed[key] in pools[key].cpus for key in pools)
    for shared in set(pools.values()):
        cores = {topology.cpus[id].core: 0 for id in shared.cpus}
        for key, taken in pools.items():
            if taken == shared:
                cores[topology.cpus[placed[key]].core] += 1
        assert max(cores.values()) - min(cores.values()) <= 1

    shuffled = list(pools.items())
    random.Random(7).shuffle(shuffled)  # noqa: S311
    assert place(topology, dict(shuffled), previous) == placed
    assert place(topology, pools, placed) == placed, "a second plan moves nothing"


@given(machines, st.integers(1, 64))
def test_one_queue_more_moves_no_other(topology: Topology, queues: int) -> None:
    local = pool(topology, 0)
    pools = {("0000:01:00.0", str(queue)): local for queue in range(queues)}
    before = place(topology, pools, {})
    after = place(topology, {**pools, ("0000:01:00.0", str(queues)): local}, before)
    assert {key: after[key] for key in before} == before


def test_rps_is_off_where_every_cpu_has_a_queue() -> None:
    topology = machine()
    assert steering(topology, pool(topology, 0), 8, 1) == frozenset()


def test_rps_leaves_out_the_interrupt_s_own_cpu() -> None:
    topology = machine()
    assert steering(topology, pool(topology, 0), 1, 1) == {0, 2, 3, 8, 9, 10, 11}


def test_rps_stays_in_the_interrupt_s_cache() -> None:
    topology = machine(nodes=1, cores=4, threads=1, caches=2)
    assert steering(topology, pool(topology, 0), 1, 2) == {3}


def test_rps_uses_other_caches_if_no_other_cpu_shares_the_interrupt_s() -> None:
    topology = machine(nodes=1, cores=4, threads=1, caches=4)
    assert steering(topology, pool(topology, 0), 1, 2) == {0, 1, 3}
    assert steering(topology, Pool((1, 2, 3)), 1, 2) == {1, 3}


@given(st.frozensets(st.integers(0, 2047)))
def test_a_mask_is_parsed_to_the_cpus_it_was_made_of(cpus: frozenset[int]) -> None:
    assert from_mask(mask(cpus)) == cpus
    assert all(len(group) == 8 for group in mask(cpus).split(","))
