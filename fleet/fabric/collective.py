"""The collective stage: groups of good NICs of one rail reduce data among all of them, by NCCL or MPI.

Tests of pairs do not show how NICs affect each other when many send at the same time.
"""

from __future__ import annotations

import ipaddress
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from fleet.fabric.baseline import LOWEST, upper_median
from fleet.fabric.ends import End, Ends
from fleet.fabric.results import LEAST, LONGEST_TEXT, MOST, Fault, why_none
from fleet.fabric.tests import ALL_REDUCE, pinned, rounded

LARGEST_GROUP = 32
"""The most NICs of a group. A failure names no more than these, and the groups of a large rail can be compared."""

FEWEST_GROUPS = 3
"""A group is compared with the others only if there are so many groups or more."""

ITERATIONS = 20

LAUNCHER = "mpirun"

_FRAME = re.compile(r"[-=\s]*$|=+ backtrace|\s*\d+\s+\S+\(.*\) ?\[0x|\[\S+\] \[ *\d+\] ")
"""Lines that say nothing: rulers, and the frames of UCX's and Open MPI's backtraces."""

UCX_ACCEPTS_ALL = "UCX_UD_VERBS_ETH_DGID_CHECK=n"
"""Without it UCX before 1.19 cannot connect RoCE devices that are not Mellanox's: it drops the packets that make connections.

It takes a packet's address family from a field that only Mellanox's devices fill (openucx/ucx, commit 7de57ad9f9).
"""

SOURCE = Path(__file__).parents[2] / "templates" / "allreduce.py"


@frozen
class Group:
    """NICs that reduce together; ``number`` is unique in the stage. The first NIC's node starts the program on all nodes."""

    number: int
    rail: int
    program: str
    ends: tuple[str, ...]


@frozen
class Collective:
    """The result of a group: Gbit/s of bus bandwidth as nccl-tests define it, or a fault with the program's messages.

    ``text`` is the node's name if the fault is that a node was lost.
    """

    group: Group
    value: float | None = None
    fault: Fault = ""
    text: str = ""


@frozen
class CollectiveVerdict:
    """A group's result, and why it is bad; an empty message if it is good."""

    group: Group
    value: float | None
    message: str


def groups(ends: Ends, good: Iterable[str], seed: int) -> list[Group]:
    """Divide the good ends of each rail that have the same program into groups of nearly equal size, by the seed."""
    alike: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name in sorted(good):
        end = ends[name]
        program = next((each for each in PROGRAMS if each in end.programs and LAUNCHER in end.programs), None)
        if program is not None and ":" not in end.address:
            alike[end.rail, program].append(name)
    made: list[Group] = []
    for (rail, program), names in sorted(alike.items()):
        chosen = random.Random(seed).sample(names, len(names))  # noqa: S311  no secret
        number = -(-len(chosen) // LARGEST_GROUP)
        for members in (chosen[start::number] for start in range(number)):
            # Two NICs of one rail in one node would not use the network.
            apart = {ends[name].node: name for name in members}
            if len(apart) > 1:
                made.append(Group(len(made), rail, program, tuple(sorted(apart.values()))))
    return made


def launcher(group: Group, ends: Ends, size: int, ssh: str) -> tuple[str, ...]:
    """The command line for the first node of the group. ``ssh``: the command by which it starts programs on the others."""
    members = [ends[name] for name in group.ends]
    words = [LAUNCHER, "--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", ssh]
    # With a tree, the other nodes would have to reach each other by ssh.
    words += ["--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "oob_tcp_if_include", str(_network(members))]
    # Use UCX on any RDMA device. Without "any" Open MPI 4 uses it on Mellanox's only (opal/mca/common/ucx).
    words += ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"]
    for place, end in enumerate(members):
        words += [":"] if place else []
        words += ["-np", "1", "-H", f"{end.address}:1", "env", *_environment(end), *pinned(end)]
        words += PROGRAMS[group.program](size)
    return tuple(words)


def _network(members: Sequence[End]) -> ipaddress.IPv4Network:
    """The smallest network with all addresses."""
    numbers = [int(ipaddress.IPv4Address(end.address)) for end in members]
    differing = max(numbers[0] ^ number for number in numbers).bit_length()
    return ipaddress.IPv4Network((numbers[0], 32 - differing), strict=False)


def _environment(end: End) -> list[str]:
    port = f"{end.device}:{end.port}"
    words = [f"UCX_NET_DEVICES={port}", f"NCCL_IB_HCA=={port}", UCX_ACCEPTS_ALL]
    if end.gid_index is not None:
        words += [f"UCX_IB_GID_INDEX={end.gid_index}", f"NCCL_IB_GID_INDEX={end.gid_index}"]
    return [*words, f"NCCL_SOCKET_IFNAME=={end.netdev}"] if end.netdev else words


def _nccl(size: int) -> list[str]:
    return ["all_reduce_perf", "-b", str(size), "-e", str(size), "-g", "1", "-n", str(ITERATIONS)]


def _osu(size: int) -> list[str]:
    return ["osu_allreduce", "-m", f"{size}:{size}", "-i", str(ITERATIONS)]


def _mpi4py(size: int) -> list[str]:
    return ["python3", "-I", "-c", SOURCE.read_text(), str(size), str(ITERATIONS)]


PROGRAMS: Mapping[str, Callable[[int], list[str]]] = {
    "all_reduce_perf": _nccl,
    "osu_allreduce": _osu,
    "mpi4py": _mpi4py,
}
"""The command line of each program that can measure, for a size; the preferred one first, this project's own last."""


def outcome(group: Group, size: int, code: int, output: str) -> Collective:
    """The result of a launcher that has ended with an exit status, having printed ``output``."""
    value = parse(group, size, output) if code == 0 else None
    return Collective(group, value, *(why_none(code, _messages(output)) if value is None else ()))


def _messages(output: str) -> str:
    """The first and the last messages, without backtraces: a program says first what failed, and mpirun last what it did."""
    text = "\n".join(line for line in output.splitlines() if not _FRAME.match(line))
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} [...] {text[-half:]}"


def parse(group: Group, size: int, output: str) -> float | None:
    """The bus bandwidth in Gbit/s; None if the output has none, or NCCL's data were wrong."""
    for line in output.splitlines():
        words = line.split()
        if not words or words[0] != str(size):
            continue
        try:
            if group.program == "all_reduce_perf":
                # size count type redop root time algbw busbw #wrong (common.cu of nccl-tests), GB/s.
                value = float(words[7]) * 8 if words[8] in ("0", "N/A") else 0.0
            else:
                # size, and the average latency in microseconds (osu_allreduce.c).
                share = 2 * (len(group.ends) - 1) / len(group.ends)
                value = size * 8e-3 / float(words[1]) * share
        except (ValueError, IndexError, ZeroDivisionError):
            continue
        return value if LEAST <= value <= MOST else None
    return None


def judge(ends: Ends, collectives: Iterable[Collective]) -> list[CollectiveVerdict]:
    """Judge each group. It is bad if it failed, is below its floor, or has less than half of the usual rate of its program."""
    made = list(collectives)
    by_program: dict[str, list[float]] = defaultdict(list)
    for each in made:
        by_program[each.group.program].append(each.value or 0.0)
    usual = {name: upper_median(each) for name, each in by_program.items() if len(each) >= FEWEST_GROUPS}
    return [_judged(ends, each, usual.get(each.group.program, 0.0)) for each in made]


def _judged(ends: Ends, each: Collective, usual: float) -> CollectiveVerdict:
    floor = min((ends[name].floors.get(ALL_REDUCE, 0.0) for name in each.group.ends), default=0.0)
    message = ""
    if each.value is None:
        message = f"{each.fault}: {each.text}" if each.text else each.fault
    elif each.value < floor:
        message = f"{rounded(each.value)} Gbit/s, less than {rounded(floor)}"
    elif each.value < LOWEST * usual:
        message = f"{each.value / usual:.0%} of the usual {rounded(usual)} Gbit/s"
    return CollectiveVerdict(each.group, each.value, message)
