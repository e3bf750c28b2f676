"""Arranges CPUs, NICs and GPUs by socket, NUMA node and last-level cache, with the interrupts that each CPU serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attrs import evolve, frozen

from agent.hardware.functions import PCI, device_path, driver
from agent.hardware.sysfs import names_in, read_or, whole
from agent.hardware.topology import CPU, Cpu, Topology, read_topology
from agent.machine import Files, Machine
from agent.report.printable import printable
from agent.spec.node import NodeSpec
from agent.spec.ranges import format_ranges, parse_ranges
from cli.inspection import NetworkFunction, inspect

# The classes of GPUs by the PCI ID of NVIDIA and of AMD: VGA compatible, 3D, display controller, processing accelerator.
GPU_CLASSES = {"0x10de": ("0x0300", "0x0302"), "0x1002": ("0x0300", "0x0302", "0x0380", "0x1200")}

EVERYWHERE = -1
"""The NUMA node of a device for which the firmware gives none."""

MISPLACED = "!"
"""Marks an interrupt on a CPU of another NUMA node than its device's."""


@frozen
class Served:
    """A queue whose interrupt a CPU serves. ``misplaced``: the device is on another NUMA node."""

    device: str
    queue: str
    misplaced: bool
    cpu: int

    def __str__(self) -> str:
        return f"{self.device} {self.queue}{MISPLACED if self.misplaced else ''}"


Load = Literal["none", "even", "double", "more"]
"""How many queues a core serves, in even shares of its NUMA node's queues: none, one share at most, two at most, or more."""


@frozen
class Core:
    """A core: its online CPUs, and the queues that they serve."""

    cpus: tuple[int, ...]
    serves: tuple[Served, ...]


@frozen
class Cache:
    """The cores that share a last-level cache."""

    cores: tuple[Core, ...]


@frozen
class Device:
    """A PF, or a GPU. ``vfs``: the numbers of its VFs; ``nic``: its name in the spec. ``queues_by``: what tells its queues."""

    address: str
    netdevs: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
    driver: str | None = None
    nic: str | None = None
    vfs: str = ""
    kind: str = "NIC"
    queues_by: str = ""


@frozen
class NumaNode:
    """A NUMA node. The node :data:`EVERYWHERE` has no CPUs, but the devices for which the firmware gives no node."""

    number: int
    socket: int | None
    caches: tuple[Cache, ...]
    devices: tuple[Device, ...]

    def load(self, core: Core) -> Load:
        """The load of one of its cores."""
        counts = [len(each.serves) for cache in self.caches for each in cache.cores]
        even = -(-sum(counts) // len(counts))
        queues = len(core.serves)
        return "none" if not queues else "even" if queues <= even else "double" if queues <= 2 * even else "more"


def gpus(files: Files) -> Iterator[tuple[str, int]]:
    """The GPUs on the bus, also those without a driver: PCI address and NUMA node (-1: the kernel does not know it)."""
    for address in names_in(files, PCI):
        path = device_path(address)
        classes = GPU_CLASSES.get(read_or(files, f"{path}/vendor", ""), ())
        if read_or(files, f"{path}/class", "")[:6] in classes:
            yield address, _node(whole(read_or(files, f"{path}/numa_node", "")))


def arrange(machine: Machine, spec: NodeSpec | None = None) -> tuple[NumaNode, ...]:
    """The machine as it is now, by NUMA node. ``spec``: names the NICs of the functions."""
    files, cpus = machine.files, read_topology(machine)
    functions = inspect(machine, spec).functions
    serves = _served(cpus, functions)
    devices: dict[int, list[Device]] = {}
    for function in functions:
        devices.setdefault(_node(function.numa_node), []).append(_device(function))
    for address, node in gpus(files):
        devices.setdefault(node, []).append(Device(address, driver=driver(files, address), kind="GPU"))
    numbers = {cpu.node for cpu in cpus.cpus.values()} | devices.keys()
    numa_nodes = []
    for number in sorted(numbers, key=lambda node: (node == EVERYWHERE, node)):
        here = [cpu for cpu in cpus.cpus.values() if cpu.node == number]
        socket = whole(read_or(files, f"{CPU}/cpu{here[0].id}/topology/physical_package_id", "")) if here else None
        numa_nodes.append(NumaNode(number, socket, _caches(here, serves), tuple(devices.get(number, ()))))
    return tuple(numa_nodes)


def _node(numa: int | None) -> int:
    return EVERYWHERE if numa is None or numa < 0 else numa


def _device(function: NetworkFunction) -> Device:
    by = "the kernel" if any(irq.linked for irq in function.interrupts) else "names"
    return Device(
        function.address,
        tuple(netdev.name for netdev in function.netdevs),
        tuple(device.name for device in function.rdma),
        function.driver,
        function.nic,
        format_ranges(vf.index for vf in function.vfs if vf.index is not None),
        queues_by=by if function.interrupts else "",
    )


def _served(cpus: Topology, functions: Sequence[NetworkFunction]) -> Mapping[int, list[Served]]:
    """The queues by the CPU on which their interrupts arrive."""
    by_cpu: dict[int, list[Served]] = {}
    for function in functions:
        for each in (function, *(evolve(vf, numa_node=function.numa_node) for vf in function.vfs)):
            name = each.netdevs[0].name if each.netdevs else each.address
            node = _node(each.numa_node)
            for interrupt in each.interrupts:
                for cpu in _cpus(interrupt.effective):
                    there = cpus.cpus.get(cpu)
                    misplaced = there is not None and node not in (EVERYWHERE, there.node)
                    by_cpu.setdefault(cpu, []).append(Served(name, interrupt.queue, misplaced, cpu))
    return by_cpu


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return parse_ranges(text)
    except ValueError:
        return ()


def _caches(cpus: Sequence[Cpu], serves: Mapping[int, list[Served]]) -> tuple[Cache, ...]:
    def core(number: int) -> Core:
        own = tuple(cpu.id for cpu in cpus if cpu.core == number)
        return Core(own, tuple(served for cpu in own for served in serves.get(cpu, ())))

    return tuple(
        Cache(tuple(core(number) for number in sorted({cpu.core for cpu in cpus if cpu.llc == llc})))
        for llc in sorted({cpu.llc for cpu in cpus})
    )


def render(nodes: Sequence[NumaNode], width: int) -> Iterator[tuple[str, Load]]:
    """The lines of a tree, each with the load of its core (none for other lines)."""
    socket: int | None = None
    for node in nodes:
        if node.socket is not None and node.socket != socket:
            socket = node.socket
            yield f"socket {socket}", "none"
        yield ("no NUMA node" if node.number == EVERYWHERE else f"  NUMA node {node.number}"), "none"
        for device in node.devices:
            yield printable(f"    {_line(device)}"), "none"
        for cache in node.caches:
            cpus = format_ranges(cpu for core in cache.cores for cpu in core.cpus)
            yield f"    last-level cache of CPUs {cpus}", "none"
            for core in cache.cores:
                yield _shortened(core, width), node.load(core)


def _line(device: Device) -> str:
    words = [device.kind, device.address, *device.netdevs, *device.rdma]
    words += [f"({device.driver})"] if device.driver else []
    words += [f"NIC {device.nic} of the spec"] if device.nic else []
    words += [f"VFs {device.vfs}"] if device.vfs else []
    return " ".join([*words, f"queues by {device.queues_by}"] if device.queues_by else words)


def _shortened(core: Core, width: int) -> str:
    """A core's line. Misplaced queues come first, and queues that do not fit are counted."""
    text = f"      CPU {format_ranges(core.cpus)}"
    named = [printable(str(served)) for served in sorted(core.serves, key=lambda served: not served.misplaced)]
    for number, name in enumerate(named):
        longer = f"{text}{': ' if number == 0 else ', '}{name}"
        left = len(named) - number
        if number and len(longer) + (len(f" and {left - 1} more") if left > 1 else 0) > width:
            return f"{text} and {left} more"
        text = longer
    return text
