"""Measures the time from a drifted MTU to its verified repair, beside a bare pyroute2 loop: `python -m bench.drift` (as root).

Both run on this host's kernel in a network namespace of their own, one after the other. A round begins before the write
that changes the value, and ends when the agent or the loop has read the right value back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import click
from pyroute2.iproute.linux import IPRoute
from pyroute2.netlink.rtnl import RTMGRP_LINK
from rich.console import Console
from rich.table import Table

from bench.agent import MTU, keep
from bench.namespace import apart, child

NETDEV, BROKEN = "fab0", 1400
READY = '"ready": true'

Repairer = Callable[[Connection], None]


def _bare(done: Connection) -> None:
    """Listen, get, set, get: the shortest loop with pyroute2."""
    ip: Any = IPRoute()
    events: Any = IPRoute()
    events.bind(groups=RTMGRP_LINK)
    (index,) = ip.link_lookup(ifname=NETDEV)
    done.send("ready")
    while True:
        for event in events.get():
            if event.get("index") != index:
                continue
            if ip.link("get", index=index)[0].get("mtu") != MTU:
                ip.link("set", index=index, mtu=MTU)
                if ip.link("get", index=index)[0].get("mtu") == MTU:
                    done.send(time.monotonic_ns())


class _Reports:
    """The worker's output. It passes on each report that the node is ready again."""

    def __init__(self, done: Connection) -> None:
        self._done = done
        self._ready = False

    def write(self, text: str) -> int:
        """Take one line. It is not parsed: that is the supervisor's work, in a process of its own."""
        ready = READY in text
        if ready and not self._ready:
            self._done.send(time.monotonic_ns())
        self._ready = ready
        return len(text)

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""


def _agent(done: Connection) -> None:
    """The agent's worker, as the service runs it."""
    reports: Any = _Reports(done)
    keep(NETDEV, reports)


def measure(repairer: Repairer, rounds: int) -> list[float]:
    """Milliseconds of each round."""
    took = []
    with IPRoute() as ip, child(repairer) as (_, repaired):
        (index,) = ip.link_lookup(ifname=NETDEV)
        repaired.recv()
        for _ in range(rounds):
            began = time.monotonic_ns()
            ip.link("set", index=index, mtu=BROKEN)
            if not repaired.poll(10):
                raise click.ClickException(f"{repairer.__name__} did not repair within 10 s")
            took.append((repaired.recv() - began) / 1e6)
            # Wait for the passes that the repair's own events cause: they do not belong to the next round.
            time.sleep(0.02)
    return took


def _measured(others: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the agent and of the bare loop, beside ``others`` more netdevs."""
    with IPRoute() as ip:
        ip.link("add", ifname=NETDEV, kind="veth", peer="fab1")
        for name in (NETDEV, "fab1"):
            ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")
        for number in range(others // 2):
            ip.link("add", ifname=f"other{number}", kind="veth", peer=f"peer{number}")
    bare = measure(_bare, rounds)
    return measure(_agent, rounds), bare


@click.command()
@click.option("--rounds", default=200, show_default=True, help="Repairs of each.")
@click.option("--others", default=1000, show_default=True, help="Other netdevs in the second run.")
def main(rounds: int, others: int) -> None:
    """Print the milliseconds from drift to verified repair, of the agent and of the bare loop."""
    table = Table("other netdevs", "", "p50", "p99", title="drift to verified repair, milliseconds")
    for count in (0, others):
        ours, bare = apart(_measured, count, rounds)
        for name, took in (("agent", ours), ("bare pyroute2", bare)):
            table.add_row(str(count), name, *(f"{_percentile(took, share):.2f}" for share in (50, 99)))
        ratios = (_percentile(ours, share) / _percentile(bare, share) for share in (50, 99))
        table.add_row(str(count), "ratio", *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=100).print(table)


def _percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


if __name__ == "__main__":
    main()
