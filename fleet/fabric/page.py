"""The report of a fabric's test as one HTML file, with a heat map of all NICs. It asks nothing of any server."""

from __future__ import annotations

import html
import io
import time
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from fleet.fabric.ends import Ends
from fleet.fabric.tests import TESTS
from fleet.fabric.verdict import EndVerdict, Verdict

NODES_IN_A_ROW = 32
"""More nodes are drawn in several rows, so that each name can be read."""

INK = "#010203"
"""Stands for the colour of the page's text, which differs between light and dark."""

CELL_WIDTH, CELL_HEIGHT, MARGIN, LEAST_WIDTH, LETTER = 0.32, 0.2, 0.7, 8.0, 0.075
"""Inches: of a NIC's cell, left of the cells, of the image, and for each letter of a name below the cells."""

COLOURS = "cividis"
"""A colour map of matplotlib that people with colour blindness can read, too."""

LEGEND = (0.0, 0.25, 0.5, 0.75, 1.0)

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
.legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend i { display: inline-block; width: 1.1rem; height: 0.9rem; margin-right: 0.35rem; vertical-align: -0.1rem;
  border: 1px solid var(--line); }
.bad { color: var(--bad); font-weight: bold; } .good { color: var(--good); font-weight: bold; }
"""


def page(ends: Ends, said: Verdict, began: float, absent: Mapping[str, str]) -> str:
    """The HTML text."""
    good = sum(each.status == "good" for each in said.ends)
    left = [each for each in said.ends if each.status != "good"]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began))
    verdict = "proven" if said.proven and not absent else "not proven"
    tested = f"Tested {when}" if said.finished else f"Begun {when}, and not finished"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Fabric</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>Fabric: <span class={'good' if verdict == 'proven' else 'bad'}>{verdict}</span></h1>",
        f"<p>{good} of {len(said.ends)} NICs are good. {tested}.</p>",
        _table(
            ("Test", "Usual result"), [(test, f"{value:.2f} {TESTS[test].unit}") for test, value in said.usual.items()]
        ),
        "<h2>NICs</h2>",
        "<p>The colour is the NIC's worst test, as a share of the usual result. A cross marks a NIC that is not good.</p>",
        heat_map(ends, said.ends),
    ]
    if left:
        rows = [(each.end, each.kind or each.status, each.message) for each in left]
        parts += ["<h2>Not good</h2>", _table(("NIC", "Verdict", "Why"), rows)]
    if said.paths:
        paths = [(each.client, each.server, each.test, each.message) for each in said.paths]
        parts += ["<h2>Bad paths</h2>", _table(("From", "To", "Test", "Why"), paths)]
    if absent:
        parts += ["<h2>Not tested</h2>", _table(("Node", "Why"), sorted(absent.items()))]
    return "\n".join([*parts, "</body></html>", ""])


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def heat_map(ends: Ends, verdicts: Sequence[EndVerdict]) -> str:
    """An SVG image: nodes from left to right, their NICs from top to bottom; and what its colours mean."""
    nodes = sorted({end.node for end in ends.values()})
    nics = sorted({end.nic for end in ends.values()})
    by_place = {(ends[each.end].node, ends[each.end].nic): each for each in verdicts}
    rows = [nodes[start : start + NODES_IN_A_ROW] for start in range(0, len(nodes), NODES_IN_A_ROW)]
    wide = max(MARGIN + CELL_WIDTH * min(len(nodes), NODES_IN_A_ROW), LEAST_WIDTH)
    names = LETTER * max(map(len, nodes)) + 0.15
    high = len(rows) * (CELL_HEIGHT * len(nics) + names)
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "trackbed"}):
        figure = Figure(figsize=(wide, high), facecolor="none")
        for place, row in enumerate(rows):
            bottom = high - (place + 1) * (CELL_HEIGHT * len(nics) + names) + names
            area = (MARGIN / wide, bottom / high, CELL_WIDTH * len(row) / wide, CELL_HEIGHT * len(nics) / high)
            _draw(figure.add_axes(area), row, nics, by_place)
        image = io.StringIO()
        figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = image.getvalue()
    return _legend() + svg[svg.index("<svg") :].replace(INK, "currentColor")


def _draw(
    axes: Axes, nodes: Sequence[str], nics: Sequence[str], verdicts: Mapping[tuple[str, str], EndVerdict]
) -> None:
    shares = [[_share(verdicts.get((node, nic))) for node in nodes] for nic in nics]
    axes.pcolormesh(np.ma.masked_invalid(shares), cmap=COLOURS, vmin=0, vmax=1, edgecolors="none")
    for row, nic in enumerate(nics):
        for column, node in enumerate(nodes):
            each = verdicts.get((node, nic))
            if each is not None and each.status != "good":
                axes.plot(column + 0.5, row + 0.5, "x", color="white", markersize=8, markeredgewidth=4)
                axes.plot(column + 0.5, row + 0.5, "x", color="#d00020", markersize=7, markeredgewidth=2)
    axes.set_xticks([column + 0.5 for column in range(len(nodes))], nodes, rotation=90, fontsize=8, color=INK)
    axes.set_yticks([row + 0.5 for row in range(len(nics))], nics, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.set_frame_on(False)


def _share(each: EndVerdict | None) -> float:
    """The share of the usual result in the worst test; NaN if there is none."""
    return min(1.0, *each.shares.values(), 1.0) if each is not None and each.shares else float("nan")


def _legend() -> str:
    squares = "".join(
        f'<span><i style="background:{to_hex(colormaps[COLOURS](share))}"></i>{share:.0%}</span>' for share in LEGEND
    )
    return f'<p class="legend">{squares}</p>'
