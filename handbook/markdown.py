"""Markdown: tables, and their cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: object) -> str:
    """A cell with code; empty for no text. A vertical bar would end the cell."""
    return f"`{str(text).replace('|', chr(92) + '|')}`" if str(text) else ""


def cell(text: str) -> str:
    """A sentence of the code as a cell: one line, with reStructuredText's marks of code as Markdown's."""
    words = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return prose(words)


def prose(text: str) -> str:
    """A docstring as Markdown: ``code`` and :role:`code` are `code`."""
    return re.sub(r"(?::\w+:)?`+([^`]+)`+", r"`\1`", text)
