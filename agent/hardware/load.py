"""Interrupts follow the load: how much time CPUs spend on packets, and which queues should move to other CPUs.

Pure functions, but for :func:`read_load`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from attrs import field, frozen

from agent.hardware.placement import Key, Pool
from agent.hardware.sysfs import parsed, read_or, whole
from agent.machine import Files

APART = 30.0
"""Seconds between two readings that are kept, at least: what a pass reads again soon after says nothing about a load."""

SPAN = 200.0
"""Seconds over which loads are averaged. They are three passes long, so that a short burst moves no queue."""

MOST, WITHIN = 2, 60.0
"""How many queues may move within so many seconds."""

STAYS = 600.0
"""Seconds for which a queue that moved stays where it is."""

HOT, HOT_IF_SQUEEZED = 0.5, 0.25
"""The share of its time in interrupts from which a CPU gives queues away; the second if it leaves packets for later."""

SQUEEZES = 1.0
"""How often a second a CPU must leave packets for later to count as squeezed: that happens now and then on each machine."""

GAIN = 0.1
"""By which share of a CPU's time a move must relieve the busier of both CPUs, at least."""


@frozen
class CpuCounters:
    """The kernel's counters, ``at`` so many seconds since the boot.

    By CPU, ``busy``: the ticks in interrupts and softirqs; ``ticks``: all ticks; ``squeezed``: how often it left packets for
    later, since their time was over (time_squeeze). ``interrupts``: how many each CPU has served, by their number.
    """

    at: float
    busy: Mapping[int, int]
    ticks: Mapping[int, int]
    squeezed: Mapping[int, int]
    interrupts: Mapping[int, Mapping[int, int]]


@frozen
class Move:
    """A queue's last move."""

    was: int
    cpu: int
    at: float


@frozen
class Load:
    """The readings of the last :data:`SPAN` seconds, and the moves that this process has made."""

    readings: tuple[CpuCounters, ...] = ()
    moves: Mapping[Key, Move] = field(factory=dict)

    def adding(self, now: CpuCounters) -> Load:
        """The load with a new reading, and without those that are too old for it."""
        return Load((*(reading for reading in self.readings if now.at - reading.at <= SPAN), now), self.moves)


def read_load(files: Files, before: Load) -> Load:
    """The load with a new reading, unless the last one is too recent."""
    at = parsed(lambda text: float(text.partition(" ")[0]), read_or(files, "/proc/uptime", "0"), "/proc/uptime")
    if before.readings and at - before.readings[-1].at < APART:
        return before
    ticks = ticks_of(read_or(files, "/proc/stat", ""))
    now = CpuCounters(
        at,
        {cpu: busy for cpu, (busy, _) in ticks.items()},
        {cpu: every for cpu, (_, every) in ticks.items()},
        squeezes_of(read_or(files, "/proc/net/softnet_stat", ""), sorted(ticks)),
        interrupts_of(read_or(files, "/proc/interrupts", "")),
    )
    return before.adding(now)


def ticks_of(text: str) -> dict[int, tuple[int, int]]:
    """The ticks in interrupts and softirqs, and all ticks, of each CPU in /proc/stat (show_stat, fs/proc/stat.c)."""
    ticks = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        # Guests' time is in the time of programs, too.
        numbers = [number for word in rest.split()[:8] if (number := whole(word)) is not None]
        if (cpu := whole(name.removeprefix("cpu"))) is not None and len(numbers) >= 7:
            ticks[cpu] = numbers[5] + numbers[6], sum(numbers)
    return ticks


def squeezes_of(text: str, online: Collection[int]) -> dict[int, int]:
    """Read each CPU's time_squeeze, the third column of /proc/net/softnet_stat (softnet_seq_show, net/core/net-procfs.c).

    Since Linux 5.10 the thirteenth column is the CPU. Before, the lines are those of the CPUs that are online.
    """
    rows = [line.split() for line in text.splitlines()]
    try:
        cpus = [int(row[12], 16) for row in rows] if all(len(row) > 12 for row in rows) else sorted(online)
        return {cpu: int(row[2], 16) for cpu, row in zip(cpus, rows, strict=False)}
    except (ValueError, IndexError):
        return {}


def interrupts_of(text: str) -> dict[int, dict[int, int]]:
    """How many interrupts of each number each CPU has served, without zeros (/proc/interrupts)."""
    header, *lines = text.splitlines() or [""]
    cpus = [whole(word.removeprefix("CPU")) for word in header.split()]
    served = {}
    for line in lines:
        name, _, rest = line.partition(":")
        if (number := whole(name.strip())) is not None:
            counts = zip(cpus, map(whole, rest.split(None, len(cpus))), strict=False)
            served[number] = {cpu: count for cpu, count in counts if cpu is not None and count}
    return served


@frozen
class CpuLoad:
    """The share of its time that a CPU spends in interrupts. ``squeezed``: it leaves packets for later."""

    busy: float
    squeezed: bool = False


@frozen
class QueueLoad:
    """The CPU that serves a queue, and the share of a CPU's time that it takes."""

    cpu: int
    share: float


def loads(
    load: Load, serving: Mapping[int, Key], placed: Mapping[Key, int]
) -> tuple[dict[Key, QueueLoad], dict[int, CpuLoad]]:
    """Calculate the load of each queue and of each CPU from the readings. With fewer than two readings, both are empty.

    A CPU's time is divided among the queues by the interrupts that it has served of each. Then the load of a CPU is that of the
    queues which are placed on it now, also if they were elsewhere before.

    :param serving: the queue of each interrupt, by its number. ``placed``: the CPU of each queue.
    """
    if len(load.readings) < 2:
        return {}, {}
    first, last = load.readings[0], load.readings[-1]
    busy, ticks = _grown(first.busy, last.busy), _grown(first.ticks, last.ticks)
    shares = {cpu: busy.get(cpu, 0) / ticks[cpu] for cpu in ticks}
    counts: dict[int, Counter[Key]] = {cpu: Counter() for cpu in shares}
    for number, key in serving.items():
        for cpu, count in _grown(first.interrupts.get(number, {}), last.interrupts.get(number, {})).items():
            if cpu in counts:
                counts[cpu][key] += count
    of_queues = dict.fromkeys(placed, 0.0)
    for cpu, of_cpu in counts.items():
        for key, count in of_cpu.items():
            of_queues[key] += shares[cpu] * count / of_cpu.total()
    rest = {cpu: 0.0 if counts[cpu] else share for cpu, share in shares.items()}
    for key, share in of_queues.items():
        if placed[key] in rest:
            rest[placed[key]] += share
    squeezed = _grown(first.squeezed, last.squeezed)
    most = SQUEEZES * (last.at - first.at)
    queues = {key: QueueLoad(placed[key], share) for key, share in of_queues.items()}
    return queues, {cpu: CpuLoad(share, squeezed.get(cpu, 0) >= most) for cpu, share in rest.items()}


def _grown(first: Mapping[int, int], last: Mapping[int, int]) -> dict[int, int]:
    """By how much each counter has grown, without those that have not."""
    return {at: count - first.get(at, 0) for at, count in last.items() if count > first.get(at, 0)}


def balance(
    queues: Mapping[Key, QueueLoad],
    cpus: Mapping[int, CpuLoad],
    history: Mapping[Key, Move],
    now: float,
    pools: Mapping[Key, Pool],
) -> dict[Key, Move]:
    """The queues that should move now: of the hottest CPU the one that relieves it most, to the coolest CPU of its pool.

    :param cpus: the load of each CPU that a queue may leave or get. ``history``: the last move of each queue.
    :param pools: the CPUs that may serve each queue.
    """
    busy = {cpu: load.busy for cpu, load in cpus.items()}
    free = {key: queue for key, queue in queues.items() if key not in history or now - history[key].at >= STAYS}
    moves: dict[Key, Move] = {}
    for _ in range(MOST - sum(now - move.at < WITHIN for move in history.values())):
        hot = [cpu for cpu in busy if busy[cpu] >= (HOT_IF_SQUEEZED if cpus[cpu].squeezed else HOT)]
        steps = (
            max(_step(key, queue, busy, pools[key]) for key, queue in free.items() if queue.cpu == cpu)
            for cpu in sorted(hot, key=lambda cpu: (-busy[cpu], cpu))
            if any(queue.cpu == cpu for queue in free.values())
        )
        relief, key, cpu = next((step for step in steps if step[0] >= GAIN), (0.0, ("", ""), 0))
        if not relief:
            break
        queue = free.pop(key)
        busy[queue.cpu] -= queue.share
        busy[cpu] += queue.share
        moves[key] = Move(queue.cpu, cpu, now)
    return moves


def _step(key: Key, queue: QueueLoad, busy: Mapping[int, float], pool: Pool) -> tuple[float, Key, int]:
    """By how much a queue's best move relieves the busier of both CPUs, the queue, and where it goes."""
    others = [cpu for cpu in pool if cpu in busy and cpu != queue.cpu]
    if not others:
        return 0.0, key, queue.cpu
    coolest = min(others, key=lambda cpu: busy[cpu])
    return min(queue.share, busy[queue.cpu] - busy[coolest] - queue.share), key, coolest
