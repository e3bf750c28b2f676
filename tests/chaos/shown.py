"""What the API server shows of a node during a trial, by a watch on this host, against the kernel's state by the oracle."""

import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from attrs import frozen

from agent.report.names import READY, TAINT
from lab import Node
from lab.cluster import join
from lab.cluster.commands import plane_of
from lab.cluster.control_plane import ControlPlane
from lab.node import wait
from tests.chaos.lies import Lie

CLAIMS = (f"the API showed {READY} True", "the API showed no taint")
"""What the API may show only while the kernel is as before. A Node that shows both is open to new pods."""

TEMPLATE = f'{{.status.conditions[?(@.type=="{READY}")].status}}|{{.spec.taints[*].key}}{{"\\n"}}'
"""A line for each version of the Node: the condition's status, and the keys of all taints."""

OPENS = 600.0
"""Seconds within which a node opens after the trial before: its labels may be away for so long (docs/kubernetes.md)."""

AGAIN = 0.5
"""Seconds until the watch is begun again after the API server has ended it."""

Differed = Mapping[str, Sequence[tuple[str, float, float]]]
"""By class: the values that differed, each with the times between which it did, by the node's clock."""


@frozen
class Member:
    """A node of the lab as a member of its cluster, with its Node's name."""

    plane: ControlPlane
    name: str


@frozen
class Seen:
    """What the API server showed from a time on, by this host's monotonic clock. Nothing while it could not be read."""

    at: float
    claims: frozenset[str] = frozenset()


def member(node: Node) -> Member | None:
    """The node as a member of its lab's cluster; None if there is no cluster, or the node has not joined."""
    if not (node.instance.folder / "cluster").exists():
        return None
    plane, name = plane_of(node.instance), join.node_name(node)
    return Member(plane, name) if plane.try_kubectl("get", "node", name).returncode == 0 else None


def claims(line: str) -> frozenset[str]:
    """The claims in a line of :data:`TEMPLATE`."""
    statuses, _, taints = line.strip().partition("|")
    made = ("True" in statuses.split(), TAINT not in taints.split())
    return frozenset(claim for claim, is_made in zip(CLAIMS, made, strict=True) if is_made)


@contextmanager
def observed(watched: Member | None) -> Iterator[list[Seen]]:
    """Wait until a node is open, and watch its Node while the block runs. The list grows; outside of a cluster it stays empty.

    :raises LabError: the node does not open.
    """
    if watched is None:
        yield []
        return
    seen: list[Seen] = []
    ended = Event()
    follower = Thread(target=_follow, args=(watched, seen, ended), daemon=True)
    follower.start()
    try:
        wait(lambda: bool(seen) and seen[-1].claims == frozenset(CLAIMS), OPENS, f"Node {watched.name}: open to pods")
        yield seen
    finally:
        ended.set()
        follower.join(10.0)


def _follow(watched: Member, seen: list[Seen], ended: Event) -> None:
    while not ended.is_set():
        with watched.plane.follow("get", "node", watched.name, "--watch", "-o", f"jsonpath={TEMPLATE}") as kubectl:
            assert kubectl.stdout is not None
            while not ended.is_set():
                if select.select([kubectl.stdout], [], [], 0.2)[0]:
                    if not (line := kubectl.stdout.readline()):
                        break
                    seen.append(Seen(time.monotonic(), claims(line.decode())))
            kubectl.kill()
        seen.append(Seen(time.monotonic()))
        ended.wait(AGAIN)


def shown(claim: str, seen: Sequence[Seen], until: float) -> Iterator[tuple[float, float]]:
    """The times between which the API showed a claim. What it showed last counts ``until`` then."""
    began: float | None = None
    for each in seen:
        if claim in each.claims:
            began = each.at if began is None else began
        elif began is not None:
            yield began, each.at
            began = None
    if began is not None:
        yield began, until


def longest(seen: Sequence[Seen], until: float, differed: Differed, ahead: float) -> dict[str, Lie]:
    """The longest time for which the API showed a claim while one value differed, by class.

    :param until: when the observation ended, by this host's clock.
    :param ahead: seconds by which this host's clock is ahead of the node's.
    """
    lies = {}
    for kind, differences in differed.items():
        both = [
            Lie(min(end, last + ahead) - max(start, first + ahead), claim, what)
            for claim in CLAIMS
            for start, end in shown(claim, seen, until)
            for what, first, last in differences
        ]
        lies[kind] = max(both, key=lambda lie: lie.seconds, default=Lie(0.0, "", ""))
    return {kind: lie if lie.seconds > 0 else Lie(0.0, "", "") for kind, lie in lies.items()}


def clock_ahead(node: Node) -> float:
    """Seconds by which this host's monotonic clock is ahead of the node's time since its boot: the quickest answer of five."""
    answers = []
    for _ in range(5):
        asked = time.monotonic()
        uptime = float(node.run(["cat", "/proc/uptime"], check=True).stdout.split()[0])
        answered = time.monotonic()
        answers.append((answered - asked, (asked + answered) / 2 - uptime))
    return min(answers)[1]
