"""Measures what placing interrupts and RPS gain on each path of packets: `python -m bench.tuning`.

Two hosts exchange messages and a stream (qperf) from PF to PF, and between two network namespaces, as containers have them: by
a bridge, by macvlan, and by a VF of their own. Each is measured twice: with interrupts and queues as the agent placed them, and
as a kernel and its drivers leave them (each interrupt on any CPU, neither RPS nor XPS). It prints the medians, and draws them
with the range of the rounds. The hosts are two nodes of the lab, whose emulated CPUs make the differences small, or two servers
of yours (`--hosts`) that have an agent and qperf, and no jobs: the PF carries nothing else meanwhile.
"""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import click
from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lab
from bench.nodes import nodes

PF = lab.MACHINES[0].nics[0].netdev
IN = "ip netns exec tuning"
# qperf's units, in microseconds and in bytes a second.
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "sec": 1e6, "KB/sec": 1e3, "MB/sec": 1e6, "GB/sec": 1e9}

AS_FOUND = """
for irq in /sys/class/net/{pf}/device/msi_irqs/* /sys/class/net/{pf}/device/virtfn0/msi_irqs/*; do
  echo 0-$(($(nproc) - 1)) > /proc/irq/${{irq##*/}}/smp_affinity_list 2>/dev/null || true
done
"""

# In the network namespace of the path, too: /sys shows the netdevs of one namespace.
NO_STEERING = """
for mask in /sys/class/net/{pf}/queues/*/?ps_cpus /sys/class/net/{vf}/queues/*/?ps_cpus; do
  # A netdev with one queue has no XPS: its file refuses every write.
  if [ -e $mask ]; then echo 0 > $mask 2>/dev/null || true; fi
done
"""

Results = Mapping[tuple[str, bool], Sequence[Mapping[str, float]]]
"""By the way's name and whether interrupts and queues are as found: of each round, `latency` (us) and `bw` (bytes a second)."""

SHOWN = (
    ("latency", "latency there and back\nmicroseconds, less is better", 1.0),
    ("bw", "throughput\nMB/s, more is better", 1e-6),
)
"""What is drawn: the key of a round, what it is, and the factor to its unit."""

COLOURS = {True: "#8a929c", False: "#2f6fb7"}
RANGE = "#d07000"
LABELS = {True: "as found", False: "as planned"}


class Host(Protocol):
    """A host on which commands run as root."""

    def run(
        self, argv: Sequence[str], timeout: float = 60.0, *, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command. With `check` a failure is an error."""
        ...


@frozen
class Server:
    """A server that ssh reaches as root by this name."""

    name: str

    def run(
        self, argv: Sequence[str], timeout: float = 60.0, *, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command by ssh. With `check` a failure ends the benchmark."""
        words = ["ssh", "-o", "BatchMode=yes", "-l", "root", "--", self.name, shlex.join(argv)]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise click.ClickException(f"{self.name}: {shlex.join(argv)[:80]}: {done.stderr.strip()[-500:]}")
        return done


@frozen
class End:
    """A host with the names of its PF and of its first VF, and the address that it has on each path."""

    host: Host
    pf: str
    vf: str
    ip: str

    @classmethod
    def of(cls, host: Host, pf: str, ip: str) -> End:
        """Read the VF's name on the host."""
        vfs = host.run(["ls", f"/sys/class/net/{pf}/device/virtfn0/net"], check=True).stdout.split()
        if not vfs:
            raise click.ClickException(f"the first VF of {pf} has no netdev; `trackbed status` says why")
        return cls(host, pf, vfs[0], ip)

    def sh(self, script: str, timeout: float = 60.0, *, prefix: str = "") -> str:
        """Run a shell script with `{pf}`, `{vf}` and `{ip}` filled in, perhaps in a namespace; return what it prints."""
        text = script.format(pf=shlex.quote(self.pf), vf=shlex.quote(self.vf), ip=self.ip)
        try:
            return self.host.run([*prefix.split(), "sh", "-euc", text], timeout, check=True).stdout
        except lab.LabError as error:
            raise click.ClickException(str(error)) from None


@frozen
class Way:
    """A path between the hosts: scripts that create and remove its end, and where programs run."""

    name: str
    make: str
    remove: str
    prefix: str = IN


def _inside(netdev: str) -> str:
    return f"{IN} ip address add {{ip}}/24 dev {netdev}; {IN} ip link set {netdev} up"


MAC = f"$({IN} cat /sys/class/net/eth0/address)"

# Two traps of a bridge on a PF. The PF may drop packets whose destination is the namespace's MAC (igb with VFs does, even if
# promiscuous): it is told that MAC. A broadcast may come back to its sender (in the lab it does), and the bridge would learn
# from it that the namespace is outside: its port to the PF does not learn.
BRIDGE_PORT = f"bridge link set dev {{pf}} learning off; bridge fdb add {MAC} dev {{pf}} self"

WAYS = (
    Way("PF to PF", "ip address add {ip}/24 dev {pf}", "ip address del {ip}/24 dev {pf}", ""),
    Way(
        "bridge",
        "ip netns add tuning; ip link add tuning-br type bridge; ip link set {pf} master tuning-br; ip link set tuning-br up"
        "; ip link add tuning-out type veth peer name eth0 netns tuning; ip link set tuning-out master tuning-br up"
        f"; {_inside('eth0')}; {BRIDGE_PORT}",
        f"bridge fdb del {MAC} dev {{pf}} self; ip netns del tuning; ip link del tuning-br",
    ),
    Way(
        "macvlan",
        f"ip netns add tuning; ip link add link {{pf}} name eth0 netns tuning type macvlan mode bridge; {_inside('eth0')}",
        "ip netns del tuning",
    ),
    Way(
        "a VF",
        f"ip netns add tuning; ip link set {{vf}} netns tuning; {_inside('{vf}')}",
        f"{IN} ip link set {{vf}} netns 1; ip netns del tuning; ip link set {{vf}} up",
    ),
)


def _measure(ends: tuple[End, End], way: Way, as_found: bool, seconds: int) -> dict[str, float]:
    """Microseconds there and back, and bytes a second."""
    server, client = ends
    try:
        for end in ends:
            end.sh(way.make)
            if as_found:
                end.sh(AS_FOUND + NO_STEERING)
            if as_found and way.prefix:
                end.sh(NO_STEERING, prefix=way.prefix)
        server.sh(f"systemd-run --quiet --collect --unit=tuning {way.prefix} qperf")
        client.sh(f"until {way.prefix} qperf -t 1 {server.ip} tcp_lat >/dev/null 2>&1; do sleep 0.2; done", timeout=120)
        output = client.sh(f"{way.prefix} qperf -t {seconds} {server.ip} tcp_lat tcp_bw", timeout=60 + 4 * seconds)
        server.sh("systemctl stop tuning")
    finally:
        for end in ends:
            end.sh(f"systemctl stop tuning 2>/dev/null || true; {{{{ {way.remove}; }}}} || true")
    values = re.findall(r"(latency|bw)\s*=\s*([\d.]+) (\S+)", output)
    return {name: float(value) * UNITS[unit] for name, value, unit in values}


def picture_option(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option that names the picture's file."""
    path = click.Path(path_type=Path, dir_okay=False)
    return click.option(
        "--picture", default=default, show_default=True, type=path, help="The file to draw: .svg or .png."
    )


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Measurements of each way.")
@click.option("--seconds", default=5, show_default=True, help="How long each measurement takes.")
@picture_option("tuning.svg")
@click.option(
    "--hosts",
    nargs=2,
    metavar="SERVER CLIENT",
    help="Two servers of yours instead of the lab's nodes; ssh logs in as root.",
)
@click.option("--pf", default=PF, show_default=True, help="The netdev of the PF, on both hosts.")
def main(rounds: int, seconds: int, picture: Path, hosts: tuple[str, str] | None, pf: str) -> None:
    """Print and draw latency and throughput of each way, with interrupts and queues as found and as planned."""
    server, client = map(Server, hosts) if hosts else nodes()[:2]
    ends = End.of(server, pf, "10.99.0.1"), End.of(client, pf, "10.99.0.2")
    results: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for way in WAYS:
        for as_found in (False, True):
            results[way.name, as_found] = [
                _once(ends, way, as_found, seconds)
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
    error = {"lw": 1.5, "ecolor": RANGE}
    axes.barh(rows, medians, 0.36, xerr=ranges, color=COLOURS[as_found], label=LABELS[as_found], error_kw=error)
    for row, median, values in zip(rows, medians, rounds, strict=True):
        shown = f"{median:.0f}" if median >= 100 else f"{median:.3g}"
        axes.annotate(shown, (max(values), row), (4, 0), textcoords="offset points", va="center", fontsize=9)


def _once(ends: tuple[End, End], way: Way, as_found: bool, seconds: int) -> dict[str, float]:
    """Measure with the agent stopped, so that it neither repairs these settings nor takes CPU time."""
    for end in ends:
        # Not `wait`, which may see a report that is older than the change of the settings.
        end.sh("trackbed apply >/dev/null && systemctl stop trackbed", timeout=300)
    try:
        return _measure(ends, way, as_found, seconds)
    finally:
        for end in ends:
            end.sh("systemctl start trackbed", timeout=300)


if __name__ == "__main__":
    main()
