"""Measures what a storm of link events costs: `python -m bench.storm` (as root).

It runs on this host's kernel in a network namespace of its own.

The counterpart is a socket that receives the same events and decodes none.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import click
import psutil
from pyroute2.netlink.rtnl import RTMGRP_LINK
from rich.console import Console
from rich.table import Table

from agent.linux.events import BUFFER
from agent.linux.messages import widen
from agent.service import loop
from bench.agent import keep
from bench.namespace import apart, child

OURS, OTHER = "fab0", "other0"
QUIET = 1.0
"""Seconds without an event after which a storm is over."""


def _agent(pipe: Connection) -> None:
    converge: Any = vars(loop)["converge"]

    def reported(*given: Any, **more: Any) -> Any:
        result = converge(*given, **more)
        pipe.send(None)
        return result

    vars(loop)["converge"] = reported
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  it is no file of a folder
        keep(OURS, nowhere)


def _bare(pipe: Connection) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as events:
        widen(events, BUFFER)
        events.bind((0, RTMGRP_LINK))
        pipe.send(None)
        while True:
            events.recv(1 << 16)
            pipe.send(None)


def _listen(target: Callable[[Connection], None], storm_on: str, events: int) -> tuple[int, float]:
    """How often a child process acted during a storm, and its CPU seconds."""
    lines = "".join(f"link set dev {storm_on} txqueuelen {1000 + number % 2}\n" for number in range(events))
    times = 0
    with child(target) as (pid, acted):
        while acted.poll(QUIET):
            acted.recv()
        before = _cpu(pid)
        storm = subprocess.Popen(["ip", "-batch", "-"], stdin=subprocess.PIPE, text=True)
        assert storm.stdin is not None  # noqa: S101  PIPE was asked for
        storm.stdin.write(lines)
        storm.stdin.close()
        while storm.poll() is None or acted.poll(QUIET):
            while acted.poll(0.01):
                acted.recv()
                times += 1
        return times, _cpu(pid) - before


def _cpu(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


def _measured(events: int) -> list[tuple[str, int, float]]:
    """Of each row, how often it acted, and its CPU seconds."""
    for name, peer in ((OURS, "fab1"), (OTHER, "other1")):
        subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", "name", peer], check=True)
        for end in (name, peer):
            subprocess.run(["ip", "link", "set", end, "up"], check=True)
    return [(name, *_listen(target, on, events)) for name, target, on in _ROWS]


_ROWS = (
    ("agent, events of its own netdev: passes", _agent, OURS),
    ("agent, events of another netdev: passes", _agent, OTHER),
    ("bare socket: receptions", _bare, OTHER),
)


@click.command()
@click.option("--events", default=10_000, show_default=True, help="Link events in each storm.")
def main(events: int) -> None:
    """Print the number of the agent's passes, and its CPU seconds."""
    table = Table("", "times", "CPU seconds", title=f"{events} link events")
    for name, times, cpu in apart(_measured, events):
        table.add_row(name, str(times), f"{cpu:.3f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
