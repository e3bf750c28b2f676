"""Measures what placing interrupts and RPS gain on each path of packets: `python -m bench.tuning`.

Two nodes of the lab exchange messages and a stream (qperf) from PF to PF, and between two network namespaces, as containers
have them: by a bridge, by macvlan, and by a VF of their own. Each is measured twice: with interrupts and queues as the agent
placed them, and as a kernel and its drivers leave them (each interrupt on any CPU, no packet steering). On one emulated
CPU thread the differences mean little; the command is for servers of yours that you add to the lab's ssh configuration.
"""

from __future__ import annotations

import re
import statistics

import click
from attrs import frozen
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lab
from bench.nodes import nodes

NIC = lab.MACHINES[0].nics[0]
PF, VF = NIC.netdev, f"{NIC.netdev}v0"
IN = "ip netns exec tuning"
# qperf's units, in microseconds and in bytes a second.
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "sec": 1e6, "KB/sec": 1e3, "MB/sec": 1e6, "GB/sec": 1e9}

AS_FOUND = f"""
for irq in /sys/bus/pci/devices/{NIC.pci}/msi_irqs/* /sys/bus/pci/devices/{NIC.pci}/virtfn0/msi_irqs/*; do
  echo 0-$(($(nproc) - 1)) > /proc/irq/${{irq##*/}}/smp_affinity_list 2>/dev/null || true
done
for queue in /sys/class/net/{PF}/queues/rx-* /sys/class/net/{VF}/queues/rx-*; do echo 0 > $queue/rps_cpus; done
"""


@frozen
class Way:
    """A path between the nodes: commands that create and remove its end (at address ``{ip}``), and where programs run."""

    name: str
    make: str
    remove: str
    prefix: str = IN


def _inside(netdev: str) -> str:
    return f"{IN} ip address add {{ip}}/24 dev {netdev}; {IN} ip link set {netdev} up"


WAYS = (
    Way("PF to PF", f"ip address add {{ip}}/24 dev {PF}", f"ip address del {{ip}}/24 dev {PF}", ""),
    Way(
        "bridge",
        f"ip netns add tuning; ip link add tuning-br type bridge; ip link set {PF} master tuning-br; ip link set tuning-br up"
        "; ip link add tuning-out type veth peer name eth0 netns tuning; ip link set tuning-out master tuning-br up"
        f"; {_inside('eth0')}",
        "ip netns del tuning; ip link del tuning-br",
    ),
    Way(
        "macvlan",
        f"ip netns add tuning; ip link add link {PF} name eth0 netns tuning type macvlan mode bridge; {_inside('eth0')}",
        "ip netns del tuning",
    ),
    Way(
        "a VF",
        f"ip netns add tuning; ip link set {VF} netns tuning; {_inside(VF)}",
        f"{IN} ip link set {VF} netns 1; ip netns del tuning; ip link set {VF} up",
    ),
)


def _measure(pair: tuple[lab.Node, ...], way: Way, as_found: bool, seconds: int) -> dict[str, float]:
    """Microseconds there and back, and bytes a second."""
    ends = tuple(f"10.99.0.{number}" for number in (1, 2))
    try:
        for node, ip in zip(pair, ends, strict=True):
            node.sh(way.make.format(ip=ip))
            if as_found:
                node.sh(AS_FOUND)
        server, client = pair
        server.sh(f"systemd-run --quiet --collect --unit=tuning {way.prefix} qperf")
        waits = f"until {way.prefix} qperf -t 1 {ends[0]} tcp_lat >/dev/null 2>&1; do sleep 0.2; done"
        client.sh(waits, timeout=120)
        output = client.sh(f"{way.prefix} qperf -t {seconds} {ends[0]} tcp_lat tcp_bw", timeout=60 + 4 * seconds)
        server.sh("systemctl stop tuning")
    finally:
        for node, ip in zip(pair, ends, strict=True):
            node.run(["sh", "-c", f"systemctl stop tuning 2>/dev/null; {way.remove.format(ip=ip)}"])
    values = re.findall(r"(latency|bw)\s*=\s*([\d.]+) (\S+)", output)
    return {name: float(value) * UNITS[unit] for name, value, unit in values}


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Measurements of each way.")
@click.option("--seconds", default=5, show_default=True, help="How long each measurement takes.")
def main(rounds: int, seconds: int) -> None:
    """Print latency and throughput of each way, with interrupts and queues as found and as planned."""
    pair = nodes()
    results: dict[tuple[str, bool], dict[str, float]] = {}
    for way in WAYS:
        for as_found in (False, True):
            rows = [
                _once(pair, way, as_found, seconds)
                for _ in track(range(rounds), f"{way.name}, {'as found' if as_found else 'as planned'}")
            ]
            results[way.name, as_found] = {
                name: statistics.median(row[name] for row in rows) for name in ("latency", "bw")
            }
    table = Table("way", "latency: as found", "as planned", "MB/s: as found", "as planned", title="qperf: us, MB/s")
    for way in WAYS:
        before, after = results[way.name, True], results[way.name, False]
        latencies = (f"{row['latency']:.0f}" for row in (before, after))
        rates = (f"{row['bw'] / 1e6:.1f}" for row in (before, after))
        table.add_row(way.name, *latencies, *rates)
    Console(width=100).print(table)


def _once(pair: tuple[lab.Node, ...], way: Way, as_found: bool, seconds: int) -> dict[str, float]:
    """Measure with the agent stopped, so that it neither repairs these settings nor takes CPU time."""
    for node in pair:
        node.sh("trackbed wait --timeout 120 && systemctl stop trackbed", timeout=150)
    try:
        return _measure(pair, way, as_found, seconds)
    finally:
        for node in pair:
            node.sh("systemctl start trackbed")
