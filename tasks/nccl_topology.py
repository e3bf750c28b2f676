"""Writes /etc/nccl-topology.xml: where GPUs and RDMA devices are in the node's PCI tree, for NCCL_TOPO_FILE.

A process that sees the host's /sys needs no such file: NCCL finds the same there. The file is for containers without the host's
/sys.

The form is that which NCCL writes (NCCL_TOPO_DUMP_FILE) and reads (src/graph/xml.cc): a cpu for each NUMA node, below it the
upstream ports of PCIe switches and the functions, and a net for each RDMA device. The links of GPUs, the speeds of ports, GUIDs
and device numbers are left out: NCCL asks the devices for them when it starts, and they may change. From NCCL's source. NCCL
2.28.9 on one H100 read the file, and its own dump had the same elements; not run with several GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from xml.sax.saxutils import quoteattr

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import Commands, refuse, script
from tasks.common.facts import FactBase
from tasks.common.texts import MARK, Texts, replace
from tasks.hardware import UNKNOWN, Hardware, here
from tasks.nccl import NCCL, TOPOLOGY, functions

# NCCL's parser knows no XML declaration, and one space between attributes.
HEADER = f"<!-- {MARK} changes here are overwritten. -->\n"

MOST_ELEMENTS = 192
"""NCCL reads 256 elements at most (src/graph/topo.h), and adds those of the GPUs to them."""

MOST_CHILDREN = 32
"""The most elements in one, by src/graph/xml.h until NCCL 2.18; later versions read more."""

LONGEST = 250
"""The most characters of a value (MAX_STR_LEN of src/graph/xml.h, less its quotes and end)."""

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SPEED = re.compile(r"([\d.]+) GT/s( PCIe)?")
_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "arm64", "ppc64le": "ppc64"}


@frozen
class PciFunction:
    """A PCI function as sysfs describes it; ``path``: its folder below /sys/devices, which shows what it is connected to."""

    path: str
    kind: str
    vendor: str
    device: str
    subsystem_vendor: str
    subsystem_device: str
    numa_node: str
    link_speed: str
    link_width: str

    @property
    def address(self) -> str:
        """The PCI address."""
        return self.path.rpartition("/")[2]


@frozen
class PciTopology:
    """The PCI functions by address, the CPUs of each NUMA node as a mask, and the kind of CPU."""

    functions: Mapping[str, PciFunction] = field(factory=dict)
    cpus: Mapping[str, str] = field(factory=dict)
    architecture: str = ""
    vendor: str = ""
    family: str = ""
    model: str = ""


_TOPOLOGY = """
field() {
  value=
  if [ -r "$1" ]; then read -r value < "$1" 2>/dev/null || true; fi
  line="$line|$value"
}
for d in "$1"/sys/bus/pci/devices/*; do
  [ -e "$d/class" ] || continue
  if [ -e "$d/physfn" ] && ! [ -d "$d/infiniband" ]; then continue; fi
  line="pci|$(cd -P "$d" && pwd)"
  for name in class vendor device subsystem_vendor subsystem_device numa_node max_link_speed max_link_width; do
    field "$d/$name"
  done
  echo "$line"
done
for n in "$1"/sys/devices/system/node/node*; do
  if [ -r "$n/cpumap" ]; then line="node|${n##*/node}"; field "$n/cpumap"; echo "$line"; fi
done
echo "architecture|$(uname -m)"
sed -n 's/^vendor_id[[:space:]]*: /vendor|/p; s/^cpu family[[:space:]]*: /family|/p; s/^model[[:space:]]*: /model|/p; /^$/q' \
  "$1/proc/cpuinfo"
"""


class NodeTopology(FactBase[PciTopology]):
    """The node's PCI functions and NUMA nodes."""

    default = PciTopology

    def command(self) -> StringCommand:
        """Read everything by one script, since each command costs a round trip."""
        return script(_TOPOLOGY, "")

    def process(self, output: list[str]) -> PciTopology:
        """Parse lines of a word and its values."""
        lines = [line.split("|") for line in output]
        functions = (PciFunction(*line[1:]) for line in lines if line[0] == "pci")
        given = {line[0]: line[1] for line in lines if len(line) == 2}
        return PciTopology(
            {function.address: function for function in functions},
            {line[1]: line[2] for line in lines if line[0] == "node"},
            **{name: given.get(name, "") for name in ("architecture", "vendor", "family", "model")},
        )


@frozen
class Element:
    """An element of the file."""

    name: str
    attributes: Mapping[str, str] = field(factory=dict)
    children: tuple[Element, ...] = ()

    def lines(self, indent: str = "") -> Iterator[str]:
        """The lines of it and of what it contains."""
        given = "".join(f" {name}={quoteattr(value)}" for name, value in self.attributes.items())
        if not self.children:
            yield f"{indent}<{self.name}{given}/>"
            return
        yield f"{indent}<{self.name}{given}>"
        for child in self.children:
            yield from child.lines(f"{indent}  ")
        yield f"{indent}</{self.name}>"

    def each(self) -> Iterator[Element]:
        """It and all that it contains."""
        yield self
        for child in self.children:
            yield from child.each()


def text(topology: PciTopology, hardware: Hardware) -> str:
    """The file for a node with this hardware.

    :raises ValueError: there is nothing to write, or more than NCCL reads; with the remedy.
    """
    nets = _nets(topology, hardware)
    ends = {gpu.address for gpu in hardware.gpus if gpu.address in topology.functions} | nets.keys()
    if not ends:
        raise ValueError("topology: the node has neither a GPU nor an RDMA device for NCCL; leave topology out")
    below: dict[str, dict[str, set[str]]] = {}
    for end in sorted(ends):
        branch = _branch(topology, end)
        of_cpu = below.setdefault(topology.functions[branch[0]].numa_node or "-1", {})
        for above, address in zip(("", *branch), branch, strict=False):
            of_cpu.setdefault(above, set()).add(address)
    cpus = tuple(_cpu(topology, node, below[node], nets) for node in sorted(below, key=int))
    system = Element("system", {"version": "1"}, cpus)
    elements = list(system.each())
    if len(elements) > MOST_ELEMENTS or any(len(element.children) > MOST_CHILDREN for element in elements):
        raise ValueError(
            f"topology: its file would have {len(elements)} elements, more than NCCL reads; leave topology out"
        )
    return HEADER + "".join(f"{line}\n" for line in system.lines())


def _nets(topology: PciTopology, hardware: Hardware) -> dict[str, list[str]]:
    """The RDMA devices that NCCL uses, by the PCI function that they belong to in the file.

    As in NCCL (src/transport/net_ib), the ports of a card are one NIC, and a VF belongs to its PF: they share the PCIe link.
    """
    physical = {each.address: function.address for function in hardware.functions for each in (function, *function.vfs)}
    nets: dict[str, list[str]] = {}
    for function in functions(hardware):
        own = physical[function.address]
        first = f"{own.rpartition('.')[0]}.0"
        address = first if first in topology.functions else own
        if address in topology.functions:
            names = nets.setdefault(address, [])
            # With RoCE LAG both functions of a card have the same device.
            names += [device.name for device in function.rdma if device.name not in names]
    return nets


def _branch(topology: PciTopology, address: str) -> tuple[str, ...]:
    """The PCI addresses from the one below the CPU to this one.

    As in NCCL, a switch is its upstream port alone, and root ports are left out: NCCL skips every second function on the way up
    (ncclTopoGetXmlFromSys).
    """
    addresses = [part for part in topology.functions[address].path.split("/") if _ADDRESS.fullmatch(part)]
    return tuple(reversed(addresses[::-1][::2]))


def _cpu(topology: PciTopology, node: str, below: Mapping[str, set[str]], nets: Mapping[str, list[str]]) -> Element:
    attributes = {"numaid": node}
    mask = topology.cpus.get(node, "")
    if mask and len(mask) <= LONGEST:
        attributes["affinity"] = mask
    if topology.architecture in _ARCHITECTURES:
        attributes["arch"] = _ARCHITECTURES[topology.architecture]
    if topology.architecture == "x86_64" and topology.vendor:
        attributes["vendor"] = topology.vendor
        # NCCL's numbers for other vendors differ from those of /proc/cpuinfo, so it finds them itself.
        if topology.vendor == "GenuineIntel":
            attributes |= {"familyid": topology.family, "modelid": topology.model}
    return Element("cpu", attributes, tuple(_pci(topology, address, below, nets) for address in sorted(below[""])))


def _pci(topology: PciTopology, address: str, below: Mapping[str, set[str]], nets: Mapping[str, list[str]]) -> Element:
    function = topology.functions[address]
    attributes = {
        "busid": address,
        "class": function.kind,
        "vendor": function.vendor,
        "device": function.device,
        "subsystem_vendor": function.subsystem_vendor,
        "subsystem_device": function.subsystem_device,
        **_link(topology, function),
    }
    children = tuple(_pci(topology, each, below, nets) for each in sorted(below.get(address, ())))
    if address in nets:
        children += (Element("nic", {}, tuple(Element("net", {"name": name}) for name in nets[address])),)
    return Element("pci", {name: value for name, value in attributes.items() if value}, children)


def _link(topology: PciTopology, function: PciFunction) -> dict[str, str]:
    """The lower speed and the smaller width of the two ends of its PCIe link; values that sysfs lacks are left out."""
    above = topology.functions.get(function.path.split("/")[-2])
    ends = (function,) if above is None else (function, above)
    speeds = {float(match[1]): end.link_speed for end in ends if (match := _SPEED.fullmatch(end.link_speed))}
    widths = [int(end.link_width) for end in ends if end.link_width.isdigit() and int(end.link_width)]
    speed = {"link_speed": speeds[min(speeds)]} if speeds else {}
    return {**speed, **({"link_width": str(min(widths))} if widths else {})}


def configure() -> None:
    """Write the file if `nccl.topology` asks for it; otherwise remove one of Trackbed's."""
    wanted = NCCL.here()
    write(name="NCCL topology", wanted=wanted is not None and wanted.topology)


@operation()
def write(wanted: bool) -> Commands:
    """Write the file if it differs."""
    have = host.get_fact(Texts, paths=(TOPOLOGY,)).get(TOPOLOGY, "")
    want = ""
    if wanted:
        hardware = here()
        if hardware is None:
            yield refuse(UNKNOWN)
            return
        try:
            want = text(host.get_fact(NodeTopology), hardware)
        except ValueError as error:
            yield refuse(f"nccl.{error}")
            return
    if have == want or (not want and not have.startswith(HEADER)):
        host.noop(f"{TOPOLOGY} is up to date")
        return
    yield from replace({TOPOLOGY: have}, {TOPOLOGY: want})
