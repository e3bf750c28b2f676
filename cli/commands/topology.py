"""`trackbed topology`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.report.records import from_plain, to_plain
from cli.commands import _common

if TYPE_CHECKING:
    from cli.topology import NumaNode

COLOURS = {"none": None, "even": "green", "double": "yellow", "more": "red"}

LARGEST = 64 << 20
"""Bytes of another node's answer: a thousand CPUs with a hundred queues each have less."""

LARGEST_NUMBER = 1 << 16
"""A CPU or NUMA node whose number is not smaller is refused. Linux allows 8192 CPUs on x86."""


@click.command()
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw it into this file: .svg or .png (by hwloc's lstopo), or .xml, which lstopo reads.",
)
@click.option(
    "--input",
    "source",
    metavar="FILE",
    default=None,
    help="Output of --json, also from another node; - is standard input.",
)
@_common.as_json
def topology(picture: Path | None, source: str | None, as_json: bool) -> None:
    """Show sockets, NUMA nodes, last-level caches and cores, with their NICs and GPUs and the queues of each core.

    A queue is shown at the CPU that gets its interrupt now. `!` marks a queue that is on another NUMA node than its device.
    Colours show the load of a core, compared with an even share of its NUMA node's queues: green is at most that share, yellow
    up to twice as much, red more, or a queue on another NUMA node.

    --input draws a node on the control host, so that nodes need no lstopo.

    Exit code: 0 done, 1 an error.

    Example: ssh gpu-01 trackbed topology --json | trackbed topology --input - --picture gpu-01.svg
    """
    from cli.topology import MISPLACED, render

    nodes = _here() if source is None else _given(source)
    if picture is not None:
        _draw(nodes, picture)
    elif as_json:
        click.echo(json.dumps(to_plain(nodes)))
    else:
        for line, load in render(nodes, shutil.get_terminal_size().columns):
            click.echo(click.style(line, fg="red" if load != "none" and MISPLACED in line else COLOURS[load]))


def _here() -> tuple[NumaNode, ...]:
    from agent import linux
    from agent.spec.node import NodeSpec
    from cli.topology import arrange

    try:
        spec: NodeSpec | None = _common.read_spec(None)
    except _common.Failed:
        spec = None
    return arrange(linux.machine(), spec)


def _given(source: str) -> tuple[NumaNode, ...]:
    from agent.documents import load
    from cli.topology import NumaNode

    text = _common.read_input(source, LARGEST, "the output of `trackbed topology --json`")
    try:
        nodes = tuple(from_plain(each, NumaNode) for each in load(text, LARGEST))
        if not nodes or not all(map(_is_possible, nodes)):
            raise ValueError("it has no NUMA node, a core without CPUs, or a number that the kernel does not give")
        return nodes
    except (ValueError, TypeError) as error:
        name = _common.STDIN if source == "-" else source
        raise _common.Failed(f"{name} is not what `trackbed topology --json` prints: {error}") from None


def _is_possible(node: NumaNode) -> bool:
    cores = [core for cache in node.caches for core in cache.cores]
    numbers = [cpu for core in cores for cpu in core.cpus]
    return (
        -1 <= node.number < LARGEST_NUMBER
        and all(core.cpus for core in cores)
        and all(0 <= cpu < LARGEST_NUMBER for cpu in numbers)
    )


def _draw(nodes: tuple[NumaNode, ...], picture: Path) -> None:
    from cli.hwloc import FORMATS, NotDrawn, draw

    form = picture.suffix.removeprefix(".")
    if form not in FORMATS:
        raise click.UsageError(f"{picture} ends with none of {', '.join(f'.{each}' for each in FORMATS)}")
    try:
        draw(nodes, picture, form)
    except NotDrawn as error:
        raise _common.Failed(str(error)) from None
    except OSError as error:
        raise _common.Failed(f"{picture} cannot be written: {error.strerror}; give another path") from None
