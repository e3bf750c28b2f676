"""Which queues follow the load, on random loads and on simulated servers; and the counters from which a load is read."""

import os
import random
from collections.abc import Callable
from statistics import mean

import pytest

from agent.hardware.load import (
    GAIN,
    HOT,
    HOT_IF_SQUEEZED,
    MOST,
    STAYS,
    WITHIN,
    CpuLoad,
    Load,
    Move,
    QueueLoad,
    balance,
    interrupts_of,
    loads,
    read_load,
    squeezes_of,
    ticks_of,
)
from agent.hardware.placement import Key, Pool
from agent.linux.files import LinuxFiles
from bench.follow_load import Server, Trial, random_server, trial

WORST = 1.1
"""The largest mean peak, as a share of the static one. Of the 2,000 servers with which the constants were chosen
(:func:`random_server`, seeds below 2,000) none had more than 1.074. Those of the tests are others.
"""

FRESH = 1_000_000
"""The first seed of the tests."""

CHANCE = random.Random(0)  # noqa: S311  the same cases in every run


@pytest.mark.parametrize("part", range(10))
def test_of_random_loads_only_what_helps_moves_within_the_bounds(part: int) -> None:
    for seed in range(part * 300, (part + 1) * 300):
        chance, now = random.Random(seed), 10_000.0  # noqa: S311  the same cases in every run
        cpus = {cpu: CpuLoad(chance.random() ** 2, chance.random() < 0.2) for cpu in range(chance.randint(1, 12))}
        pools: dict[Key, Pool] = {}
        queues: dict[Key, QueueLoad] = {}
        for number in range(chance.randint(1, 24)):
            key = ("0000:21:00.0", str(number))
            pools[key] = tuple(sorted(chance.sample(range(14), chance.randint(1, 8))))
            queues[key] = QueueLoad(chance.choice(pools[key]), chance.random() / 2)
        history = {
            key: Move(0, queues[key].cpu, now - chance.random() * 2 * STAYS) for key in queues if chance.random() < 0.3
        }
        moves = balance(queues, cpus, history, now, pools)
        recent = sum(now - move.at < WITHIN for move in history.values())
        assert len(moves) <= max(0, MOST - recent)
        busy = {cpu: load.busy for cpu, load in cpus.items()}
        for key, move in moves.items():
            assert (move.was, move.at) == (queues[key].cpu, now)
            assert move.cpu in pools[key]
            assert move.cpu in cpus
            assert key not in history or now - history[key].at >= STAYS
            assert busy[move.was] >= (HOT_IF_SQUEEZED if cpus[move.was].squeezed else HOT)
            before = max(busy[move.was], busy[move.cpu])
            busy[move.was] -= queues[key].share
            busy[move.cpu] += queues[key].share
            assert max(busy[move.was], busy[move.cpu]) <= before - GAIN + 1e-9
        assert moves == balance(dict(reversed(queues.items())), cpus, history, now, pools)


def _check(server: Server, result: Trial) -> None:
    last: dict[Key, Move] = {}
    for key, move in result.moves:
        assert move.cpu in server.pools[key]
        assert key not in last or (move.at - last[key].at >= STAYS and move.was == last[key].cpu)
        last[key] = move
    times = [move.at for _, move in result.moves]
    assert all(sum(at <= other < at + WITHIN for other in times) <= MOST for at in times)
    assert result.ratio <= WORST


@pytest.mark.parametrize(
    ("seeds", "most"),
    [(range(FRESH, FRESH + 60), 1), pytest.param(range(FRESH + 1000, FRESH + 2000), 0.96, marks=pytest.mark.slow)],
    ids=["a few", "a thousand"],
)
def test_servers_are_no_worse_than_static_and_no_queue_moves_back_soon(seeds: range, most: float) -> None:
    """They are better in the mean."""
    results = []
    for seed in seeds:
        server = random_server(seed)
        results.append(trial(server))
        _check(server, results[-1])
    assert any(result.moves for result in results)
    assert mean(result.ratio for result in results) < most


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_server_with_an_even_load_is_left_alone(share: float) -> None:
    pools = {("0000:21:00.0", str(queue)): (0, 1, 2, 3) for queue in range(8)}
    server = Server(CHANCE, pools, dict.fromkeys(range(4), 0.0), lambda minute: dict.fromkeys(pools, share / 2))
    assert trial(server, 30).moves == []


def test_a_queue_that_no_cpu_could_relieve_stays() -> None:
    pools = {("0000:21:00.0", str(queue)): (0, 1) for queue in range(2)}
    needs = dict(zip(pools, (0.9, 0.2), strict=True))
    server = Server(CHANCE, pools, {0: 0.0, 1: 0.0}, lambda minute: needs)
    assert trial(server, 30).moves == []


def test_one_reading_says_nothing_of_a_load() -> None:
    assert loads(Load(), {}, {}) == ({}, {})


STAT = """cpu  93476 83415 36321 45778 703 0 589 143 0 0
cpu0 44493 40781 16138 28575 49 3 48 67 9 9
cpu2 10 0 20 30 0 1 2
intr 1 2 3
"""
SOFTNET = """00004d6e 00000000 0000000a 0 0 0 0 0 0 00000000 00000000 00000000 00000000 00000000 00000000
0000e60d 00000000 00000001 0 0 0 0 0 0 00000000 00000000 00000000 00000002 00000000 00000000"""
INTERRUPTS = """           CPU0       CPU2
 24:          1          0  IO-APIC   5-edge      ACPI:Ged
125:         70       4000  PCI-MSIX-0000:21:00.0   1-edge      ens1-TxRx-0
NMI:          5          5   Non-maskable interrupts
"""


def test_the_ticks_in_interrupts_and_all_ticks_of_each_cpu_are_read() -> None:
    assert ticks_of(STAT) == {0: (51, 130154), 2: (3, 63)}


def test_the_cpu_of_a_line_is_its_thirteenth_column_and_before_linux_5_10_its_place() -> None:
    assert squeezes_of(SOFTNET, [0, 1, 2]) == {0: 10, 2: 1}
    before = "\n".join(line[: len("00004d6e 00000000 0000000a 0 0 0 0 0 0 00000000")] for line in SOFTNET.splitlines())
    assert squeezes_of(before, [0, 4]) == {0: 10, 4: 1}


def test_the_interrupts_of_each_cpu_are_read_by_the_names_of_the_columns() -> None:
    assert interrupts_of(INTERRUPTS) == {24: {0: 1}, 125: {0: 70, 2: 4000}}


@pytest.mark.parametrize(
    "text", ["", "\n\n", "cpu", "cpu0", ":", "x y z", "CPUx\n1:", "٣: ٣", "0 " * 40, "cpu0 " + "9" * 5000]
)
@pytest.mark.parametrize("read", [ticks_of, interrupts_of, lambda text: squeezes_of(text, [0])])
def test_nonsense_is_no_load(read: Callable[[str], object], text: str) -> None:
    assert isinstance(read(text), dict)


def test_this_machines_counters_are_read() -> None:
    (reading,) = read_load(LinuxFiles(), Load()).readings
    assert reading.ticks
    assert reading.ticks.keys() == reading.squeezed.keys() == reading.busy.keys()
    assert os.sched_getaffinity(0) <= reading.ticks.keys()
    assert reading.interrupts
