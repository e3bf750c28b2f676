"""HTML pages in one file, with pictures by matplotlib. They load nothing from a server, and follow the browser's dark mode."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field
from matplotlib import rc_context
from matplotlib.figure import Figure

from agent.runtime import write_atomically
from fleet.api import Failed

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

INK = "#010203"
"""A placeholder in pictures for the colour of the page's text, which differs between light and dark."""

LEGEND_STYLE = """
.legend span { margin-right: 1.2em; white-space: nowrap; }
.legend i { display: inline-block; width: 1.1em; height: 0.9em; margin-right: 0.35em; vertical-align: -0.1em;
  border: 1px solid #888888; }
"""

SETTINGS: dict[RcKeyType, Any] = {
    # Text stays text.
    "svg.fonttype": "none",
    # With a fixed salt for the IDs of its elements, the same picture is the same text.
    "svg.hashsalt": "trackbed",
    "font.family": "sans-serif",
    # Text between two dollar signs is part of a name, and not a formula.
    "text.parse_math": False,
}
"""Settings of matplotlib for pictures in pages."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #c8c8c8; --bad: #b00020; --good: #0a6b2d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181c; --line: #444a52; --bad: #ff8a94; --good: #7bd88f; }
}
body { color: var(--ink); background: var(--paper); font: 15px/1.45 sans-serif; margin: 2rem auto;
  max-width: 1280px; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
svg { max-width: 100%; height: auto; }
.bad { color: var(--bad); font-weight: bold; } .good { color: var(--good); font-weight: bold; }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""With this policy the browser loads and runs nothing, even if a node's name contains HTML."""


def document(title: str, parts: Iterable[str]) -> str:
    """The text of a page."""
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{html.escape(title)}</title>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}{LEGEND_STYLE}</style></head><body>",
    ]
    return "\n".join([*head, *parts, "</body></html>", ""])


def write(file: Path, text: str) -> None:
    """Write a page.

    :raises Failed: it cannot be written.
    """
    try:
        write_atomically(file, text, 0o644)
    except OSError as error:
        raise Failed(f"{file} cannot be written: {error.strerror}; give another path with --html") from None


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def legend(meanings: Iterable[tuple[str, str]]) -> str:
    """Coloured squares, each with what its colour means."""
    squares = (f'<span><i style="background:{colour}"></i>{html.escape(text)}</span>' for colour, text in meanings)
    return f'<p class="legend">{"".join(squares)}</p>'


@define
class Picture:
    """A figure while it is drawn; afterwards ``svg`` is an element of a page."""

    figure: Figure
    svg: str = field(default="", init=False)


@contextmanager
def picture(width: float, height: float) -> Iterator[Picture]:
    """Draw a picture of this size, in inches."""
    with rc_context(SETTINGS):
        drawn = Picture(Figure(figsize=(width, height), facecolor="none"))
        yield drawn
        drawn.svg = to_svg(drawn.figure)


def to_svg(figure: Figure) -> str:
    """The figure as an element of a page, in the colour of the page's text where it has :data:`INK`."""
    image = io.StringIO()
    with rc_context(SETTINGS):
        figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = image.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
