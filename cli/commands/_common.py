"""What the commands share: paths, options, reading the spec, and errors as one message."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import click

from agent.documents import LARGEST_SPEC, read, too_large
from agent.report import names
from agent.report.printable import printable
from agent.report.records import Outcome, Result
from agent.spec.node import NodeSpec, SpecError, parse

SPEC = Path(names.SPEC_FILE)
RUN = Path(names.RUN_FOLDER)
STATE = Path(names.STATE_FOLDER)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
spec_option = click.option(
    "--spec",
    "spec_file",
    metavar="FILE",
    default=None,
    help=f"A spec to use instead of {SPEC}; - is standard input.",
)

LEAST_WIDTH = 20
"""The fewest columns that a wrapped text gets, even on a narrower terminal."""


class Failed(click.ClickException):
    """An error that the user can correct; exit code 1."""


def read_spec(spec_file: str | None) -> NodeSpec:
    """Read the given spec ("-" is standard input), or the node's.

    :raises Failed: it does not exist, or is wrong.
    """
    given = str(SPEC) if spec_file is None else spec_file
    name = "stdin" if given == "-" else given
    try:
        return parse(_read_stdin() if given == "-" else read(Path(given), LARGEST_SPEC), name)
    except SpecError as error:
        raise Failed(str(error)) from None
    except FileNotFoundError as error:
        absent = "run the deploy, or give --spec FILE" if spec_file is None else "check the path"
        raise Failed(f"{name}: {error.strerror}; {absent}") from None
    except UnicodeDecodeError as error:
        raise Failed(f"{name}: not UTF-8 text: {error}") from None
    except PermissionError as error:
        raise Failed(f"{name}: {error.strerror}; run as root") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise Failed(f"{name!r} cannot be read: {said}; give a file with a spec") from None


def _read_stdin() -> str:
    if sys.stdin is None:
        raise Failed("stdin is closed; give a spec there, or a file")
    text = sys.stdin.buffer.read(LARGEST_SPEC + 1)
    if len(text) > LARGEST_SPEC:
        raise ValueError(too_large(LARGEST_SPEC))
    return text.decode()


def present_spec() -> NodeSpec | None:
    """The node's spec; None if it has none that can be read."""
    try:
        return read_spec(None)
    except Failed:
        return None


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
