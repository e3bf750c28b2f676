"""The tables of docs/campaign/faults.md, from the recorded trials of `python -m tests.chaos`.

docs/campaign/faults.jsonl has a line for each trial. Whoever finds out why a trial ended badly adds that to its line by hand,
under the key `explained`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from handbook.markdown import cell, code, table

FILE = Path("campaign") / "faults.jsonl"
"""The records, below docs/."""

KEY = ("agent", "system", "seed", "only", "trial", "faults")
"""What identifies a trial. The faults belong to it: once there are more faults, the same seed and number choose others."""

RECORDED = (*KEY, "group", "lies", "recovery", "held", "wrong", "again", "explained")
"""What is recorded of a trial, in this order. Only trials that ended badly have the last two."""

EMPTY = "No trial is recorded yet.\n"

Row = Mapping[str, Any]


def load(docs: Path) -> list[Row]:
    """The recorded trials."""
    return lines(docs / FILE)


def lines(results: Path) -> list[Row]:
    """The trials in a file of results."""
    try:
        rows: list[Row] = [json.loads(line) for line in results.read_text().splitlines()]
    except (OSError, ValueError) as error:
        sys.exit(f"{results} cannot be read: {error}; give another file, or remove what was not written to its end")
    for number, row in enumerate(rows, 1):
        if missing := [name for name in KEY if name not in row]:
            sys.exit(
                f"{results}: line {number} has no {', '.join(missing)}: an earlier version wrote it; remove the file"
            )
    return rows


def record(results: Path, docs: Path) -> None:
    """Add the trials in a lab's file of results to the records. A trial replaces an earlier one with the same key."""
    known = {_key(row): row for row in load(docs)}
    for row in lines(results):
        earlier = known.get(_key(row), {})
        # An explanation is of one failure, and not of another one of the same trial.
        same = earlier.get("wrong") == row["wrong"] and "explained" in earlier
        known[_key(row)] = {**row, "explained": earlier["explained"]} if same else row
    text = "".join(f"{_line(known[key])}\n" for key in sorted(known))
    new = (docs / FILE).with_suffix(".new")
    new.write_text(text)
    new.replace(docs / FILE)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(tuple(row[name]) if isinstance(row[name], list) else row[name] for name in KEY)


def _line(row: Row) -> str:
    kept = {name: row[name] for name in RECORDED if name in row}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def runs(rows: Sequence[Row]) -> str:
    """A row for each seed on each version: how many trials there were."""
    head = ["Agent", "Node", "Seed", "Only", "Trials", "Ended well"]
    made: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        made.setdefault(_key(row)[:4], []).append(row)
    return _filled(
        head,
        [
            [code(agent), cell(system), str(seed), cell(", ".join(only)), *_counted(mine)]
            for (agent, system, seed, only), mine in sorted(made.items())
        ],
    )


def groups(rows: Sequence[Row]) -> str:
    """A row for each group of faults, and one for all."""
    kinds = sorted({kind for row in rows for kind in row["lies"]})
    head = ["Faults", "Tried", "Ended well", *(f"Longest lie: {kind}" for kind in kinds)]
    found = [(name, [row for row in rows if row["group"] == name]) for name in sorted({row["group"] for row in rows})]
    every = [("all", rows)] if rows else []
    return _filled(
        [*head, "Recovery: median", "Longest"],
        [
            [cell(name), *_counted(mine), *(_longest(mine, kind) for kind in kinds), *_recovery(mine)]
            for name, mine in [*found, *every]
        ],
    )


def faults(rows: Sequence[Row]) -> str:
    """A row for each fault: its trials alone, and with another fault."""
    head = ["Fault", "Alone: tried", "Ended well", "With another: tried", "Ended well"]
    names = sorted({name for row in rows for name in row["faults"]})
    alone = {name: [row for row in rows if row["faults"] == [name]] for name in names}
    paired = {name: [row for row in rows if name in row["faults"] and len(row["faults"]) > 1] for name in names}
    return _filled(head, [[cell(name), *_counted(alone[name]), *_counted(paired[name])] for name in names])


def failures(rows: Sequence[Row]) -> str:
    """The trials that ended badly and are not explained, with the command that runs each again."""
    head = ["Faults", "What was wrong", "Agent", "Node", "Run again"]
    bad = [row for row in rows if row["wrong"] and not row.get("explained")]
    return _filled(head, [_failure(row) for row in bad], "None.\n" if rows else EMPTY)


def explained(rows: Sequence[Row]) -> str:
    """The trials that ended badly and are explained."""
    head = ["Faults", "What was wrong", "Agent", "Node", "Run again", "Explanation"]
    bad = [row for row in rows if row["wrong"] and row.get("explained")]
    return _filled(head, [[*_failure(row), cell(row["explained"])] for row in bad], "None.\n" if rows else EMPTY)


def _failure(row: Row) -> list[str]:
    wrong = cell("; ".join(row["wrong"]))
    return [cell(" + ".join(row["faults"])), wrong, code(row["agent"]), cell(row["system"]), code(row["again"])]


def _filled(head: Sequence[str], rows: Sequence[Sequence[str]], otherwise: str = EMPTY) -> str:
    return table(head, rows) if rows else otherwise


def _counted(rows: Iterable[Row]) -> tuple[str, str]:
    """How many there are, and how many ended well."""
    well = [not row["wrong"] for row in rows]
    return str(len(well)), str(sum(well))


def _longest(rows: Iterable[Row], kind: str) -> str:
    seconds = [float(row["lies"][kind]) for row in rows if kind in row["lies"]]
    return f"{max(seconds):.1f} s" if seconds else "-"


def _recovery(rows: Iterable[Row]) -> tuple[str, str]:
    seconds = [float(row["recovery"]) for row in rows if row["recovery"] is not None]
    return (f"{median(seconds):.0f} s", f"{max(seconds):.0f} s") if seconds else ("-", "-")


TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    made.__name__: made for made in (runs, groups, faults, failures, explained)
}
"""The tables, by their names in the page."""
