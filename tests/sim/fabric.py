"""A simulated fabric: ends and paths with faults, and noise on every result."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attrs import define, field

from fleet.fabric.ends import End, Ends, by_name
from fleet.fabric.results import FabricResult, failed
from fleet.fabric.schedule import Round
from fleet.fabric.stages import STAGES
from fleet.fabric.tests import TESTS, FabricSettings

Kind = Literal["slow", "blocked", "sends slowly", "receives slowly", "bad switch port"]
KINDS: tuple[Kind, ...] = ("slow", "blocked", "sends slowly", "receives slowly", "bad switch port")

USUAL = {"ib_write_bw": 390.0, "ib_read_bw": 370.0, "ib_send_bw": 385.0, "ib_write_lat": 2.0}
NOISE = 0.02
"""The standard deviation of a result, as a share of it."""

OUTLIERS = 0.01
"""The share of the results that something else on the node or in the network disturbs: between 30 and 90 % of the rate."""

DROPS = 0.5
"""The share of the tests that fail on a bad switch port."""


def ends(nodes: int, rails: int) -> Ends:
    """A fleet in which all NICs are alike."""
    return by_name(tuple(End(f"node{n:05}", f"rail{r}", r, "400 Gb/s") for n in range(nodes) for r in range(rails)))


@define
class Fabric:
    """``bad``: by end, what is wrong with it. ``paths``: pairs (sender, receiver) of ends between which the rate is halved.

    ``noise``: as :data:`NOISE`; 0: every result is exact.
    """

    ends: Ends
    bad: Mapping[str, Kind] = field(factory=dict)
    paths: frozenset[tuple[str, str]] = frozenset()
    seed: int = 1
    noise: float = NOISE
    _random: random.Random = field(init=False)
    _left: dict[str, float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311  no secret
        # What a slow end has left of its rate.
        self._left = {name: self._random.uniform(0.3, 0.9) for name in self.bad}

    def run(self, settings: FabricSettings) -> tuple[list[Round], list[FabricResult]]:
        """Every stage of a run: its rounds, and the results of all tests."""
        rounds: list[Round] = []
        results: list[FabricResult] = []
        for _, stage in STAGES:
            made = stage(self.ends, settings, results)
            rounds += made
            results += [result for each in made for result in self.results(each)]
        return rounds, results

    def results(self, made: Round) -> Iterator[FabricResult]:
        """The results of one round."""
        for server, client in made.pairs:
            share = self._share(made.test, server, client)
            if share == 0:
                yield failed(made, server, client, "timeout")
                continue
            usual = USUAL[made.test]
            value = usual * share if TESTS[made.test].unit == "Gbit/s" else usual / share
            yield FabricResult(made.stage, made.number, made.test, made.across, server, client, value)

    def _share(self, test: str, server: str, client: str) -> float:
        sender, receiver = (client, server) if TESTS[test].client_sends else (server, client)
        share = min(self._of(sender, "sends slowly"), self._of(receiver, "receives slowly"))
        if (sender, receiver) in self.paths:
            share *= 0.5
        if not self.noise or share == 0:
            return share
        if self._random.random() < OUTLIERS:
            share *= self._random.uniform(0.3, 0.9)
        return max(0.01, share * self._random.gauss(1, self.noise))

    def _of(self, name: str, way: Kind) -> float:
        kind = self.bad.get(name)
        if kind == "blocked" or (kind == "bad switch port" and self._random.random() < DROPS):
            return 0.0
        return self._left[name] if kind in ("slow", way) else 1.0


def some_bad(all_ends: Ends, share: float, seed: int) -> dict[str, Kind]:
    """A share of the ends, at least one, with the kinds of faults in turn."""
    made = random.Random(seed)  # noqa: S311
    chosen = made.sample(sorted(all_ends), max(1, round(len(all_ends) * share)))
    return {name: KINDS[place % len(KINDS)] for place, name in enumerate(chosen)}


def some_paths(rounds: Sequence[Round], share: float, seed: int) -> frozenset[tuple[str, str]]:
    """A share of the tested pairs, in one direction."""
    pairs = sorted({pair for each in rounds for pair in each.pairs})
    return frozenset(random.Random(seed).sample(pairs, round(len(pairs) * share)))  # noqa: S311
