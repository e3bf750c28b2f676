"""The terminal: colours of results, texts that are as wide as it is, and views that change while a command runs."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

import click

from agent.report.printable import printable
from agent.report.records import Outcome, Result

LEAST_WIDTH = 20
"""The fewest columns that a wrapped text gets, even on a narrower terminal."""

_COLOURS = {"applied": "green", "failed": "red", "unsupported": "yellow", "deferred": "yellow", "blocked": "red"}


def say_outcome(outcome: Outcome) -> str:
    """An outcome in one line, with its reason and remedy."""
    return f"{say_result(outcome.result)} {printable(explained(outcome))}"


def say_result(result: Result) -> str:
    """A result in its colour, as wide as the others."""
    return click.style(f"{result:<11}", fg=_COLOURS[result])


def explained(outcome: Outcome) -> str:
    """An outcome's change, with the reason and the remedy if it was not made."""
    return f"{outcome.change}: {outcome.error}; {outcome.remedy}" if outcome.error else str(outcome.change)


def fits(line: str) -> bool:
    """Whether a line fits in a row of the terminal. Any line fits if the output is not a terminal."""
    return not sys.stdout.isatty() or len(click.unstyle(line)) <= shutil.get_terminal_size().columns


def wrapped(head: str, text: str) -> Iterator[str]:
    """A text after a head. On a terminal it is wrapped, and its further rows start below the first one."""
    if fits(head + text):
        yield head + text
        return
    indent = len(click.unstyle(head))
    width = max(shutil.get_terminal_size().columns - indent, LEAST_WIDTH)
    first, *others = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    yield head + first
    yield from (" " * indent + other for other in others)


class Screen:
    """A live view on a terminal: each text replaces the one before."""

    def __init__(self) -> None:
        self._lines = 0

    def show(self, lines: Iterable[str]) -> None:
        """Draw at most as many rows as the terminal has. The terminal cuts long lines, so that each takes one row."""
        rows = list(lines)[: shutil.get_terminal_size().lines - 1]
        back = f"\x1b[{self._lines}F" if self._lines else ""
        # Turn wrapping off around the text; clear the rest of each line, and everything below the text.
        click.echo(back + "\x1b[?7l" + "".join(f"{row}\x1b[K\n" for row in rows) + "\x1b[J\x1b[?7h", nl=False)
        self._lines = len(rows)


def live(stream: TextIO | None = None) -> bool:
    """Whether a stream, or else standard output, is a terminal that understands cursor movements."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM", "dumb") != "dumb"


class WaitingLine:
    """A row on the terminal that says why a command waits. It is on standard error; without a terminal it is not shown.

    :param limit: seconds after which the command gives up; 0: never.
    """

    def __init__(self, limit: float) -> None:
        self._head = f"waiting, {limit:g} s at most: " if limit else "waiting: "
        self._shown = ""

    def show(self, reasons: Sequence[str]) -> None:
        """Draw the row anew: the first reason, and the number of the other reasons."""
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        width = shutil.get_terminal_size().columns - 1
        room = max(width - len(more), LEAST_WIDTH)
        row = textwrap.shorten(self._head + printable(reasons[0]), room, placeholder="...") + more if reasons else ""
        row = row[:width]
        if row != self._shown and live(sys.stderr):
            click.echo(f"\r{row}\x1b[K", nl=False, err=True)
            self._shown = row

    def clear(self) -> None:
        """Remove the row, before the command prints its result."""
        self.show(())
