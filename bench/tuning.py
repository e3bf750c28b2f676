"""Measures what placing interrupts and RPS gain on each path of packets: `python -m bench.tuning`.

Two nodes of the lab exchange messages and a stream (qperf) from PF to PF, and between two network namespaces, as containers
have them: by a bridge, by macvlan, and by a VF of their own. Each is measured twice: with interrupts and queues as the agent
placed them, and as a kernel and its drivers leave them (each interrupt on any CPU, no packet steering). It prints the medians,
and draws them with the range of the rounds. On one emulated CPU thread the differences mean little; the command is for servers
of yours that you add to the lab's ssh configuration.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
"""

# In the network namespace of the path, too: /sys shows the netdevs of one namespace.
NO_STEERING = f"""
for queue in /sys/class/net/{PF}/queues/rx-* /sys/class/net/{VF}/queues/rx-*; do
  if [ -e $queue ]; then echo 0 > $queue/rps_cpus; fi
done
"""

Results = Mapping[tuple[str, bool], Sequence[Mapping[str, float]]]
"""By the way's name and whether interrupts and queues are as found: of each round, `latency` (us) and `bw` (bytes a second)."""

SHOWN = (
    ("latency", "latency there and back: microseconds, less is better", 1.0),
    ("bw", "throughput: MB/s, more is better", 1e-6),
)
"""What is drawn: the key of a round, what it is, and the factor to its unit."""

COLOURS = {True: "#8a929c", False: "#2f6fb7"}
LABELS = {True: "as found", False: "as planned"}


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
                node.sh(AS_FOUND + NO_STEERING)
            if as_found and way.prefix:
                node.run([*way.prefix.split(), "sh", "-ec", NO_STEERING], check=True)
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
@click.option(
    "--picture",
    default="tuning.svg",
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to draw: .svg or .png.",
)
def main(rounds: int, seconds: int, picture: Path) -> None:
    """Print and draw latency and throughput of each way, with interrupts and queues as found and as planned."""
    pair = nodes()
    results: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for way in WAYS:
        for as_found in (False, True):
            results[way.name, as_found] = [
                _once(pair, way, as_found, seconds)
                for _ in track(range(rounds), f"{way.name}, {'as found' if as_found else 'as planned'}")
            ]
    _print(results)
    drawn(results).savefig(picture)
    click.echo(f"the picture is {picture}")


def _print(results: Results) -> None:
    table = Table("way", "latency: as found", "as planned", "MB/s: as found", "as planned", title="qperf: us, MB/s")
    for way in WAYS:
        both = [results[way.name, as_found] for as_found in (True, False)]
        latencies = (f"{_median(rows, 'latency'):.0f}" for rows in both)
        rates = (f"{_median(rows, 'bw') / 1e6:.1f}" for rows in both)
        table.add_row(way.name, *latencies, *rates)
    Console(width=100).print(table)


def _median(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def drawn(results: Results) -> Figure:
    """A picture: for each way two bars of its median, as found and as planned, with the range of its rounds."""
    figure = Figure(figsize=(11, 0.8 + 0.75 * len(WAYS)), layout="constrained")
    for axes, (name, title, factor) in zip(figure.subplots(1, 2, sharey=True), SHOWN, strict=True):
        for as_found, place in ((True, -0.2), (False, 0.2)):
            _draw(axes, results, name, factor, as_found, place)
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(WAYS)), [way.name for way in WAYS])
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw(axes: Axes, results: Results, name: str, factor: float, as_found: bool, place: float) -> None:
    rounds = [[row[name] * factor for row in results[way.name, as_found]] for way in WAYS]
    medians = [statistics.median(values) for values in rounds]
    ranges = [
        [median - min(values) for median, values in zip(medians, rounds, strict=True)],
        [max(values) - median for median, values in zip(medians, rounds, strict=True)],
    ]
    rows = [row + place for row in range(len(WAYS))]
    axes.barh(rows, medians, 0.36, xerr=ranges, color=COLOURS[as_found], label=LABELS[as_found], error_kw={"lw": 1})
    for row, median, values in zip(rows, medians, rounds, strict=True):
        shown = f"{median:.0f}" if median >= 100 else f"{median:.3g}"
        axes.annotate(shown, (max(values), row), (4, 0), textcoords="offset points", va="center", fontsize=9)


def _once(pair: tuple[lab.Node, ...], way: Way, as_found: bool, seconds: int) -> dict[str, float]:
    """Measure with the agent stopped, so that it neither repairs these settings nor takes CPU time."""
    for node in pair:
        # Not `wait`, which may see a report that is older than the change of the settings.
        node.sh("trackbed apply >/dev/null && systemctl stop trackbed", timeout=300)
    try:
        return _measure(pair, way, as_found, seconds)
    finally:
        for node in pair:
            node.sh("systemctl start trackbed")
