"""Prints rows in columns. The last column has texts of any length."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.text import Text

ROOM = 30
"""The least characters of a line for a text beside the other columns. With fewer, it has lines of its own."""

WIDEST = 60
"""The most characters of a column. A longer value moves the rest of its row to the right."""

GAP, INDENT = 2, 4
"""Spaces between two columns, and before a text in lines of its own."""


def show(headings: Sequence[str], rows: Iterable[Sequence[Text]]) -> None:
    """Print rows. On a terminal long texts are folded, and nothing is cut off.

    If the output is not a terminal, each row is one line, however long: it may be searched line by line.
    """
    lines = [[Text(each, "bold") for each in headings], *rows]
    lengths = [[each.cell_len for each in column] for column in zip(*lines, strict=True)][:-1]
    widths = [max(length for length in column if length <= WIDEST) for column in lengths]
    console = Console()
    for *first, text in lines:
        start = Text()
        for each, width in zip(first, widths, strict=True):
            start.append_text(each).append(" " * (max(width - each.cell_len, 0) + GAP))
        room = console.width - start.cell_len
        if not sys.stdout.isatty():
            click.echo(f"{start.plain}{text.plain}".rstrip())
        elif room >= ROOM:
            _fold(console, start, text, room)
        else:
            console.print(start, soft_wrap=True)
            _fold(console, Text(" " * INDENT), text, max(console.width - INDENT, ROOM))


def _fold(console: Console, start: Text, text: Text, width: int) -> None:
    """Print a text in lines of at most this width, the first one after ``start``, the others below it."""
    for line in text.wrap(console, width) or [Text()]:
        console.print(start + line, soft_wrap=True)
        start = Text(" " * start.cell_len)
