"""Finds the ends that explain the bad results of a survey, and those that are known to be good.

A bad end spoils results of good ends, too. So the end with the largest share of bad results is suspected first; then its
results are left out, and the search begins again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from fleet.fabric.baseline import SEVERAL, Baseline, Judged, measure, upper_median
from fleet.fabric.ends import Ends

MOST = 0.5
"""An end is suspected from this share of bad results on, in one direction of one test."""

SOME = 0.125
FEW = 3
"""An end is suspected of failing now and then from this share, and this number, of bad results among all of its results."""

Cell = tuple[str, str, bool]
"""A direction (sends, receives) of a test, on one rail or across."""


@frozen
class Suspicion:
    """``suspects``: each with the tests (and whether across rails) in which it failed. ``good``: ends known to be good."""

    suspects: Mapping[str, frozenset[tuple[str, bool]]]
    good: frozenset[str]


def suspicion(ends: Ends, judged: Sequence[Judged], usual: Baseline) -> Suspicion:
    """Judge the ends by a survey."""
    of_end: dict[str, list[Judged]] = defaultdict(list)
    for each in judged:
        of_end[each.sender].append(each)
        of_end[each.receiver].append(each)
    suspects = _by_bad_results(of_end)
    left = [each for each in judged if each.sender not in suspects and each.receiver not in suspects]
    slow = _by_median(ends, left, usual)
    cells_of = {name: frozenset(_failed(name, of_end[name])) for name in suspects}
    cells_of |= {name: frozenset(cells) for name, cells in slow.items()}
    good = {end for each in left if not each.bad for end in (each.sender, each.receiver)} - cells_of.keys()
    return Suspicion(dict(sorted(cells_of.items())), frozenset(good))


def _by_bad_results(of_end: Mapping[str, Sequence[Judged]]) -> list[str]:
    """The ends that explain the bad results, the worst first."""
    counts = {name: _counts(name, of_end[name]) for name in _touched(of_end)}
    weights = {name: _weight(each) for name, each in counts.items()}
    suspects: list[str] = []
    while weights:
        worst = min(weights, key=lambda name: (-weights[name][0], -weights[name][1], name))
        if weights.pop(worst)[0] <= 0:
            break
        suspects.append(worst)
        for each in of_end[worst]:
            partner = each.partner(worst)
            if partner in weights:
                bad, total = counts[partner]
                cell = _cell(partner, each)
                total[cell] -= 1
                bad[cell] -= each.bad
                weights[partner] = _weight(counts[partner])
    return suspects


def _touched(of_end: Mapping[str, Sequence[Judged]]) -> list[str]:
    return [name for name, results in of_end.items() if any(each.bad for each in results)]


Counts = tuple[Counter[Cell], Counter[Cell]]


def _counts(name: str, results: Iterable[Judged]) -> Counts:
    bad: Counter[Cell] = Counter()
    total: Counter[Cell] = Counter()
    for each in results:
        cell = _cell(name, each)
        total[cell] += 1
        bad[cell] += each.bad
    return bad, total


def _cell(name: str, each: Judged) -> Cell:
    return each.way(name), each.result.test, each.result.across


def _weight(counts: Counts) -> tuple[float, int]:
    """How much an end is suspected: a share, 0 if not at all, and its number of bad results."""
    bad, total = counts
    number = bad.total()
    if number < 2:
        return 0.0, number  # one bad result is chance, or a bad path
    in_cell = max(bad[cell] / total[cell] for cell in total if total[cell])
    share = number / total.total()
    if in_cell >= MOST:
        return in_cell + share, number
    return (share, number) if number >= FEW and share >= SOME else (0.0, number)


def _failed(name: str, results: Iterable[Judged]) -> set[tuple[str, bool]]:
    return {(each.result.test, each.result.across) for each in results if each.bad}


def _by_median(ends: Ends, judged: Iterable[Judged], usual: Baseline) -> dict[str, set[tuple[str, bool]]]:
    """The ends without a single bad result whose median is bad."""
    shares: dict[tuple[str, str], dict[tuple[str, bool, tuple[str, ...]], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for each in judged:
        key = measure(ends, each.result)
        shares[each.sender, "sends"][key].append(each.share)
        shares[each.receiver, "receives"][key].append(each.share)
    by_name: dict[str, set[tuple[str, bool]]] = defaultdict(set)
    for (name, _), measures in shares.items():
        for key, values in measures.items():
            # The median of few results says no more than each of them.
            if len(values) >= SEVERAL and key in usual.usual and upper_median(values) < usual.usual[key].least_of_end:
                by_name[name].add(key[:2])
    return by_name
