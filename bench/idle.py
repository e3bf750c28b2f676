"""What the agent costs while nothing happens: `python -m bench.idle` (as root).

Supervisor and worker run as the service runs them, on this host's kernel in a network namespace of their own. The bare
counterpart of their memory is a Python that has imported pyroute2 and does nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from attrs import frozen

# What only the onlooker needs is imported by it: the processes that are measured have what the service's have.

NICS = 8
BARE = "import pyroute2, sys; print(flush=True); sys.stdin.read()"


@frozen
class Usage:
    """A process's CPU seconds, its wake-ups (voluntary context switches), and its proportional set size in MB."""

    cpu: float
    wakeups: int
    pss: float


def usage(pid: int) -> Usage:
    """Read one process's usage from /proc."""
    import psutil

    times = psutil.Process(pid).cpu_times()
    switches = _number(f"/proc/{pid}/status", "voluntary_ctxt_switches")
    return Usage(times.user + times.system, switches, _number(f"/proc/{pid}/smaps_rollup", "Pss") / 1024)


def _number(path: str, key: str) -> int:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == f"{key}:")


def serve(folder: Path) -> None:
    """Supervisor and worker, with a spec of some NICs that are there."""
    from agent.boot import boot_id
    from agent.supervise import Publisher, supervise
    from agent.version import version

    command = [sys.executable, "-m", "bench.idle", "worker", str(folder)]
    supervise(command, Publisher(folder, boot_id(), version()))


def work(folder: Path, activity: int) -> None:
    """The worker of :func:`serve`."""
    from agent import worker
    from agent.spec import from_mapping, to_json
    from bench.namespace import devices, machine

    nics = [{"name": f"rail{n}", "select": {"pci": f"0000:{n + 1:02x}:00.0"}, "mtu": 1500} for n in range(NICS)]
    (folder / "node.json").write_text(to_json(from_mapping({"node_name": "bench", "nics": nics})))
    with devices({f"0000:{n + 1:02x}:00.0": f"fab{n}" for n in range(NICS)}) as root:
        worker.main(machine(root), folder / "node.json", folder, folder, (), activity)


def _network() -> None:
    from pyroute2.iproute.linux import IPRoute

    with IPRoute() as ip:
        for number in range(NICS):
            ip.link("add", ifname=f"fab{number}", kind="veth", peer=f"peer{number}")
            for name in (f"fab{number}", f"peer{number}"):
                ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")


@click.group(invoke_without_command=True)
@click.option("--seconds", default=600, show_default=True, help="How long to look.")
@click.pass_context
def main(context: click.Context, seconds: int) -> None:
    """Print CPU, wake-ups and memory of the idle agent, all processes together."""
    if context.invoked_subcommand:
        return
    from rich.console import Console
    from rich.table import Table

    with TemporaryDirectory(dir="/dev/shm") as folder:
        serving = subprocess.Popen([sys.executable, "-m", "bench.idle", "serve", folder], stdout=subprocess.DEVNULL)
        try:
            found = _look(serving.pid, Path(folder), seconds)
        finally:
            serving.terminate()
            serving.wait()
    bare = subprocess.Popen([sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert bare.stdout is not None  # noqa: S101  PIPE was asked for
    bare.stdout.readline()
    table = Table("", "figure", title=f"supervisor and worker, {NICS} NICs, {seconds} s of nothing")
    table.add_row("CPU, % of one core", f"{100 * found.cpu / seconds:.3f}")
    table.add_row("wake-ups a second", f"{found.wakeups / seconds:.3f}")
    table.add_row("PSS, MB", f"{found.pss:.1f}")
    table.add_row("PSS of a bare Python with pyroute2, MB", f"{usage(bare.pid).pss:.1f}")
    bare.send_signal(signal.SIGKILL)
    Console(width=100).print(table)


def _look(pid: int, folder: Path, seconds: int) -> Usage:
    import psutil

    report = folder / "report.json"
    deadline = time.monotonic() + 30
    while not (report.exists() and '"ready": true' in report.read_text()):
        if time.monotonic() > deadline:
            raise click.ClickException(f"the agent was not ready after 30 s: {report.read_text()}")
        time.sleep(0.1)
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    before = [usage(pid) for pid in pids]
    time.sleep(seconds)
    after = [usage(pid) for pid in pids]
    return Usage(
        sum(a.cpu - b.cpu for a, b in zip(after, before, strict=True)),
        sum(a.wakeups - b.wakeups for a, b in zip(after, before, strict=True)),
        sum(a.pss for a in after),
    )


@main.command(name="serve", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def _serve(folder: Path) -> None:
    from bench.namespace import enter

    enter()
    _network()
    os.environ.pop("NOTIFY_SOCKET", None)
    serve(folder)


@main.command(name="worker", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--activity", type=int, required=True)
def _worker(folder: Path, activity: int) -> None:
    work(folder, activity)


if __name__ == "__main__":
    main()
