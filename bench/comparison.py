"""Compares settings on several paths of packets: the rounds, and their table and record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from handbook import campaign

COLUMNS = {
    "path": "Path",
    "setting": "Setting",
    "rate": "Requests/s",
    "p99": "p99, µs",
    "cpu": "CPU per request, µs",
    "gap": "Longest stop in each ms of a spinning program: p99, µs",
}
MEASURED = [key for key in COLUMNS if key not in ("path", "setting")]

W = TypeVar("W")
S = TypeVar("S")


def options(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a comparison. ``name`` is that of its record."""
    record = click.option(
        "--record", is_flag=True, help=f"Write docs/campaign/{name}.json, from which `make docs` makes the table."
    )
    rounds = click.option("--rounds", default=3, show_default=True, help="Measurements of each path and setting.")
    return lambda command: record(rounds(command))


def compare(
    name: str,
    paths: Mapping[str, W],
    settings: Mapping[str, S],
    measure: Callable[[W, S], Mapping[str, float]],
    *,
    rounds: int,
    record: bool,
) -> None:
    """Measure each path with each setting in some rounds; print the table, and record it if asked to.

    Each round measures every case once, so that what else the machines do meanwhile is spread over all cases.

    :param measure: its keys are those of the columns.
    """
    results: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for number in range(rounds):
        cases = [*product(paths, settings)]
        for path, setting in track(cases, f"round {number + 1} of {rounds}", console=Console(stderr=True)):
            results.setdefault((path, setting), []).append(measure(paths[path], settings[setting]))
    runs = rows(results)
    printed = Table(*COLUMNS.values(), title=f"median (range) of {rounds} rounds")
    for run in runs:
        printed.add_row(*(run[key] for key in COLUMNS))
    Console(width=150).print(printed)
    if record:
        campaign.write(name, COLUMNS, runs)


def rows(results: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> list[dict[str, str]]:
    """A row for each path and setting: the medians of the rounds, with their range."""
    return [
        {
            "path": path,
            "setting": setting,
            **{key: _shown([each[key] for each in rounds if key in each]) for key in MEASURED},
        }
        for (path, setting), rounds in results.items()
    ]


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
