"""Measures a full observation beside many netdevs, and a bare pyroute2 dump of them: `python -m bench.observe` (as root)."""

from __future__ import annotations

import time
from typing import Any

import click
from pyroute2.iproute.linux import IPRoute
from rich.console import Console
from rich.table import Table

from agent import linux
from agent.engine.dry_run import dry_run
from agent.spec.node import from_mapping
from bench.namespace import apart, devices

NICS = 8


def _measured(netdevs: int, rounds: int) -> tuple[float, float]:
    """Milliseconds of an observation, and of a dump."""
    ip: Any = IPRoute()
    for number in range(netdevs // 2):
        ip.link("add", ifname=f"fab{number}", kind="veth", peer=f"peer{number}")
    functions = {f"0000:{number + 1:02x}:00.0": f"fab{number}" for number in range(NICS)}
    nics = [{"name": netdev, "select": {"pci": address}} for address, netdev in functions.items()]
    spec = from_mapping({"node_name": "bench", "nics": nics})
    bare, ours = [], []
    with devices(functions):
        node = linux.machine()
        for _ in range(rounds):
            began = time.perf_counter()
            list(ip.link("dump"))
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            dry_run(node, spec)
            ours.append(time.perf_counter() - began)
    return min(ours) * 1000, min(bare) * 1000


@click.command()
@click.option("--netdevs", default=1000, show_default=True, help="Netdevs in the namespace.")
@click.option(
    "--rounds", default=10, show_default=True, help="Rounds of an observation and a dump; the fastest counts."
)
def main(netdevs: int, rounds: int) -> None:
    """Print the milliseconds of both, and their ratio."""
    observed, dumped = apart(_measured, netdevs, rounds)
    table = Table("", "milliseconds", title=f"{netdevs} netdevs, {NICS} of them wanted")
    table.add_row("observe and plan everything", f"{observed:.1f}")
    table.add_row("bare pyroute2 dump", f"{dumped:.1f}")
    table.add_row("ratio", f"{observed / dumped:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
