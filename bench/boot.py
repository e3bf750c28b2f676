"""Measures the agent's share of the time from power-on until the node is ready: `python -m bench.boot`.

It switches the first node of the lab off and on. The kernel's clock begins with the kernel, so what firmware takes before it is
not in the time, which makes the share larger than it is on a server. The agent's part is from the start of its unit until its
report says ready.
"""

from __future__ import annotations

import json
from statistics import median

import click
from attrs import frozen
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agent.report.names import REPORT, RUN_FOLDER
from bench.nodes import nodes
from lab import Node

MOST = 0.10
"""The part of the boot that the agent may take."""

READY_S = 300
STARTED = "systemctl show --property=ExecMainStartTimestampMonotonic --value trackbed"


@frozen
class Boot:
    """One boot, in seconds since the kernel began."""

    started: float
    ready: float

    @property
    def share(self) -> float:
        """The agent's part of the time until the node is ready."""
        return (self.ready - self.started) / self.ready


def boot(started: str, report: str) -> Boot:
    """A boot, by systemd's time stamp (microseconds) and the agent's report.

    :raises ValueError: the report does not say ready.
    """
    parsed = json.loads(report)
    if not parsed["ready"]:
        raise ValueError("the node is not ready")
    return Boot(int(started) / 1e6, float(parsed["since"]))


def measured(node: Node) -> Boot:
    """Switch the node off and on."""
    node.power_cut()
    node.boot()
    node.run(["trackbed", "wait", "--timeout", str(READY_S)], timeout=READY_S + 20, check=True)
    return boot(node.sh(STARTED), node.sh(f"cat {RUN_FOLDER}/{REPORT}"))


@click.command()
@click.option("--rounds", default=3, show_default=True, help="How often the node is switched off and on.")
def main(rounds: int) -> None:
    """Print the agent's share of each boot.

    Exit code: 0 at most a tenth (median), 1 more.
    """
    (node, *_) = nodes()
    table = Table("the unit starts", "the node is ready", "the agent's share", title="seconds since the kernel began")
    boots = []
    for _ in track(range(rounds), "power cut, and boot"):
        one = measured(node)
        boots.append(one)
        table.add_row(f"{one.started:.1f}", f"{one.ready:.1f}", f"{one.share:.0%}")
    console = Console(width=100)
    console.print(table)
    share = median(one.share for one in boots)
    console.print(f"median {share:.0%}; it may be {MOST:.0%}")
    raise SystemExit(int(share > MOST))


if __name__ == "__main__":
    main()
