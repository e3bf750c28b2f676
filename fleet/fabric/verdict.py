"""The verdict on each end, and on each path between two ends."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from attrs import field, frozen

from fleet.fabric.baseline import Baseline, Judged, baseline, upper_median
from fleet.fabric.collective import Collective, CollectiveVerdict
from fleet.fabric.collective import judge as judge_collectives
from fleet.fabric.ends import Ends
from fleet.fabric.results import FabricResult
from fleet.fabric.schedule import Pair, Round, packed
from fleet.fabric.suspects import Suspicion, suspicion
from fleet.fabric.tests import TESTS

PARTNERS = 8
"""How many known-good ends a suspect is tested with, in each direction of each test in which it failed."""

REPEATS = 2
"""How often a bad test between two good ends is repeated. The path is bad if all repetitions are bad."""

UNSTEADY = 3 / 16
"""A suspect is bad from this share of bad tests with known-good ends on."""

Status = Literal["good", "bad", "undecided", "lost", "untested"]


@frozen
class EndVerdict:
    """``kind``: blocked, slow or unsteady. ``message``: what was seen, for people. ``shares``: by test, of the usual rate."""

    end: str
    status: Status
    kind: str = ""
    message: str = ""
    shares: Mapping[str, float] = field(factory=dict)


@frozen
class PathVerdict:
    """A bad path between two good ends. ``share`` of the usual rate, 0 if nothing passed."""

    server: str
    client: str
    test: str
    share: float
    message: str


@frozen
class Verdict:
    """``finished``: every test of every stage has a result. ``usual``: by test, the usual rate on one rail, in its unit.

    ``collectives``: those of all groups, good ones, too.
    """

    ends: tuple[EndVerdict, ...]
    paths: tuple[PathVerdict, ...]
    finished: bool
    usual: Mapping[str, float] = field(factory=dict)
    collectives: tuple[CollectiveVerdict, ...] = ()

    @property
    def left(self) -> list[tuple[str, str, str]]:
        """The ends that are not good: the name, the verdict, and why."""
        return [(each.end, each.kind or each.status, each.message) for each in self.ends if each.status != "good"]

    @property
    def proven(self) -> bool:
        """Whether every end was tested and is good, and no path and no collective is bad."""
        bad_collective = any(each.message for each in self.collectives)
        return self.finished and not (self.left or self.paths or bad_collective)


def confirming(ends: Ends, results: Sequence[FabricResult], seed: int) -> list[Round]:
    """The rounds that test each suspect of the survey against known-good ends, in both directions."""
    usual, judged = _survey(ends, results)
    suspected = suspicion(ends, judged, usual)
    chosen = random.Random(seed)  # noqa: S311  no secret
    good = sorted(suspected.good)
    chosen.shuffle(good)
    by_rail: dict[int, list[str]] = defaultdict(list)
    for name in good:
        by_rail[ends[name].rail].append(name)
    wanted: list[tuple[str, bool, Pair]] = []
    for place, (name, tests) in enumerate(suspected.suspects.items()):
        same = by_rail[ends[name].rail]
        for test, across in sorted(tests):
            partners = good if across else same
            for other in _partners(ends, name, partners, across, place):
                wanted += [(test, across, (name, other)), (test, across, (other, name))]
    return packed("ends", wanted)


def _partners(ends: Ends, name: str, good: Sequence[str], across: bool, place: int) -> list[str]:
    """Known-good ends of other nodes, starting at another place of ``good`` for each suspect; used twice if they are few."""
    partners: list[str] = []
    for step in range(len(good)):
        other = ends[good[(place * PARTNERS + step) % len(good)]]
        if other.node != ends[name].node and (other.rail != ends[name].rail) == across:
            partners.append(other.name)
            if len(partners) == PARTNERS:
                return partners
    return (partners * 2)[:PARTNERS]


def repeating(ends: Ends, results: Sequence[FabricResult]) -> list[Round]:
    """The rounds that repeat the survey's bad tests between two ends that are not suspected."""
    usual, judged = _survey(ends, results)
    blamed = {each.end for each in _ends(ends, results, judged, usual, lost_nodes(results)) if each.status != "good"}
    wanted = [
        (each.result.test, each.result.across, (each.result.server, each.result.client))
        for each in judged
        if each.bad and not {each.sender, each.receiver} & blamed
    ]
    return packed("paths", [each for each in wanted for _ in range(REPEATS)])


def verdict(
    ends: Ends, results: Sequence[FabricResult], finished: bool, collectives: Sequence[Collective] = ()
) -> Verdict:
    """Judge all ends, paths and collectives by the results of all stages."""
    usual, judged = _survey(ends, results)
    rates = {test: each.value for (test, across, _), each in sorted(usual.usual.items(), reverse=True) if not across}
    return Verdict(
        tuple(_ends(ends, results, judged, usual, lost_nodes(results, collectives))),
        tuple(_paths(usual.judge(ends, _of_stage(results, "paths")))),
        finished,
        dict(sorted(rates.items())),
        tuple(judge_collectives(ends, collectives)),
    )


def good_ends(ends: Ends, results: Sequence[FabricResult]) -> list[str]:
    """The names of the ends that are good by the stages with pairs."""
    return [each.end for each in verdict(ends, results, True).ends if each.status == "good"]


def lost_nodes(results: Iterable[FabricResult], collectives: Iterable[Collective] = ()) -> set[str]:
    """The nodes that stopped answering during the test."""
    lost = {each.text for each in results if each.fault == "lost"}
    return lost | {each.text for each in collectives if each.fault == "lost"}


def _survey(ends: Ends, results: Sequence[FabricResult]) -> tuple[Baseline, list[Judged]]:
    """What is usual in the survey, and its results, without those of nodes that were lost later: they may have been slow."""
    lost = lost_nodes(results)
    surveyed = [
        each for each in _of_stage(results, "survey") if not {ends[each.server].node, ends[each.client].node} & lost
    ]
    usual = baseline(ends, surveyed)
    return usual, usual.judge(ends, surveyed)


def _of_stage(results: Iterable[FabricResult], stage: str) -> list[FabricResult]:
    return [result for result in results if result.stage == stage]


def _ends(
    ends: Ends, results: Sequence[FabricResult], surveyed: Sequence[Judged], usual: Baseline, lost: Collection[str]
) -> list[EndVerdict]:
    suspected = suspicion(ends, surveyed, usual)
    confirmed: dict[str, list[Judged]] = defaultdict(list)
    for each in usual.judge(ends, _of_stage(results, "ends")):
        for name in (each.sender, each.receiver):
            if name in suspected.suspects:
                confirmed[name].append(each)
    shares = _shares(surveyed)
    tested = shares.keys()
    verdicts = []
    for name, end in ends.items():
        if end.node in lost:
            made = EndVerdict(name, "lost", message=f"{end.node} stopped answering during the test")
        elif name in suspected.suspects:
            made = _suspect(name, confirmed[name], suspected, usual)
        elif name in tested:
            made = EndVerdict(name, "good")
        else:
            made = EndVerdict(
                name, "untested", message="no other node has a NIC of this rail, or all of those were lost"
            )
        verdicts.append(EndVerdict(name, made.status, made.kind, made.message, shares.get(name, {})))
    return verdicts


def _shares(judged: Iterable[Judged]) -> dict[str, dict[str, float]]:
    """By end and test: the share of the usual rate in its worse direction, on one rail."""
    values: dict[str, dict[str, tuple[list[float], list[float]]]] = defaultdict(dict)
    for each in judged:
        if not each.result.across:
            values[each.sender].setdefault(each.result.test, ([], []))[0].append(each.share)
            values[each.receiver].setdefault(each.result.test, ([], []))[1].append(each.share)
    return {
        name: {test: round(min(upper_median(way) for way in ways if way), 3) for test, ways in sorted(tests.items())}
        for name, tests in values.items()
    }


def _suspect(name: str, confirmed: Sequence[Judged], suspected: Suspicion, usual: Baseline) -> EndVerdict:
    partners = {each.partner(name) for each in confirmed} & suspected.good
    if not partners:
        return EndVerdict(name, "undecided", message="it failed, and no end is known to be good to compare it with")
    bad = [each for each in confirmed if each.bad and each.partner(name) in partners]
    failing = {each.partner(name) for each in bad}
    slow = _slow(name, confirmed, usual)
    if len(partners) == 1 and (bad or slow):
        return EndVerdict(
            name, "undecided", message=f"it fails with {next(iter(partners))}, the only end to compare it with"
        )
    if slow or (len(failing) > 1 and len(bad) >= UNSTEADY * len(confirmed)):
        kind, message = _described(name, confirmed, bad, slow)
        return EndVerdict(name, "bad", kind, message)
    return EndVerdict(name, "good")


def _slow(name: str, confirmed: Iterable[Judged], usual: Baseline) -> list[tuple[str, str, float]]:
    """The directions and tests whose median over partners is too low, each with its share of the usual rate."""
    cells: dict[tuple[str, str, bool], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in confirmed:
        cells[each.way(name), each.result.test, each.result.across][each.partner(name)].append(each.share)
    slow = []
    for (way, test, across), by_partner in sorted(cells.items()):
        number = sum(map(len, by_partner.values()))
        limits = [each.least(number) for key, each in usual.usual.items() if key[:2] == (test, across)]
        share = upper_median([upper_median(values) for values in by_partner.values()])
        if len(by_partner) > 1 and share < min(limits, default=1.0):
            slow.append((way, test, share))
    return slow


def _described(
    name: str, confirmed: Sequence[Judged], bad: Sequence[Judged], slow: Sequence[tuple[str, str, float]]
) -> tuple[str, str]:
    counted = f"{len(bad)} of {len(confirmed)} tests with known-good ends are bad"
    faults = sorted({each.result.fault for each in bad if each.result.fault})
    if faults:
        counted += f" ({', '.join(faults)})"
    if not slow:
        return "unsteady", counted
    if all(share == 0 for _, _, share in slow):
        ways = sorted({way for way, _, _ in slow}, reverse=True)
        return "blocked", f"it {' and '.join(ways)} nothing; {counted}"
    way, test, share = min(slow, key=lambda each: each[2])
    rate = "has" if TESTS[test].unit == "us" else way
    return "slow", f"it {rate} {share:.0%} of the usual rate in {test}; {counted}"


def _paths(judged: Iterable[Judged]) -> list[PathVerdict]:
    repeats: dict[tuple[str, str, str], list[Judged]] = defaultdict(list)
    for each in judged:
        repeats[each.result.server, each.result.client, each.result.test].append(each)
    return [
        PathVerdict(server, client, test, share, f"{share:.0%} of the usual rate, although both ends are good")
        for (server, client, test), each in sorted(repeats.items())
        if len(each) >= REPEATS and all(one.bad for one in each)
        for share in [round(upper_median([one.share for one in each]), 3)]
    ]
