"""`trackbed topology`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from agent.report.records import to_plain
from cli import node_files
from cli.commands import as_json

if TYPE_CHECKING:
    from cli.topology import NumaNode

COLOURS = {"none": None, "even": "green", "double": "yellow", "more": "red"}


@click.command()
@as_json
def topology(as_json: bool) -> None:
    """Show sockets, NUMA nodes, last-level caches and cores, with their NICs and GPUs and the queues of each core.

    A queue is shown at the CPU that gets its interrupt now. `!` marks a queue that is on another NUMA node than its device.
    Colours show the load of a core, compared with an even share of its NUMA node's queues: green is at most that share, yellow
    up to twice as much, red more, or a queue on another NUMA node.

    Exit code: 0 done, 1 an error.

    Example: trackbed topology
    """
    from agent import linux
    from cli.topology import arrange

    nodes = arrange(linux.machine(), node_files.present_spec())
    if as_json:
        click.echo(json.dumps(to_plain(nodes)))
    else:
        for line in lines(nodes, shutil.get_terminal_size().columns):
            click.echo(line)


def lines(nodes: Sequence[NumaNode], width: int) -> Iterator[str]:
    """The lines of the tree. The colour of a core's line shows the core's load."""
    from cli.topology import MISPLACED, render

    for line, load in render(nodes, width):
        yield click.style(line, fg="red" if load != "none" and MISPLACED in line else COLOURS[load])
