"""The usual rate of each kind of hardware, and how far a result may be below it.

Faults only lower a rate (or raise a latency), and one bad NIC of three spoils two of three pairs. So each NIC counts by the
better half of its results, the usual rate is the median over the NICs, and the spread is estimated from the results above
it, unless they are too few.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from fleet.fabric.ends import Ends
from fleet.fabric.results import FabricResult
from fleet.fabric.tests import TESTS

DEVIATIONS = 6.0
"""Standard deviations below the usual rate that are still good."""

TEST_TOLERANCE = 0.10
END_TOLERANCE = 0.05
"""One result, and a NIC's median of several, may always be so much below the usual rate, as shares of it."""

ENOUGH = 8
"""The spread is estimated from the results at the usual rate or above it, if there are so many; otherwise from all results."""

MOST = 500
"""An estimate that compares every two values uses at most about so many of them."""

SEVERAL = 4
"""From this number of results on, their median is steadier than one result."""

LOWEST = 0.5
"""A result below this share of the usual rate is bad, even if the spread is large."""

Measure = tuple[str, bool, tuple[str, ...]]
"""Results with the same key are compared: the test, whether it is across rails, and the kinds of hardware at both ends."""


@frozen
class Usual:
    """The usual result of a measure. ``value`` in the test's unit; ``least_of_one`` and ``least_of_end`` are shares of it."""

    value: float
    least_of_one: float
    least_of_end: float

    def least(self, results: int) -> float:
        """The least share of an end with this number of results. The median of a few is judged like one result."""
        return self.least_of_end if results >= SEVERAL else self.least_of_one


@frozen
class Judged:
    """A result, as a share of what is usual (0 for a fault), and whether it is bad in itself."""

    result: FabricResult
    share: float
    bad: bool

    def partner(self, end: str) -> str:
        """The other one of its ends."""
        return self.result.client if end == self.result.server else self.result.server

    def way(self, end: str) -> str:
        """What this end does with the data."""
        return "sends" if end == self.sender else "receives"

    @property
    def sender(self) -> str:
        """The end that sends the data."""
        return self.result.client if TESTS[self.result.test].client_sends else self.result.server

    @property
    def receiver(self) -> str:
        """The end that gets the data."""
        return self.result.server if TESTS[self.result.test].client_sends else self.result.client


@frozen
class Baseline:
    """The usual value of each measure of a survey. If no test of a measure succeeded, it has none."""

    usual: Mapping[Measure, Usual]

    def judge(self, ends: Ends, results: Iterable[FabricResult]) -> list[Judged]:
        """Compare results with the usual ones. Left out: results of lost nodes, and tests across rails if none succeeded."""
        judged = []
        for result in results:
            if result.fault == "lost":
                continue
            usual = self.usual.get(measure(ends, result))
            if usual is None:
                # Rails may be separate networks; on a rail of its own each test must succeed.
                judged += [] if result.across else [Judged(result, 0.0, True)]
                continue
            share = _rate(result.test, result.value) / _rate(result.test, usual.value)
            bad = share < usual.least_of_one or _below_floor(ends, result)
            judged.append(Judged(result, share, bad))
        return judged


def baseline(ends: Ends, results: Iterable[FabricResult]) -> Baseline:
    """The usual results, from those of a survey."""
    by_measure: dict[Measure, list[FabricResult]] = defaultdict(list)
    for result in results:
        if result.fault != "lost":
            by_measure[measure(ends, result)].append(result)
    by_key = {key: _usual(each) for key, each in by_measure.items()}
    return Baseline({key: usual for key, usual in by_key.items() if usual is not None})


def measure(ends: Ends, result: FabricResult) -> Measure:
    """The key of the results that a result is compared with."""
    one, other = ends[result.server].group, ends[result.client].group
    return result.test, result.across, (one,) if one == other else tuple(sorted((one, other)))


def upper_median(values: Sequence[float]) -> float:
    """The median; of an even number of values, the greater of the two in the middle."""
    return statistics.median_high(values)


def _usual(results: Sequence[FabricResult]) -> Usual | None:
    rates: dict[str, list[float]] = defaultdict(list)
    for result in results:
        rate = _rate(result.test, result.value)
        rates[result.server].append(rate)
        rates[result.client].append(rate)
    of_ends = [upper_median(each) for each in rates.values()]
    usual = upper_median(of_ends)
    if usual <= 0:
        # More than half of the ends fail. The others may still say what is usual.
        usual = upper_median([rate for rate in of_ends if rate > 0] or [0.0])
    if usual <= 0:
        return None
    return Usual(
        _rate(results[0].test, usual),
        _least([_rate(result.test, result.value) / usual for result in results], TEST_TOLERANCE),
        _least([rate / usual for rate in of_ends], END_TOLERANCE),
    )


def _least(shares: Sequence[float], tolerance: float) -> float:
    return max(LOWEST, 1 - max(tolerance, DEVIATIONS * _spread(shares)))


def _spread(shares: Sequence[float]) -> float:
    """Estimate the standard deviation of the good results. Bad ones hardly change it."""
    above = [share - 1 for share in shares if share >= 1]
    if len(above) >= ENOUGH:
        # 1.4826: the median absolute deviation of a normal distribution is smaller than its standard deviation by this factor.
        return 1.4826 * statistics.median(above)
    return _qn([share for share in shares if share > 0])


def _qn(values: Sequence[float]) -> float:
    """The estimator Qn of Rousseeuw and Croux (1993): the first quartile of the differences between every two values.

    It is still right if almost half of the values are wrong. The factors turn it into the standard deviation of a normal
    distribution: 2.2219 for many values, and a correction (3.8 and 1.4) for few.
    """
    # In a fabric that hardly works there can be thousands of values, and so millions of differences.
    kept = sorted(values)[:: len(values) // MOST + 1]
    number = len(kept)
    differences = sorted(other - one for one, other in itertools.combinations(kept, 2))
    if not differences:
        return 0.0
    first_quarter = differences[math.comb(number // 2 + 1, 2) - 1]
    return 2.2219 * first_quarter * number / (number + (1.4 if number % 2 else 3.8))


def _rate(test: str, value: float | None) -> float:
    """The greater, the better: Gbit/s, or messages in a microsecond; 0 for a fault."""
    if value is None:
        return 0.0
    return value if TESTS[test].unit == "Gbit/s" else 1 / value


def _below_floor(ends: Ends, result: FabricResult) -> bool:
    floors = [ends[name].floors.get(result.test) for name in (result.server, result.client)]
    least = min((_rate(result.test, floor) for floor in floors if floor is not None), default=0.0)
    return result.value is None or _rate(result.test, result.value) < least
