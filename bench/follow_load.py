"""Compares interrupts that follow the load (``irqs.follow_load``) with those that stay, on simulated servers.

    .venv/bin/python -m bench.follow_load --servers 1000

The servers and their traffic are made, not recorded: random flows that come and go, hashed to queues. The agent's own functions
make loads of the counters, and choose the moves. A server's peak is what its busiest CPU should do in a minute, as a share of
what it can do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import pi, sin
from statistics import mean, quantiles

import click
from attrs import define, field, frozen

from agent.hardware.load import CpuCounters, Load, Move, balance, loads
from agent.hardware.placement import Key, Pool, place
from agent.hardware.topology import Cpu, Topology
from handbook import campaign

COLUMNS = {"of": "of made", "static": "static", "following": "irqs.follow_load", "moves": "moves"}

MINUTES, DAY = 240, 1440
"""How long a random server is watched, and one on a made day."""

TICKS = 6000
"""Of a CPU in a minute."""

PACKETS = 100_000
"""Interrupts of a queue that takes a whole CPU for a minute."""


@define
class Server:
    """``demand``: the share of a CPU that each queue needs in a minute. ``background``: that of other interrupts, by CPU.

    ``noise``: how far readings are off, at most. ``polling``: a queue of a busy CPU is polled, so that it has few interrupts.
    """

    chance: random.Random
    pools: Mapping[Key, Pool]
    background: Mapping[int, float]
    demand: Callable[[int], Mapping[Key, float]]
    noise: float = 0.0
    polling: bool = False
    _busy: Counter[int] = field(factory=Counter)
    _served: dict[int, Counter[int]] = field(factory=dict)

    def static(self) -> dict[Key, int]:
        """The placement without a load."""
        return place(Topology({cpu: Cpu(cpu, 0, cpu, 0) for cpu in self.background}, frozenset(), {}), self.pools, {})

    def load(self, needs: Mapping[Key, float], placed: Mapping[Key, int]) -> dict[int, float]:
        """The demand of each CPU."""
        of_cpus = dict(self.background)
        for key, need in needs.items():
            of_cpus[placed[key]] += need
        return of_cpus

    def read(self, minute: int, needs: Mapping[Key, float], placed: Mapping[Key, int]) -> CpuCounters:
        """The counters after a minute."""
        of_cpus = self.load(needs, placed)
        for cpu, demand in of_cpus.items():
            self._busy[cpu] += min(TICKS, int(TICKS * min(1.0, demand) * self._off(self.noise / 4)))
        for number, (key, need) in enumerate(sorted(needs.items())):
            polled = 1.05 - min(1.0, of_cpus[placed[key]]) if self.polling else 1.0
            count = int(PACKETS * need * polled * self._off(self.noise))
            self._served.setdefault(number, Counter())[placed[key]] += count
        ticks = dict.fromkeys(of_cpus, TICKS * (minute + 1))
        interrupts = {number: dict(served) for number, served in self._served.items()}
        return CpuCounters(60.0 * (minute + 1), dict(self._busy), ticks, {}, interrupts)

    def _off(self, most: float) -> float:
        return self.chance.uniform(1 - most, 1 + most)


@frozen
class Trial:
    """The server's peak in each minute, static and following the load, and the moves in their order."""

    static: Sequence[float]
    following: Sequence[float]
    moves: Sequence[tuple[Key, Move]]

    @property
    def ratio(self) -> float:
        """The mean peak that follows the load, as a share of the static one."""
        return mean(self.following) / mean(self.static)


def trial(server: Server, minutes: int = MINUTES) -> Trial:
    """Watch a server for so long, with the agent's functions."""
    static = server.static()
    placed, load, numbers = dict(static), Load(), dict(enumerate(sorted(server.pools)))
    peaks, static_peaks, moved = [], [], []
    for minute in range(minutes):
        needs = server.demand(minute)
        static_peaks.append(max(server.load(needs, static).values()))
        peaks.append(max(server.load(needs, placed).values()))
        load = load.adding(server.read(minute, needs, placed))
        moves = balance(*loads(load, numbers, placed), load.moves, load.readings[-1].at, server.pools)
        load = Load(load.readings, {**load.moves, **moves})
        placed |= {key: move.cpu for key, move in moves.items()}
        moved += sorted(moves.items())
    return Trial(static_peaks, peaks, moved)


def random_server(seed: int) -> Server:
    """A server with 4 to 32 CPUs, one to four NICs, and flows of a random number, size and length."""
    chance = random.Random(seed)  # noqa: S311  the same servers in every run
    cpus, nodes = chance.choice([4, 8, 8, 16]), chance.choice([1, 1, 2])
    of_node = [tuple(range(node * cpus, (node + 1) * cpus)) for node in range(nodes)]
    pools: dict[Key, Pool] = {}
    for nic in range(chance.randint(1, 4)):
        local, queues = chance.choice(of_node), chance.choice([cpus // 2, cpus, cpus, 4, 8])
        pools |= {(f"0000:{nic:02x}:00.0", str(queue)): local for queue in range(queues)}
    minutes, heavy, count = (
        chance.choice([3, 10, 30, 120, 600]),
        chance.choice([1.1, 1.5, 2.5]),
        chance.choice([3, 10, 40, 150]),
    )
    unit = chance.uniform(0.05, 0.6) * cpus * nodes / (count * min(4.0, heavy / (heavy - 1)))
    flows: list[tuple[Key, float]] = []

    def demand(minute: int) -> Mapping[Key, float]:
        stay = [flow for flow in flows if chance.random() > 1 / minutes]
        come = count if minute == 0 else sum(chance.random() < 1 / minutes for _ in range(count))
        new = [(chance.choice(list(pools)), min(0.7, unit * chance.paretovariate(heavy))) for _ in range(come)]
        flows[:] = stay + new
        needs = dict.fromkeys(pools, 0.0)
        for key, need in flows:
            needs[key] += need
        return needs

    background = {cpu: chance.random() * 0.1 for cpu in range(cpus * nodes)}
    return Server(chance, pools, background, demand, chance.choice([0.0, 0.2, 0.5]), chance.random() < 0.5)


def made_day(seed: int) -> Server:
    """A server with 16 CPUs, two NICs of 16 queues and eight VFs of two, on a working day.

    Requests rise and fall with the hour, on all queues alike. A backup comes through four queues from 2:00 to 4:00, and a job
    reads through twelve from 20:00 to 23:00. From 9:00 to 18:00 eight streams come and go, for an hour on average.
    """
    chance = random.Random(seed)  # noqa: S311  the same days in every run
    cpus = tuple(range(16))
    functions = [(f"0000:{nic:02x}:00.0", 16) for nic in range(2)] + [(f"0000:00:00.0#{vf}", 2) for vf in range(8)]
    keys = [(function, str(queue)) for function, count in functions for queue in range(count)]
    flows = [(120, 240, key, 0.4) for key in chance.sample(keys, 4)]
    flows += [(1200, 1380, key, 0.2) for key in chance.sample(keys, 12)]
    for _ in range(8):
        at = 540.0
        while at < 1080:
            end = min(1080.0, at + chance.expovariate(1 / 60))
            flows.append((int(at), int(end), chance.choice(keys), chance.uniform(0.2, 0.6)))
            at = end

    def demand(minute: int) -> Mapping[Key, float]:
        hour = 0.02 + 0.05 * max(0.0, sin(pi * (minute / 60 - 6) / 14))
        needs = {key: hour * chance.uniform(0.7, 1.3) for key in keys}
        for begin, end, key, need in flows:
            needs[key] += need if begin <= minute < end else 0.0
        return needs

    return Server(chance, dict.fromkeys(keys, cpus), dict.fromkeys(range(16), 0.02), demand, 0.2, polling=True)


def rows(trials: Sequence[Trial], days: Sequence[Trial]) -> list[dict[str, str]]:
    """The table of both."""
    ratios = [each.ratio for each in trials]
    followed = f"{mean(ratios):.3f}, at most {max(ratios):.3f}, {sum(ratio > 1 for ratio in ratios)} above 1"
    found = [(f"{len(trials)} servers: mean peak, as a share of the static one", "1", followed, _moves(trials))]
    measures: dict[str, Callable[[Sequence[float]], float]] = {
        "p99 of the peak": lambda peaks: quantiles(peaks, n=100)[-1],
        "minutes with a peak above 0.9": lambda peaks: sum(peak > 0.9 for peak in peaks),
    }
    for name, measure in measures.items():
        static, following = mean(measure(day.static) for day in days), mean(measure(day.following) for day in days)
        found.append((f"{len(days)} days: {name}", f"{static:.2f}", f"{following:.2f}", _moves(days)))
    return [dict(zip(COLUMNS, row, strict=True)) for row in found]


def _moves(trials: Sequence[Trial]) -> str:
    return f"{mean(len(each.moves) for each in trials):.0f}"


@click.command(help=__doc__)
@click.option("--servers", default=200, show_default=True, help="How many random servers.")
@click.option("--days", default=20, show_default=True, help="How many made days, which differ by their flows.")
@click.option("--record", is_flag=True, help="Write the table to docs/campaign/follow_load.json.")
def main(servers: int, days: int, record: bool) -> None:
    """Print the table."""
    runs = rows(
        [trial(random_server(seed)) for seed in range(servers)], [trial(made_day(seed), DAY) for seed in range(days)]
    )
    click.echo("\n".join(" | ".join(run.values()) for run in [COLUMNS, *runs]))
    if record:
        campaign.write("follow_load", COLUMNS, runs)


if __name__ == "__main__":
    main()
