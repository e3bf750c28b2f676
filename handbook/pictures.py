"""The pictures of the site. They are drawn by the code of the commands, from made-up data."""

from __future__ import annotations

from fleet.fabric.page import heat_map
from fleet.page import LEGEND_STYLE
from fleet.report import pictures as report
from handbook import samples
from handbook.recordings import RECORDINGS

STYLE = f"""
.picture {{ overflow-x: auto; margin: 1.5em 0; }}
.picture > svg {{ display: block; max-width: 100%; min-width: 680px; height: auto; }}
{LEGEND_STYLE}"""

WIDTH = 7.1
"""Inches of a page's text. A wider picture is made smaller, and with it its letters."""


def fabric() -> str:
    """The heat map of a fabric's test."""
    ends, judged = samples.fabric()
    return _shown(
        "A simulated fabric of 16 nodes with 8 rails, in which four NICs are bad.", heat_map(ends, judged.ends)
    )


def fleet() -> str:
    """The pictures of the report on a fleet."""
    history, deploy = samples.fleet(), samples.deploy()
    parts = {
        "Simulated: how many of ten nodes were not ready in a day.": report.fleet_over_time(history, WIDTH),
        "Simulated: the same nodes, each by itself.": report.nodes_over_time(history, WIDTH),
        "Simulated: drift that the agents repaired.": report.repairs_over_time(history, WIDTH),
        "Made-up times: the slowest operations of a deploy.": report.slowest_operations(deploy.operations, WIDTH),
    }
    return "".join(_shown(*part) for part in parts.items())


def terminal(name: str) -> str:
    """What a command prints, as a terminal shows it."""
    return _shown("Of a simulated server.", RECORDINGS[name]())


def _shown(caption: str, image: str) -> str:
    return f'<div class="picture" data-search-exclude>\n<p><em>{caption}</em></p>\n{image.rstrip()}\n</div>\n\n'
