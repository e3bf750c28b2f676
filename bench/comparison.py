"""Compares settings on several ways of packets: the rounds, and their table, picture and record."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from handbook import campaign

COLUMNS = {
    "way": "Way",
    "setting": "Setting",
    "rate": "Requests/s",
    "p99": "p99, µs",
    "cpu": "CPU per request, µs",
    "gap": "Longest stop in each ms of a spinning program: p99, µs",
}
MEASURED = [key for key in COLUMNS if key not in ("way", "setting")]

Run = Mapping[str, str]
Measure = Callable[[str, str], Mapping[str, float]]
"""Measures a way with a setting, both by name. Its keys are those of the columns."""


def options(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a comparison. ``name`` is that of its record."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        picture = click.Path(path_type=Path, dir_okay=False)
        for option in (
            click.option(
                "--picture",
                default=f"{name}.svg",
                show_default=True,
                type=picture,
                help="The file to draw: .svg or .png.",
            ),
            click.option(
                "--record",
                is_flag=True,
                help=f"Write docs/campaign/{name}.json, from which `make docs` makes the table.",
            ),
            click.option("--rounds", default=3, show_default=True, help="Measurements of each way and setting."),
        ):
            command = option(command)
        return command

    return add


def compare(
    name: str,
    cases: Sequence[tuple[str, str]],
    measure: Measure,
    *,
    rounds: int,
    picture: Path,
    record: bool,
) -> None:
    """Measure the cases, each a way and a setting, in some rounds; print the table, draw it, and record it if asked to.

    Each round measures every case once, so that what else the machines do meanwhile is spread over all cases.
    """
    results: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for number in range(rounds):
        for case in track(cases, f"round {number + 1} of {rounds}", console=Console(stderr=True)):
            results.setdefault(case, []).append(measure(*case))
    runs = rows(results)
    printed = Table(*COLUMNS.values(), title=f"median (range) of {rounds} rounds")
    for run in runs:
        printed.add_row(*(run[key] for key in COLUMNS))
    Console(width=150).print(printed)
    drawn(runs).savefig(picture)
    click.echo(f"the picture is {picture}")
    if record:
        campaign.write(name, COLUMNS, runs)


def rows(results: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> list[dict[str, str]]:
    """A row for each way and setting: the medians of the rounds, with their range."""
    return [
        {
            "way": way,
            "setting": setting,
            **{key: _shown([each[key] for each in rounds if key in each]) for key in MEASURED},
        }
        for (way, setting), rounds in results.items()
    ]


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def drawn(runs: Sequence[Run]) -> Figure:
    """A bar chart for each column, in which each row has a bar: the median."""
    figure = Figure(figsize=(13, 0.8 + 0.3 * len(runs)), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(MEASURED), sharey=True), MEASURED, strict=True):
        medians = [float(run[key].split()[0]) if run[key] else 0.0 for run in runs]
        axes.barh(range(len(runs)), medians, 0.7, color="#2f6fb7")
        for place, run in enumerate(runs):
            axes.annotate(
                run[key].split(" ")[0], (medians[place], place), (3, 0), textcoords="offset points", va="center"
            )
        axes.set_title(textwrap.fill(COLUMNS[key], 28), fontsize=9)
        axes.set_yticks(range(len(runs)), [f"{run['way']}, {run['setting']}" for run in runs], fontsize=8)
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    return figure
