"""Measures how a full observation and plan slow down as a node grows, on the simulated kernel: `python -m bench.scale`."""

from __future__ import annotations

import gc
import math
import time

import click
from rich.console import Console
from rich.table import Table

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.dry_run import dry_run
from agent.machine import Machine
from agent.spec.node import NodeSpec, from_mapping
from tests.sim.kernel import Kernel

VFS_PER_NIC = 128
IRQS_PER_VF = 4


def node(vfs: int) -> tuple[Machine, NodeSpec]:
    """A simulated node with the given number of VFs, all as its spec says."""
    kernel = Kernel(cpus=128, nodes=2, vf_queues=IRQS_PER_VF - 1)
    nics = []
    for number in range(math.ceil(vfs / VFS_PER_NIC)):
        address = f"0000:{number + 1:02x}:00.0"
        count = min(VFS_PER_NIC, vfs)
        kernel.add_nic(address, f"rail{number}", f"02:00:00:{number:02x}:01:00", node=number % 2, total_vfs=count)
        nic = {"name": f"rail{number}", "select": {"pci": address}, "mtu": 9000}
        nics.append({**nic, "vfs": {"count": count, "defaults": {"trust": True}}})
    spec = from_mapping({"node_name": "bench", "nics": nics})
    machine = kernel.machine()
    left = converge(machine, Goal(spec), Memory(time.monotonic)).outcomes
    if differing := [outcome for outcome in left if outcome.result != "applied"]:
        raise click.ClickException(f"the simulated node did not converge: {differing[0]}")
    return machine, spec


def milliseconds(vfs: int, rounds: int) -> float:
    """The fastest round: other programs on this machine only ever add time."""
    machine, spec = node(vfs)
    # The garbage collector must not scan the simulated kernel's objects, which are not the agent's.
    gc.collect()
    gc.freeze()
    took = []
    for _ in range(rounds):
        began = time.process_time()
        planned = dry_run(machine, spec)
        took.append((time.process_time() - began) * 1000)
        if planned.changes:
            raise click.ClickException(f"the simulated node drifted: {planned.changes[0]}")
    return min(took)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Observations of each size.")
def main(rounds: int) -> None:
    """Print the milliseconds of CPU time of one observation and plan, and the exponent of their growth."""
    sizes = (64, 256, 1024, 4096)
    table = Table("VFs", "interrupts", "milliseconds", "growth since the row above", title="observe and plan")
    times: list[float] = []
    for size in sizes:
        times.append(milliseconds(size, rounds))
        growth = f"n^{math.log(times[-1] / times[-2]) / math.log(4):.2f}" if len(times) > 1 else ""
        table.add_row(str(size), str(size * IRQS_PER_VF), f"{times[-1]:.1f}", growth)
    Console(width=100).print(table)
    exponent = math.log(times[-1] / times[0]) / math.log(sizes[-1] / sizes[0])
    Console().print(f"growth from {sizes[0]} to {sizes[-1]} VFs: n^{exponent:.2f}")


if __name__ == "__main__":
    main()
