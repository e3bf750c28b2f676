"""Writes the topology as XML of hwloc 2, which its lstopo draws: the machine with NICs, GPUs, and the queues of each CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from attrs import define, field

from agent.report.printable import printable
from cli.programs import run
from cli.topology import EVERYWHERE, Cache, Device, Load, NumaNode, Served

NAMED = 4
"""How many lines of queues a CPU shows. The others are counted."""

LOADS: Mapping[Load, str] = {"none": "#f0f0f0", "even": "#a8d8a8", "double": "#ffe066", "more": "#ff9f5a"}
"""The colours of cores, by their load."""

SOCKET, NIC, GPU, MISPLACED = "#fafafa", "#cfe2f3", "#d9d2e9", "#ff7a7a"
"""The colours of the other boxes; the last is that of queues on a CPU that is far from their device."""

LEGEND = (
    "The box of a CPU names the queues whose interrupts arrive there.",
    "Cores: grey has no queue, green an even share of its NUMA node's queues at most, yellow up to twice that, orange more.",
    "Red, with !: the queue's device is on another NUMA node.",
)

DEADLINE = 60.0
"""Seconds after which lstopo is killed."""

FORMATS = ("svg", "png", "xml")

LAYOUT = (
    *("--force", "--no-default-legend", "--no-factorize", "--no-attrs", "--vert=PU", "--gridsize", "5"),
    *("--physical", "--os-index-prefix", " ", "--children-order", "memory:above,misc:right"),
)
"""Options of lstopo: each core by itself, the queues of a CPU below each other, devices beside the cores."""


class NotDrawn(Exception):
    """The picture cannot be drawn. The message says why, and the remedy."""


@define
class _Tree:
    """Makes the objects of the tree, each with a number of its own."""

    _objects: int = field(default=0, init=False)

    def add(self, parent: Element, object_type: str, **attributes: str | int) -> Element:
        """Add an object."""
        self._objects += 1
        given = {name: str(value) for name, value in attributes.items()}
        return SubElement(parent, "object", {"type": object_type, "gp_index": str(self._objects), **given})

    def box(self, parent: Element, text: str, colour: str = "") -> Element:
        """Add a box that shows a text."""
        box = self.add(parent, "Misc", name=printable(text))
        if colour:
            _paint(box, colour)
        return box


def draw(nodes: Sequence[NumaNode], path: Path, form: str) -> None:
    """Write a picture in one of :data:`FORMATS`; ``xml`` is the text from which lstopo draws the others.

    :raises NotDrawn: lstopo is not installed, or fails.
    :raises OSError: the file cannot be written.
    """
    if form == "xml":
        path.write_text(to_xml(nodes))
        return
    with tempfile.TemporaryDirectory() as folder:
        described, drawn = Path(folder) / "topology.xml", Path(folder) / f"topology.{form}"
        described.write_text(to_xml(nodes))
        try:
            ran = run(
                ["lstopo", "--input", str(described), "--output-format", form, *LAYOUT, str(drawn)], timeout=DEADLINE
            )
        except FileNotFoundError:
            raise NotDrawn(
                "lstopo is not installed; install hwloc, or draw on another machine: topology --json here, --input - there"
            ) from None
        if ran.code != 0 or not drawn.exists():
            output = ran.output.strip() or f"it did not end within {DEADLINE:.0f} s"
            raise NotDrawn(f"lstopo has drawn nothing: {output}; write its input and look at that: --picture FILE.xml")
        path.write_bytes(drawn.read_bytes())


def to_xml(nodes: Sequence[NumaNode]) -> str:
    """The text of hwloc's XML."""
    tree, root = _Tree(), Element("topology", version="2.0")
    placed = [node for node in nodes if node.number != EVERYWHERE]
    machine = tree.add(root, "Machine", os_index=0, **_sets(placed, allowed=True))
    for line in LEGEND:
        SubElement(machine, "info", name="lstopoLegend", value=line)
    for socket, group in groupby(placed, key=lambda node: node.socket):
        together = list(group)
        package = machine
        if socket is not None:
            package = tree.add(machine, "Package", subtype="socket", os_index=socket, **_sets(together))
            _paint(package, SOCKET)
        for node in together:
            inner = package if len(together) == 1 else tree.add(package, "Group", kind=0, **_sets([node]))
            tree.add(inner, "NUMANode", subtype="NUMA node", os_index=node.number, **_sets([node]))
            for cache in node.caches:
                _add_cache(tree, inner, node, cache)
            _add_devices(tree, inner, node.devices)
    for node in nodes:
        if node.number == EVERYWHERE:
            _add_devices(tree, tree.box(machine, "no NUMA node"), node.devices)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _add_cache(tree: _Tree, parent: Element, node: NumaNode, cache: Cache) -> None:
    cpus = [cpu for core in cache.cores for cpu in core.cpus]
    level = tree.add(parent, "L3Cache", subtype="last-level cache", depth=3, cache_type=0, **_sets([node], cpus))
    for core in cache.cores:
        shape = tree.add(level, "Core", os_index=core.cpus[0], **_sets([node], core.cpus))
        _paint(shape, LOADS[node.load(core)])
        for cpu in core.cpus:
            unit = tree.add(shape, "PU", subtype="CPU", os_index=cpu, **_sets([node], [cpu]))
            for line, near in _lines([served for served in core.serves if served.cpu == cpu]):
                tree.box(unit, line, "" if near else MISPLACED)


def _add_devices(tree: _Tree, parent: Element, devices: Iterable[Device]) -> None:
    for device in devices:
        text = " ".join(filter(None, (device.kind, device.nic, device.address, device.driver and f"({device.driver})")))
        box = tree.box(parent, text, GPU if device.kind == "GPU" else NIC)
        for name in (*device.netdevs, *device.rdma, *([f"VFs {device.vfs}"] if device.vfs else [])):
            tree.box(box, name)


def _lines(serves: Sequence[Served]) -> list[tuple[str, bool]]:
    """The queues of a CPU in lines, one line a device, with whether the device is near. Misplaced queues come first."""
    by_device: dict[tuple[bool, str], list[str]] = {}
    for served in serves:
        by_device.setdefault((not served.misplaced, served.device), []).append(served.queue)
    lines = [
        (f"{'' if near else '! '}{name} {' '.join(queues)}", near) for (near, name), queues in sorted(by_device.items())
    ]
    if len(lines) <= NAMED:
        return lines
    return [*lines[:NAMED], (f"and {len(lines) - NAMED} more", all(near for _, near in lines[NAMED:]))]


def _paint(element: Element, colour: str) -> None:
    SubElement(element, "info", name="lstopoStyle", value=f"Background={colour};Text=#000000")


def _sets(nodes: Sequence[NumaNode], cpus: Iterable[int] | None = None, allowed: bool = False) -> dict[str, str]:
    """The sets of CPUs and NUMA nodes that hwloc requires of each object."""
    own = (
        cpus
        if cpus is not None
        else (cpu for node in nodes for cache in node.caches for core in cache.cores for cpu in core.cpus)
    )
    sets = {"cpuset": _mask(own), "nodeset": _mask(node.number for node in nodes)}
    kinds = ("", "complete_", "allowed_") if allowed else ("", "complete_")
    return {f"{kind}{name}": mask for kind in kinds for name, mask in sets.items()}


def _mask(numbers: Iterable[int]) -> str:
    """A set as hwloc writes it: words of 32 bits, the highest first."""
    bits = sum(1 << number for number in set(numbers))
    words = [f"0x{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(bits.bit_length(), 1), 32)]
    return ",".join(reversed(words))
