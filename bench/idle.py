"""Measures the agent's CPU time, wake-ups and memory while nothing happens: `python -m bench.idle` (as root).

Supervisor, worker and reporter run as their services run them, on this host's kernel in a network namespace of their own.
With `--node` the processes of a node of the lab are measured instead, with its drivers and, in `make lab-cluster`, with
Kubernetes. The counterpart of their memory is a Python that has imported pyroute2 and does nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from attrs import frozen

# Modules that only the measuring process needs are imported there: the measured processes import what the services import.

NICS = 8
BARE = "import pyroute2, sys; print(flush=True); sys.stdin.read()"
READ = """
for pid in {pids}; do
    echo process
    grep -h ^voluntary_ctxt_switches: /proc/$pid/task/*/status
    grep ^Pss: /proc/$pid/smaps_rollup
    echo ticks: $(sed 's/.*) //' /proc/$pid/stat | cut -d ' ' -f 12,13)
done
"""
ON_NODE = "cat /sys/fs/cgroup/system.slice/{unit}.service/cgroup.procs"
TICKS = os.sysconf("SC_CLK_TCK")

Shell = Callable[[str], str]


@frozen
class Usage:
    """A process's CPU seconds, its wake-ups (voluntary context switches of all threads), and its proportional set size in MB.

    The thread in which the worker reads its probes ends each time, so its one wake-up a minute is not counted.
    """

    cpu: float
    wakeups: int
    pss: float


def usages(shell: Shell, pids: list[int]) -> list[Usage]:
    """Read the usage of processes from /proc."""
    return [
        _usage(text.splitlines()) for text in shell(READ.format(pids=" ".join(map(str, pids)))).split("process\n")[1:]
    ]


def _usage(lines: list[str]) -> Usage:
    def values(key: str) -> list[int]:
        return [int(word) for line in lines if line.startswith(key) for word in line.split()[1:] if word.isdigit()]

    return Usage(sum(values("ticks:")) / TICKS, sum(values("voluntary_ctxt_switches:")), sum(values("Pss:")) / 1024)


def here(script: str) -> str:
    """Run a script on this host."""
    return subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout


def serve(folder: Path) -> None:
    """Run supervisor and worker, with a spec of existing NICs."""
    from agent.report.publisher import Publisher
    from agent.runtime import boot_id, version
    from agent.service.supervisor import supervise

    command = [sys.executable, "-m", "bench.idle", "worker", str(folder)]
    supervise(command, Publisher(folder, boot_id(), version()))


def work(folder: Path, activity: int) -> None:
    """Run the worker of :func:`serve`."""
    from agent import linux
    from agent.service import worker
    from agent.spec.node import from_mapping, to_json
    from bench.namespace import devices, enter

    enter()
    _network()

    nics = [{"name": f"rail{n}", "select": {"pci": f"0000:{n + 1:02x}:00.0"}, "mtu": 1500} for n in range(NICS)]
    (folder / "node.json").write_text(to_json(from_mapping({"node_name": "bench", "nics": nics})))
    with devices({f"0000:{n + 1:02x}:00.0": f"fab{n}" for n in range(NICS)}):
        worker.main(linux.machine(), folder / "node.json", folder, folder, (), activity)


def _network() -> None:
    from pyroute2.iproute.linux import IPRoute

    with IPRoute() as ip:
        for number in range(NICS):
            ip.link("add", ifname=f"fab{number}", kind="veth", peer=f"peer{number}")
            for name in (f"fab{number}", f"peer{number}"):
                ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")


@click.group(invoke_without_command=True)
@click.option("--seconds", default=600, show_default=True, help="How long to measure.")
@click.option("--node", "name", help="Measure this node of the running lab.")
@click.pass_context
def main(context: click.Context, seconds: int, name: str | None) -> None:
    """Print CPU time, wake-ups and memory of the idle agent, all processes together."""
    if context.invoked_subcommand:
        return
    if name is None:
        _host(seconds)
    else:
        _node(name, seconds)


def _host(seconds: int) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        commands = [[sys.executable, "-m", "bench.idle", what, folder] for what in ("serve", "reporter")]
        started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
        try:
            _until_ready(Path(folder))
            (supervisor, reporter) = (process.pid for process in started)
            children = [int(pid) for pid in here(f"cat /proc/{supervisor}/task/{supervisor}/children").split()]
            _print("on this host", here, [supervisor, *children], [reporter], seconds)
        finally:
            for process in started:
                process.terminate()
                process.wait()
    bare = subprocess.Popen([sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert bare.stdout is not None  # noqa: S101  PIPE was asked for
    bare.stdout.readline()
    click.echo(f"a bare Python with pyroute2: {usages(here, [bare.pid])[0].pss:.1f} MB")
    bare.send_signal(signal.SIGKILL)


def _node(name: str, seconds: int) -> None:
    from bench.nodes import nodes

    known = {node.name: node for node in nodes()}
    if name not in known:
        raise click.ClickException(f"the lab has no running node {name}; see `python -m lab status`")
    shell = known[name].sh
    agent, reporter = (
        [int(pid) for pid in shell(ON_NODE.format(unit=unit)).split()] for unit in ("trackbed", "trackbed-reporter")
    )
    _print(f"on {name}", shell, agent, reporter, seconds)


def _print(where: str, shell: Shell, agent: list[int], reporter: list[int], seconds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    pids = [*agent, *reporter]
    before = usages(shell, pids)
    time.sleep(seconds)
    after = usages(shell, pids)
    table = Table(
        "process", "CPU, % of a core", "wake-ups a second", "PSS, MB", title=f"{seconds} s of nothing {where}"
    )
    rows = [
        (100 * (now.cpu - then.cpu) / seconds, (now.wakeups - then.wakeups) / seconds, now.pss)
        for then, now in zip(before, after, strict=True)
    ]
    names = ["supervisor", *["worker"] * (len(agent) - 1), *["reporter"] * len(reporter)]
    total = tuple(map(sum, zip(*rows, strict=True)))
    for name, (cpu, wakeups, pss) in [*zip(names, rows, strict=True), ("together", total)]:
        table.add_row(name, f"{cpu:.3f}", f"{wakeups:.3f}", f"{pss:.1f}")
    Console(width=100).print(table)


def _until_ready(folder: Path) -> None:
    report = folder / "report.json"
    deadline = time.monotonic() + 30
    while not (report.exists() and '"ready": true' in report.read_text()):
        if time.monotonic() > deadline:
            raise click.ClickException(f"the agent was not ready after 30 s: {report.read_text()}")
        time.sleep(0.1)


@main.command(name="serve", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def _serve(folder: Path) -> None:
    os.environ.pop("NOTIFY_SOCKET", None)
    serve(folder)


@main.command(name="reporter", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def _reporter(folder: Path) -> None:
    from agent.report.names import REPORT
    from agent.reporter.http.address import Address
    from agent.reporter.http.server import serve

    serve(folder / REPORT, Address.parse("127.0.0.1:0"), None, lambda port: None)


@main.command(name="worker", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--activity", type=int, required=True)
def _worker(folder: Path, activity: int) -> None:
    work(folder, activity)


if __name__ == "__main__":
    main()
