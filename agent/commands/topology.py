"""`trackbed topology`."""

from __future__ import annotations

import json
import shutil

import click

from agent.commands import _common
from agent.report.records import to_plain

BUSY = 2
"""Queues of one core from which on it is shown as busy: with enough CPUs each queue has a core of its own."""


@click.command()
@_common.as_json
def topology(as_json: bool) -> None:
    """Show sockets, NUMA nodes, last-level caches and cores, with NICs and GPUs at their place and the queues of each core.

    A queue is shown at the CPU on which its interrupt arrives now. `!` marks one on another NUMA node than its device. Colours
    show the load: green is one queue, yellow two, red more, or a misplaced one.

    Exit code: 0, 1 an error.

    Example: trackbed topology
    """
    from agent import linux
    from agent.spec.node import NodeSpec
    from agent.tools.topology import MISPLACED, arrange, render

    try:
        spec: NodeSpec | None = _common.read_spec(None)
    except _common.Failed:
        spec = None
    nodes = arrange(linux.machine(), spec)
    if as_json:
        click.echo(json.dumps(to_plain(nodes)))
        return
    for line, queues in render(nodes, shutil.get_terminal_size().columns):
        colour = None if not queues else "green" if queues < BUSY else "yellow" if queues == BUSY else "red"
        click.echo(click.style(line, fg="red" if queues and MISPLACED in line else colour))
