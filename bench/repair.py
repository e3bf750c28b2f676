"""Measures how fast drift is repaired on a node of the lab, beside the same writes by a shell: `python -m bench.repair`.

The node's own clock measures the time from the end of the write that broke something until an independent tool reads the
wanted value again. That tool pauses between two readings, since all CPUs of an emulated node share one thread of this host.
The counterpart is a shell that makes the same write.
"""

from __future__ import annotations

import statistics

import click
from attrs import frozen
from rich.console import Console
from rich.table import Table

import lab
from bench.nodes import nodes

NIC = lab.MACHINES[0].nics[0]
SYSFS = f"/sys/bus/pci/devices/{NIC.pci}"


@frozen
class Drift:
    """One kind of drift: the command that breaks the value, the command that mends it, and the check that it is mended."""

    name: str
    broken: str
    mended: str
    holds: str


DRIFTS = (
    Drift(
        "VF trust",
        f"ip link set {NIC.netdev} vf 2 trust off",
        f"ip link set {NIC.netdev} vf 2 trust on",
        f"ip link show {NIC.netdev} | grep -q 'vf 2 .*trust on'",
    ),
    Drift(
        "VF MTU",
        f"ip link set {NIC.netdev}v3 mtu 1500",
        f"ip link set {NIC.netdev}v3 mtu 9000",
        f"test $(cat /sys/class/net/{NIC.netdev}v3/mtu) = 9000",
    ),
    Drift(
        "all VFs deleted",
        f"echo 0 > {SYSFS}/sriov_numvfs",
        f"echo 7 > {SYSFS}/sriov_numvfs",
        f"test $(cat {SYSFS}/sriov_numvfs) = 7",
    ),
)

AGENT = """
{broken}
began=$(date +%s%N)
until {holds}; do sleep 0.02; done
echo $((($(date +%s%N) - began) / 1000000))
"""
BARE = """
{broken}
began=$(date +%s%N)
{mended}
until {holds}; do sleep 0.02; done
echo $((($(date +%s%N) - began) / 1000000))
"""


def _measure(node: lab.Node, script: str, drift: Drift, rounds: int) -> list[int]:
    text = script.format(broken=drift.broken, mended=drift.mended, holds=drift.holds)
    return [_once(node, text) for _ in range(rounds)]


def _once(node: lab.Node, text: str) -> int:
    """Measure once, and wait until the node has recovered."""
    took = int(node.sh(text, timeout=120))
    if node.run(["systemctl", "is-active", "--quiet", "trackbed"]).returncode == 0:
        # Not `wait`: `apply` also resets the count of how often the value was put back.
        node.run(["trackbed", "apply", "--timeout", "120"], timeout=150, check=True)
    # Wait for the passes that the repair's own events cause.
    node.sh("udevadm settle")
    return took


@click.command()
@click.option("--rounds", default=10, show_default=True, help="Measurements of each kind of drift.")
def main(rounds: int) -> None:
    """Print the milliseconds from drift to repair, by the agent and by hand."""
    (node, *_) = nodes()
    table = Table("drift", "agent: median", "agent: max", "bare: median", "bare: max", title="milliseconds")
    rows = {drift.name: _measure(node, AGENT, drift, rounds) for drift in DRIFTS}
    node.sh("systemctl stop trackbed")
    try:
        for drift in DRIFTS:
            bare = _measure(node, BARE, drift, rounds)
            ours = rows[drift.name]
            figures = (statistics.median(ours), max(ours), statistics.median(bare), max(bare))
            table.add_row(drift.name, *(f"{figure:.0f}" for figure in figures))
    finally:
        node.sh("systemctl start trackbed")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
