"""Measures steering and NAPI's settings on this host's own kernel, over veth: `python -m bench.veth_tuning` (as root).

Two network namespaces exchange small requests over a veth pair, a bridge and macvlan, with each setting: as the kernel leaves a
new netdev; with the RPS masks that the agent writes (`rps.netdevs`); and also with NAPI in threads, or with deferred
interrupts. A program that spins on the last CPU, as in a pod with CPUs of its own, notes how long it did not run: beside
traffic with RPS on all CPUs, and with RPS as it is once that CPU has an owner. The agent's own code computes the masks.

A veth has neither interrupts nor hardware queues, and without RPS its packets are processed on the CPU that sends. So nothing
here says what the placement of interrupts gains, nor coalescing, nor anything about a NIC. It has NAPI instances only while GRO
is on, so that is a setting of its own. macvlan is on top of a veth.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import socket
import statistics
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click
from attrs import evolve, frozen
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agent import linux
from agent.hardware.cpu_owners import CpuOwners
from agent.hardware.functions import NET
from agent.hardware.placement import mask, pool, without
from agent.hardware.topology import read_topology
from agent.linux.namespaces import inside
from agent.machine import Namespace
from bench.tuning import picture_option

RECORD = Path(__file__).parents[1] / "docs/campaign/veth_tuning.json"
ENDS = ("server", "client")
HOST = "host"
CONNECTIONS = 8
MESSAGE = bytes(64)
PORT = 7000
MILLISECOND = 1_000_000

COLUMNS = {
    "way": "Way",
    "setting": "Setting",
    "rate": "Requests/s",
    "p99": "p99, µs",
    "cpu": "CPU per request, µs",
    "gap": "Longest stop in each ms of a spinning program: p99, µs",
}
MEASURED = ("rate", "p99", "cpu", "gap")


@frozen
class Setting:
    """``rps``: receive packet steering is on; ``owned``: the last CPU has an owner. ``napi``: GRO is on, and the files of each
    veth to write.

    ``spin``: a program spins on the last CPU, and the others run the traffic's programs.
    """

    name: str
    rps: bool = False
    owned: bool = False
    spin: bool = False
    napi: Mapping[str, str] | None = None


SETTINGS = (
    Setting("as found"),
    Setting("RPS as placed", rps=True),
    Setting("RPS, GRO", rps=True, napi={}),
    Setting("RPS, GRO, threaded NAPI", rps=True, napi={"threaded": "1"}),
    Setting("RPS, GRO, deferred NAPI", rps=True, napi={"napi_defer_hard_irqs": "2", "gro_flush_timeout": "20000"}),
    Setting("beside a spinning program: as found", spin=True),
    Setting("beside it: RPS on all CPUs", rps=True, spin=True),
    Setting("beside it: its CPU has an owner", rps=True, owned=True, spin=True),
)


def _bridge() -> Iterator[str]:
    yield f"-n {_name(HOST)} link add br0 up type bridge"
    for end in ENDS:
        yield f"link add eth0 netns {_name(end)} type veth peer name {end} netns {_name(HOST)}"
        yield f"-n {_name(HOST)} link set {end} master br0 up"


def _macvlan() -> Iterator[str]:
    yield f"-n {_name(HOST)} link add wire0 up type veth peer name wire1"
    yield f"-n {_name(HOST)} link set wire1 up"
    for end, wire in zip(ENDS, ("wire0", "wire1"), strict=True):
        yield f"-n {_name(HOST)} link add link {wire} name eth0 netns {_name(end)} type macvlan mode bridge"


def _name(end: str) -> str:
    return f"veth-tuning-{end}"


WAYS: Mapping[str, Sequence[str]] = {
    "host to host": [f"link add eth0 netns {_name(ENDS[0])} type veth peer name eth0 netns {_name(ENDS[1])}"],
    "bridge": [*_bridge()],
    "macvlan": [*_macvlan()],
}


def _ip(words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise click.ClickException(f"ip {words}: {done.stderr.strip()}; run as root")


@contextmanager
def _made(way: str) -> Iterator[None]:
    """The namespaces and netdevs of a way."""
    try:
        for end in (HOST, *ENDS):
            _ip(f"netns add {_name(end)}")
        for words in WAYS[way]:
            _ip(words)
        for number, end in enumerate(ENDS, 1):
            _ip(f"-n {_name(end)} address add 10.99.0.{number}/24 dev eth0")
            _ip(f"-n {_name(end)} link set eth0 up")
        yield
    finally:
        for end in (HOST, *ENDS):
            _ip(f"netns del {_name(end)}", check=False)


def _namespace(end: str) -> Namespace:
    path = Path(f"/run/netns/{_name(end)}")
    return Namespace(path.stat().st_ino, str(path))


def _set(setting: Setting) -> None:
    """Write a setting to all netdevs of the three namespaces."""
    machine = linux.machine()
    topology = read_topology(machine)
    last = max(topology.cpus)
    if setting.owned:
        topology = evolve(topology, owners=CpuOwners(pods={last: "pod of the benchmark"}))
    written = 0
    cpus = without(pool(topology, -1), topology.owners.of).cpus
    for end in (HOST, *ENDS):
        with machine.namespaces.files(_namespace(end)) as files:
            for netdev in files.names(NET):
                queues = [name for name in files.names(f"{NET}/{netdev}/queues") if name.startswith("rx-")]
                for queue in queues if setting.rps and netdev != "lo" else ():
                    files.write(f"{NET}/{netdev}/queues/{queue}/rps_cpus", mask(cpus))
                if (
                    setting.napi is not None
                    and netdev in ("eth0", *ENDS, "wire0", "wire1")
                    and _turn_on_gro(end, netdev)
                ):
                    for name, value in setting.napi.items():
                        files.write(f"{NET}/{netdev}/{name}", value)
                        written += 1
    _expect(setting, written)


def _turn_on_gro(end: str, netdev: str) -> bool:
    """Turn GRO on. A veth has NAPI instances only then (veth_set_features, drivers/net/veth.c): whether this netdev has any."""
    machine = linux.machine()
    with inside(_namespace(end)):
        index = socket.if_nametoindex(netdev)
        if "rx-gro" in machine.ethtool.settings("features", index):
            machine.ethtool.set("features", index, {"rx-gro": True})
        return bool(machine.netlink.napis(index))


def _expect(setting: Setting, written: int) -> None:
    if setting.napi and not written:
        raise click.ClickException(f"no veth has NAPI instances, so {setting.name} cannot be measured on this kernel")


def _child(function: Callable[..., Any], *given: Any, end: str = "", cpus: Sequence[int] = ()) -> Any:
    """Start a function in a new process, in a namespace and on these CPUs. Returns the process, and our end of a pipe to it."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        os.sched_setaffinity(0, cpus)
        with inside(_namespace(end)) if end else nullcontext():
            function(theirs, *given)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(pipe: Any) -> None:
    """Send back whatever comes, until the process is ended."""
    listener = socket.create_server(("10.99.0.1", PORT), backlog=CONNECTIONS)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    peers: dict[int, socket.socket] = {}
    pipe.send("serving")
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                peer, _ = listener.accept()
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peers[peer.fileno()] = peer
                poll.register(peer, select.EPOLLIN)
            else:
                data = b""
                with suppress(ConnectionError):  # the client has ended
                    data = peers[number].recv(4096)
                    peers[number].sendall(data)
                if not data:
                    poll.unregister(number)


def _request(pipe: Any, seconds: float) -> None:
    """Send on each connection, wait for the answer, send again; the times of all, in nanoseconds."""
    poll, sent, times = select.epoll(), {}, []
    peers = {}
    for _ in range(CONNECTIONS):
        peer = socket.create_connection(("10.99.0.1", PORT), timeout=20)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[peer.fileno()] = peer
        poll.register(peer, select.EPOLLIN)
    end = time.perf_counter_ns() + int(seconds * 1e9)
    for number, peer in peers.items():
        sent[number] = time.perf_counter_ns()
        peer.sendall(MESSAGE)
    while (now := time.perf_counter_ns()) < end:
        for number, _ in poll.poll(1):
            peers[number].recv(4096)
            now = time.perf_counter_ns()
            times.append(now - sent[number])
            sent[number] = now
            peers[number].sendall(MESSAGE)
    pipe.send(times)


def _spin(pipe: Any, seconds: float) -> None:
    """The longest time for which the program did not run, of each millisecond, in nanoseconds."""
    gc.disable()
    longest = []
    clock = time.perf_counter_ns
    last = clock()
    end = last + int(seconds * 1e9)
    while last < end:
        until, most = last + MILLISECOND, 0
        while last < until:
            now = clock()
            most = max(most, now - last)
            last = now
        longest.append(most)
    pipe.send(longest)


def _busy() -> float:
    """CPU seconds that all programs and the kernel have used: /proc/stat without idle and iowait."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _p99(values: Sequence[int]) -> float:
    return statistics.quantiles(values, n=100)[98] / 1000 if len(values) > 1 else 0.0


def measure(way: str, setting: Setting, seconds: float) -> dict[str, float]:
    """One round: requests a second, their p99, CPU time of a request, and the p99 of how long the spinning program stopped."""
    every = sorted(os.sched_getaffinity(0))
    cpus = every[:-1] or every if setting.spin else every
    with _made(way):
        _set(setting)
        server, serving = _child(_answer, end=ENDS[0], cpus=cpus)
        spinning = spinner = None
        try:
            serving.recv()
            before = _busy()
            client, answered = _child(_request, seconds, end=ENDS[1], cpus=cpus)
            if setting.spin:
                spinner, spinning = _child(_spin, seconds, cpus=every[-1:])
            times = answered.recv()
            used = _busy() - before
            gaps = spinning.recv() if spinning else []
            client.join()
        finally:
            for process in (server, spinner):
                if process is not None:
                    process.kill()
                    process.join()
    result = {"rate": len(times) / seconds, "p99": _p99(times)}
    # The spinning program would count as work for the requests.
    return result | ({"gap": _p99(gaps)} if setting.spin else {"cpu": used * 1e6 / len(times)})


def rows(results: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> list[dict[str, str]]:
    """A row for each way and setting: the medians of the rounds, with their range."""
    return [
        {
            "way": way,
            "setting": setting,
            **{key: _shown([each[key] for each in rounds if key in each]) for key in MEASURED},
        }
        for (way, setting), rounds in results.items()
    ]


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def drawn(runs: Sequence[Mapping[str, str]]) -> Figure:
    """A bar chart for each column, in which each row has a bar: the median."""
    figure = Figure(figsize=(13, 0.8 + 0.3 * len(runs)), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(MEASURED), sharey=True), MEASURED, strict=True):
        medians = [float(run[key].split()[0]) if run[key] else 0.0 for run in runs]
        axes.barh(range(len(runs)), medians, 0.7, color="#2f6fb7")
        for place, run in enumerate(runs):
            axes.annotate(
                run[key].split(" ")[0], (medians[place], place), (3, 0), textcoords="offset points", va="center"
            )
        axes.set_title(textwrap.fill(COLUMNS[key], 28), fontsize=9)
        axes.set_yticks(range(len(runs)), [f"{run['way']}, {run['setting']}" for run in runs], fontsize=8)
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    return figure


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Measurements of each way and setting.")
@click.option("--seconds", default=4.0, show_default=True, help="How long each measurement takes.")
@click.option(
    "--record", is_flag=True, help="Write docs/campaign/veth_tuning.json, from which `make docs` makes the table."
)
@picture_option("veth-tuning.svg")
def main(rounds: int, seconds: float, record: bool, picture: Path) -> None:
    """Print and draw the requests a second of each way with each setting, their p99, and their CPU time."""
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    # Each round measures everything once, so that what else the machine does meanwhile is spread over all.
    for number in range(rounds):
        every = [(way, setting) for way in WAYS for setting in SETTINGS]
        for way, setting in track(every, f"round {number + 1} of {rounds}", console=Console(stderr=True)):
            results.setdefault((way, setting.name), []).append(measure(way, setting, seconds))
    runs = rows(results)
    table = Table(
        *COLUMNS.values(),
        title=f"median (range) of {rounds} rounds of {seconds:g} s on {len(os.sched_getaffinity(0))} CPUs",
    )
    for run in runs:
        table.add_row(*(run[key] for key in COLUMNS))
    Console(width=150).print(table)
    drawn(runs).savefig(picture)
    click.echo(f"the picture is {picture}")
    if record:
        RECORD.write_text(json.dumps({"columns": COLUMNS, "runs": runs}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
