"""Simulates acceptance tests of fabrics, and prints how often the verdict is wrong: `python -m bench.fabric`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import click
from attrs import frozen
from rich.console import Console
from rich.table import Table

from fleet.fabric.schedule import Pair, Round, survey
from fleet.fabric.tests import TESTS, FabricSettings
from fleet.fabric.verdict import PathVerdict, verdict
from tests.sim.fabric import Fabric, ends, some_bad, some_paths

SIZES = (8, 16, 32, 64, 256, 1024, 4096, 10000)
BAD_ENDS = 0.01
BAD_PATHS = (0.001, 0.01)
"""Shares of the tested paths. Each fleet size is simulated with each of them."""

MOST_BLAMED, MOST_MISSED = 0.001, 0.01
"""The largest accepted shares of good ends that are blamed, and of bad ends that are missed."""

SETUP_S = 4.0
TIMEOUT_S = 20.0
"""Seconds, assumed: to start servers and clients of a round, and until a test that hangs is ended."""


@frozen
class Outcome:
    """The simulated runs of one fleet size with one share of bad paths, added up.

    ``wall``: assumed seconds of one run; ``cpu``: seconds of CPU that its simulation, schedule and verdict took here.
    """

    nodes: int
    bad_paths: float
    runs: int
    good: int
    blamed: int
    bad: int
    missed: int
    paths: int
    paths_missed: int
    paths_blamed: int
    rounds: int
    wall: float
    cpu: float

    @property
    def row(self) -> tuple[str, ...]:
        """Its row in the table."""
        return (
            str(self.nodes),
            f"{self.bad_paths:.1%}",
            str(self.runs),
            str(self.rounds),
            f"{self.wall / 60:.0f} min",
            f"{self.cpu:.1f} s",
            _share(self.blamed, self.good),
            _share(self.missed, self.bad),
            _share(self.paths_missed, self.paths),
            str(self.paths_blamed),
        )


HEADINGS = (
    "nodes",
    "bad paths",
    "runs",
    "rounds",
    "wall",
    "CPU",
    "good ends blamed",
    "bad ends missed",
    "paths missed",
    "good paths blamed",
)


def simulate(nodes: int, rails: int, runs: int, bad_paths: float, settings: FabricSettings) -> Outcome:
    """Simulate runs, each with other faults."""
    all_ends = ends(nodes, rails)
    counts: Counter[str] = Counter()
    rounds: list[Round] = []
    began = time.process_time()
    for run in range(runs):
        planned = survey(all_ends, [(test, TESTS[test].across) for test in settings.tests], True, settings.seed)
        bad = some_bad(all_ends, BAD_ENDS, run)
        paths = frozenset(pair for pair in some_paths(planned, bad_paths, run) if not set(pair) & bad.keys())
        rounds, results = Fabric(all_ends, bad, paths, run).run(settings)
        judged = verdict(all_ends, results, True)
        blamed = {each.end for each in judged.ends if each.status != "good"}
        path_blamed = set(map(_data_path, judged.paths))
        counts.update(
            good=len(all_ends) - len(bad),
            blamed=len(blamed - bad.keys()),
            bad=len(bad),
            missed=len(bad.keys() - blamed),
            paths=len(paths),
            paths_missed=len(paths - path_blamed),
            paths_blamed=len(path_blamed - paths),
        )
    cpu = (time.process_time() - began) / runs
    return Outcome(
        nodes, bad_paths, runs, rounds=len(rounds), wall=assumed_seconds(rounds, settings), cpu=cpu, **counts
    )


def _data_path(path: PathVerdict) -> Pair:
    """The sender and the receiver of a path."""
    return (path.client, path.server) if TESTS[path.test].client_sends else (path.server, path.client)


def assumed_seconds(rounds: Sequence[Round], settings: FabricSettings) -> float:
    """How long a run takes if in every round one test hangs until its time is up. A test without a duration takes no time."""
    return sum(SETUP_S + settings.seconds * TESTS[each.test].timed + TIMEOUT_S for each in rounds)


def wrong(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """A sentence for each share of wrong verdicts that is larger than is accepted."""
    for each in outcomes:
        which = f"{each.nodes} nodes, {each.bad_paths:.1%} bad paths"
        if each.blamed > MOST_BLAMED * each.good:
            yield f"{which}: {_share(each.blamed, each.good)} good ends are blamed, more than {MOST_BLAMED:.1%}"
        if each.missed > MOST_MISSED * each.bad:
            yield f"{which}: {_share(each.missed, each.bad)} bad ends are missed, more than {MOST_MISSED:.1%}"


@click.command()
@click.option("--rails", default=8, show_default=True, help="NICs of each node.")
@click.option(
    "--nodes", "sizes", multiple=True, default=SIZES, show_default=True, help="Nodes of a fleet; may be given again."
)
@click.option("--ends", "least", default=20000, show_default=True, help="Ends of each row, over several runs.")
def main(rails: int, sizes: tuple[int, ...], least: int) -> None:
    """Print rounds, time and wrong verdicts of all tests of pairs, with 1 % bad ends and noise on every result.

    Each fleet size has a row with 0.1 % bad paths and one with 1 %.

    Exit code: 0 done, 1 in a row more than 0.1 % of the good ends were blamed, or more than 1 % of the bad ones missed.
    """
    settings = FabricSettings(tests=tuple(TESTS))
    outcomes = []
    for nodes in sizes:
        # A fleet that tests all pairs has many tests in a run, so fewer runs suffice.
        runs = min(max(1, least // (nodes * rails)), 20)
        outcomes += [simulate(nodes, rails, runs, share, settings) for share in BAD_PATHS]
    table = Table(title=f"{rails} rails, {BAD_ENDS:.0%} bad ends; {', '.join(settings.tests)}")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for each in outcomes:
        table.add_row(*each.row)
    Console(width=140).print(table)
    if sentences := list(wrong(outcomes)):
        raise click.ClickException("; ".join(sentences))


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.2%})" if whole else "-"


if __name__ == "__main__":
    main()
