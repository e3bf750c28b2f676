"""The report of a fabric's test as an HTML page, with a heat map of all NICs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from fleet.fabric.ends import Ends
from fleet.fabric.tests import TESTS, rounded
from fleet.fabric.verdict import EndVerdict, Verdict
from fleet.page import INK, document, legend, picture, table

NODES_IN_A_ROW = 32
"""More nodes are drawn in several rows, so that each name can be read."""

CELL_WIDTH, CELL_HEIGHT, LEAST_WIDTH, LETTER = 0.32, 0.2, 8.0, 0.075
"""Inches: of a NIC's cell, of the image, and for each letter of a name beside or below the cells."""

COLOURS = "cividis"
"""A colour map of matplotlib that people with colour blindness can read, too."""

CROSS = "#d00020"

LEGEND = (0.0, 0.25, 0.5, 0.75, 1.0)


def page(ends: Ends, judged: Verdict, began: float, absent: Mapping[str, str]) -> str:
    """The HTML text."""
    good = len(judged.ends) - len(judged.left)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began))
    verdict = "proven" if judged.proven and not absent else "not proven"
    tested = f"Tested {when}" if judged.finished else f"Begun {when}, and not finished"
    parts = [
        f"<h1>Fabric: <span class={'good' if verdict == 'proven' else 'bad'}>{verdict}</span></h1>",
        f"<p>{good} of {len(judged.ends)} NICs are good. {tested}.</p>",
        table(
            ("Test", "Usual result"),
            [(test, f"{rounded(value)} {TESTS[test].unit}") for test, value in judged.usual.items()],
        ),
    ]
    if judged.left:
        parts += ["<h2>Not good</h2>", table(("NIC", "Verdict", "Why"), judged.left)]
    if judged.paths:
        paths = [(each.client, each.server, each.test, each.message) for each in judged.paths]
        parts += ["<h2>Bad paths</h2>", table(("From", "To", "Test", "Why"), paths)]
    if judged.collectives:
        collectives = [
            (", ".join(each.group.ends), each.group.program, _rate(each.value), each.message)
            for each in judged.collectives
        ]
        parts += ["<h2>Collectives</h2>", table(("NICs", "Program", "Bus bandwidth", "Why it is bad"), collectives)]
    if absent:
        parts += ["<h2>Not tested</h2>", table(("Node or NIC", "Why"), sorted(absent.items()))]
    # The map comes last: of a large fleet it is several screens long. If no node could be tested, there is nothing to draw.
    if ends:
        says = (
            "The colour is the NIC's worst test, as a share of the usual result. A cross marks a NIC that is not good."
        )
        parts += ["<h2>All NICs</h2>", f"<p>{says}</p>", heat_map(ends, judged.ends)]
    return document("Fabric", parts)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{rounded(value)} Gbit/s"


def heat_map(ends: Ends, verdicts: Sequence[EndVerdict]) -> str:
    """An SVG image: nodes from left to right, their NICs from top to bottom; and what its colours mean."""
    nodes = sorted({end.node for end in ends.values()})
    nics = sorted({end.nic for end in ends.values()})
    by_place = {(ends[each.end].node, ends[each.end].nic): each for each in verdicts}
    rows = [nodes[start : start + NODES_IN_A_ROW] for start in range(0, len(nodes), NODES_IN_A_ROW)]
    left, names = (LETTER * max(map(len, each)) + 0.15 for each in (nics, nodes))
    wide = max(left + CELL_WIDTH * min(len(nodes), NODES_IN_A_ROW), LEAST_WIDTH)
    high = len(rows) * (CELL_HEIGHT * len(nics) + names)
    with picture(wide, high) as image:
        for place, row in enumerate(rows):
            bottom = high - (place + 1) * (CELL_HEIGHT * len(nics) + names) + names
            area = (left / wide, bottom / high, CELL_WIDTH * len(row) / wide, CELL_HEIGHT * len(nics) / high)
            _draw(image.figure.add_axes(area), row, nics, by_place)
    return legend((to_hex(colormaps[COLOURS](share)), f"{share:.0%}") for share in LEGEND) + image.svg


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
                axes.plot(column + 0.5, row + 0.5, "x", color=CROSS, markersize=7, markeredgewidth=2)
    axes.set_xticks([column + 0.5 for column in range(len(nodes))], nodes, rotation=90, fontsize=8, color=INK)
    axes.set_yticks([row + 0.5 for row in range(len(nics))], nics, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.set_frame_on(False)


def _share(each: EndVerdict | None) -> float:
    """The share of the usual result in the worst test; NaN if there is none."""
    return min(1.0, *each.shares.values(), 1.0) if each is not None and each.shares else float("nan")
