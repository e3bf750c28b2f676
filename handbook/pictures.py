"""The pictures of the site. They are drawn by the code of the commands, from made-up data."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli.hwloc import LOADS, NotDrawn, draw
from cli.topology import NumaNode, render
from fleet.fabric.page import heat_map
from fleet.page import LEGEND_STYLE
from fleet.report import pictures as report
from handbook import samples
from handbook.recordings import RECORDINGS
from lab.cluster.programs import found_in, runnable
from lab.errors import LabError

STYLE = f"""
.picture {{ overflow-x: auto; margin: 1.5em 0; }}
.picture > svg {{ display: block; max-width: 100%; min-width: 680px; height: auto; }}
{LEGEND_STYLE}"""

LINE = 100
"""Letters in a line of a tree."""

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


def topology() -> str:
    """The picture of a server's topology. Without lstopo it is the tree that the command prints."""
    nodes = samples.topology()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topology.svg"
        try:
            with _lstopo():
                draw(nodes, path, "svg")
            text = path.read_text()
            image = text[text.index("<svg") :]
        except (NotDrawn, LabError, OSError):
            image = "<pre>" + "\n".join(_tree(nodes)) + "</pre>"
    return _shown("A made-up server: the queues of rail1 are on few cores, and one is on the wrong socket.", image)


@contextmanager
def _lstopo() -> Iterator[None]:
    """Have lstopo in PATH: this host's own, or that of Debian's package, which is only unpacked."""
    if shutil.which("lstopo"):
        yield
        return
    package = runnable("hwloc")
    before = dict(os.environ)
    os.environ.update({**found_in(package), "PATH": f"{package / 'usr/bin'}:{before['PATH']}"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _tree(nodes: Sequence[NumaNode]) -> Iterator[str]:
    for line, load in render(nodes, LINE):
        text = html.escape(line)
        yield text if load == "none" else f'<span style="background:{LOADS[load]};color:#000000">{text}</span>'


def terminal(name: str) -> str:
    """What a command prints, as a terminal shows it."""
    return _shown("Of a simulated server.", RECORDINGS[name]())


def _shown(caption: str, image: str) -> str:
    return f'<div class="picture" data-search-exclude>\n<p><em>{caption}</em></p>\n{image.rstrip()}\n</div>\n\n'
