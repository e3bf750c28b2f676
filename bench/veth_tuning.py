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

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from attrs import evolve, frozen

from agent import linux
from agent.hardware.cpu_owners import PODS, CpuOwners
from agent.hardware.functions import NET
from agent.hardware.placement import mask, pool, without
from agent.hardware.topology import read_topology
from agent.linux.namespaces import inside
from agent.machine import Namespace
from bench import exchange
from bench.comparison import compare, options

NAME = "veth_tuning"
ENDS = ("server", "client")
HOST = "host"
SERVER = "10.99.0.1"


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


PATHS: Mapping[str, Sequence[str]] = {
    "host to host": [f"link add eth0 netns {_name(ENDS[0])} type veth peer name eth0 netns {_name(ENDS[1])}"],
    "bridge": [*_bridge()],
    "macvlan": [*_macvlan()],
}


def _ip(words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise click.ClickException(f"ip {words}: {done.stderr.strip()}; run as root")


@contextmanager
def _made(path: Sequence[str]) -> Iterator[None]:
    """The namespaces, and the netdevs that these commands of ``ip`` make."""
    try:
        for end in (HOST, *ENDS):
            _ip(f"netns add {_name(end)}")
        for words in path:
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
        topology = evolve(topology, owners=CpuOwners({PODS: {last: "pod of the benchmark"}}))
    written = 0
    cpus = without(pool(topology, -1), topology.owners.of)
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


def _run(words: str, cpus: Sequence[int], end: str = "") -> subprocess.Popen[str]:
    """Start one of the programs of :mod:`bench.exchange` on these CPUs, and in the namespace of an end."""
    inside = f"ip netns exec {_name(end)}" if end else ""
    command = [*inside.split(), "taskset", "-c", ",".join(map(str, cpus)), sys.executable, "-I", exchange.__file__]
    return subprocess.Popen([*command, *words.split()], stdout=subprocess.PIPE, text=True)


def _measured(program: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = program.communicate()
    if program.returncode:
        raise click.ClickException("the requests or the spinning program failed: its error stands above")
    result: dict[str, float] = json.loads(output)
    return result


def measure(path: Sequence[str], setting: Setting, seconds: float) -> dict[str, float]:
    """One round: requests a second, their p99, CPU time of a request, and the p99 of how long the spinning program stopped."""
    every = sorted(os.sched_getaffinity(0))
    cpus = every[:-1] or every if setting.spin else every
    with _made(path), ExitStack() as started:
        _set(setting)
        server = started.enter_context(_run(f"answer {SERVER}", cpus, ENDS[0]))
        started.callback(server.kill)
        if not (server.stdout and server.stdout.readline()):
            raise click.ClickException("the server did not start: its error stands above")
        client = _run(f"request {SERVER} {seconds}", cpus, ENDS[1])
        if not setting.spin:
            result = _measured(client)
            # Both ends add the CPU time of this machine, so the sum has it twice.
            return {**result, "cpu": result["cpu"] / 2}
        # The spinning program would count as work for the requests.
        stops, result = _measured(_run(f"spin {seconds}", every[-1:])), _measured(client)
        return {"rate": result["rate"], "p99": result["p99"], "gap": stops["gap"]}


@click.command()
@options(NAME)
@click.option("--seconds", default=4.0, show_default=True, help="How long each measurement takes.")
def main(rounds: int, seconds: float, record: bool) -> None:
    """Print the requests a second of each path with each setting, their p99, and their CPU time."""
    compare(
        NAME,
        PATHS,
        {setting.name: setting for setting in SETTINGS},
        lambda path, setting: measure(path, setting, seconds),
        rounds=rounds,
        record=record,
    )


if __name__ == "__main__":
    main()
