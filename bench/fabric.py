"""Simulates acceptance tests of fabrics, and prints how often the verdict is wrong: `python -m bench.fabric`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
from attrs import frozen
from rich.console import Console
from rich.table import Table

from fleet.fabric.schedule import Round, survey
from fleet.fabric.stages import FabricSettings
from fleet.fabric.tests import TESTS
from fleet.fabric.verdict import verdict
from tests.sim.fabric import Fabric, ends, some_bad, some_paths

SIZES = (8, 16, 32, 64, 256, 1024, 4096, 10000)
BAD_ENDS = 0.01
BAD_PATHS = 0.001

SETUP_S = 4.0
TIMEOUT_S = 20.0
"""Seconds, assumed: to start servers and clients of a round, and until a test that hangs is ended."""


@frozen
class Outcome:
    """The simulated runs of one fleet size, added up.

    ``wall``: assumed seconds of one run; ``cpu``: seconds that its schedule and verdict took here.
    """

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


COUNTS = ("good", "blamed", "bad", "missed", "paths", "paths_missed", "paths_blamed")


def simulate(nodes: int, rails: int, runs: int, settings: FabricSettings) -> Outcome:
    """Simulate runs, each with other faults."""
    all_ends = ends(nodes, rails)
    totals = [0] * len(COUNTS)
    rounds: list[Round] = []
    began = time.process_time()
    for run in range(runs):
        planned = survey(all_ends, [(test, TESTS[test].across) for test in settings.tests], True, settings.seed)
        bad = some_bad(all_ends, BAD_ENDS, run)
        paths = some_paths(planned, BAD_PATHS, run)
        paths = frozenset(pair for pair in paths if not set(pair) & bad.keys())
        rounds, results = Fabric(all_ends, bad, paths, run).run(settings)
        judged = verdict(all_ends, results, True)
        blamed = {each.end for each in judged.ends if each.status != "good"}
        path_blamed = {(each.client, each.server) for each in judged.paths}
        of_run = (
            len(all_ends) - len(bad),
            len(blamed - bad.keys()),
            len(bad),
            len(bad.keys() - blamed),
            len(paths),
            len(paths - path_blamed),
            len(path_blamed - paths),
        )
        totals = [total + each for total, each in zip(totals, of_run, strict=True)]
    cpu = (time.process_time() - began) / runs
    counts = dict(zip(COUNTS, totals, strict=True))
    return Outcome(rounds=len(rounds), wall=assumed_seconds(rounds, settings), cpu=cpu, **counts)


def assumed_seconds(rounds: Sequence[Round], settings: FabricSettings) -> float:
    """How long a run takes if in every round one test hangs until its time is up."""
    return len(rounds) * (SETUP_S + settings.seconds + TIMEOUT_S)


@click.command()
@click.option("--rails", default=8, show_default=True, help="NICs of each node.")
@click.option("--most", default=SIZES[-1], show_default=True, help="Nodes of the largest fleet.")
@click.option("--ends", "least", default=20000, show_default=True, help="Ends of each row, over several runs.")
def main(rails: int, most: int, least: int) -> None:
    """Print rounds, time and wrong verdicts, with 1 % bad ends, 0.1 % bad paths, and noise on every result."""
    # One test: with the others there are more rounds of the same pairs.
    settings = FabricSettings(tests=("ib_write_bw",))
    title = f"{rails} rails, {BAD_ENDS:.0%} bad ends, {BAD_PATHS:.1%} bad paths; ib_write_bw of {settings.seconds} s"
    table = Table(title=title)
    headings = (
        "nodes",
        "runs",
        "rounds",
        "wall",
        "CPU",
        "good ends blamed",
        "bad ends missed",
        "paths missed",
        "blamed",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for nodes in (size for size in SIZES if size <= most):
        runs = max(1, least // (nodes * rails))
        # A fleet that tests all pairs has many tests in a run, so fewer runs suffice.
        runs = min(runs, 20)
        made = simulate(nodes, rails, runs, settings)
        table.add_row(
            str(nodes),
            str(runs),
            str(made.rounds),
            f"{made.wall / 60:.0f} min",
            f"{made.cpu:.1f} s",
            _share(made.blamed, made.good),
            _share(made.missed, made.bad),
            _share(made.paths_missed, made.paths),
            str(made.paths_blamed),
        )
    Console(width=120).print(table)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.2%})" if whole else "-"


if __name__ == "__main__":
    main()
