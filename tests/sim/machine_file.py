"""Loads a file that describes a real machine, and makes a simulated one of it.

The file is YAML. Its words are those of `trackbed inspect --json`; what is left out is made up: MACs, GUIDs. The keys:

- `shows`: what the machine is in the zoo for. `sources`: the public pages that its facts are from. `filled_in`: what those
  pages do not show, and was taken from other machines of the kind.
- `cpus`: `nodes`, the CPUs of each NUMA node; `sockets`; `threads` of a core; `caches`, how many last-level caches a NUMA
  node has.
- `functions`: the PCI functions for networks without VFs, as `trackbed inspect` shows them. Beside its keys: `class`; `link`,
  the PCIe link (`32.0 GT/s x16`); `vf`, the PCI device ID of its VFs; `vf_rdma`, how the names of their RDMA devices begin;
  `virtio`, the device on the virtio bus that has the netdev. Of a netdev also `port_name` and `dev_port`, of an RDMA device
  `node_type`. Those that are named in `management_rdma` have no uverbs.
- `gpus`: NVIDIA's GPUs: `address`, `device`, `numa_node`. `others`: PCI functions that are neither, with their `class`.
- `netdevs`: those without a PCI function: `name`, `kind`, and `of`, the netdevs below it.
- `other_rdma`: RDMA devices without a PCI function. `route`: the netdev of the default route.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from attrs import evolve, frozen

from agent.machine import Link
from agent.spec.ranges import format_ranges, parse_ranges
from tests.sim.kernel import Kernel, Netdev

PCI = "/sys/bus/pci/devices"
NET = "/sys/class/net"
CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
Facts = Mapping[str, Any]
QUEUES = 4
"""How many queues a PF has here. Real ones have one a CPU, up to a hundred and more; here they only make results longer."""

ETHERNET, INFINIBAND, CONTROLLER = "020000", "020700", "030200"


@frozen
class SimMachine:
    """A machine of a file, and the file's facts."""

    facts: Facts
    kernel: Kernel

    def reload_driver(self, function: str) -> None:
        """As of the kernel; then a network manager puts the netdevs back into what was on top of them."""
        self.kernel.reload_driver(function)
        for netdev in self.facts.get("netdevs", ()):
            _stack(self.kernel, netdev)


def load(file: Path) -> SimMachine:
    """The machine that a file describes."""
    facts: Facts = yaml.safe_load(file.read_text())
    nodes = {int(node): parse_ranges(str(cpus or "")) for node, cpus in facts["cpus"]["nodes"].items()}
    kernel = Kernel(cpus=sum(map(len, nodes.values())), nodes=len(nodes), vf_queues=2, renames_running=True)
    kernel.ethtool.most = QUEUES
    _put_cpus(kernel, facts["cpus"], nodes)
    for number, function in enumerate(facts.get("functions", ())):
        _add_function(kernel, function, number)
    for gpu in facts.get("gpus", ()):
        _add_gpu(kernel, gpu)
    for other in facts.get("others", ()):
        _put(kernel, other["address"], other, other.get("numa_node"))
    for number, netdev in enumerate(facts.get("netdevs", ())):
        _add_virtual(kernel, netdev, 900 + number)
    for function in facts.get("functions", ()):
        # Now that all netdevs are there, a bond among them.
        kernel.rdma.probed(function["address"], "")
        for netdev in function.get("netdevs", ()):
            if not function.get("virtio") and netdev.get("up", True):
                kernel.netlink.set_link(kernel.netdevs[netdev["name"]].link.ifindex, up=True, mtu=netdev.get("mtu"))
    for device in facts.get("other_rdma", ()):
        kernel.rdma.add(None, **_device(device, device.get("netdev"), 200))
    if route := facts.get("route"):
        kernel.routed.add(route)
    return SimMachine(facts, kernel)


# --- CPUs --------------------------------------------------------------------------------------------------


def _put_cpus(kernel: Kernel, facts: Facts, nodes: Mapping[int, Sequence[int]]) -> None:
    put = kernel.tree.put
    for stale in [name for name in kernel.tree.folders[NODE] if int(name[4:]) not in nodes]:
        kernel.tree.remove(f"{NODE}/{stale}")
    with_cpus = [node for node, cpus in nodes.items() if cpus]
    for node, cpus in nodes.items():
        put(f"{NODE}/node{node}/cpulist", format_ranges(cpus))
        put(f"{NODE}/node{node}/distance", " ".join("10" if other == node else "20" for other in nodes))
        cores = _cores(cpus, facts.get("threads", 1))
        per_cache = -(-len(cores) // facts.get("caches", 1)) or 1
        for place, core in enumerate(cores):
            first = place // per_cache * per_cache
            near = format_ranges(cpu for other in cores[first : first + per_cache] for cpu in other)
            package = with_cpus.index(node) * facts["sockets"] // len(with_cpus)
            for cpu in core:
                put(f"{CPU}/cpu{cpu}/topology/core_cpus_list", format_ranges(core))
                put(f"{CPU}/cpu{cpu}/topology/physical_package_id", str(package))
                put(f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list", near)


def _cores(cpus: Sequence[int], threads: int) -> list[tuple[int, ...]]:
    """The CPUs of each core: of two, the first of all cores before the second ones; of more, next to each other (POWER)."""
    if threads > 2:
        return [tuple(cpus[first : first + threads]) for first in range(0, len(cpus), threads)]
    count = len(cpus) // threads
    return [tuple(sorted(cpus)[core::count]) for core in range(count)]


# --- PCI functions ------------------------------------------------------------------------------------------


def _put(kernel: Kernel, address: str, facts: Facts, node: int | None) -> None:
    """The files of a PCI function that every one has."""
    path = f"{PCI}/{address}"
    for file in ("class", "vendor", "device"):
        kernel.tree.put(f"{path}/{file}", f"0x{facts[file]}")
    kernel.tree.put(f"{path}/numa_node", str(-1 if node is None else node))
    speed, _, width = facts.get("link", "Unknown x0").rpartition(" x")
    for which in ("max", "current"):
        kernel.tree.put(f"{path}/{which}_link_speed", speed if speed == "Unknown" else f"{speed} PCIe")
        kernel.tree.put(f"{path}/{which}_link_width", width)


def _add_gpu(kernel: Kernel, gpu: Facts) -> None:
    _put(kernel, gpu["address"], {"class": CONTROLLER, "vendor": "10de", **gpu}, gpu.get("numa_node"))
    kernel.tree.link(f"{PCI}/{gpu['address']}/driver", "../../../../bus/pci/drivers/nvidia")
    kernel.tree.put(f"/proc/driver/nvidia/gpus/{gpu['address']}/information", "")
    kernel.tree.folder("/sys/module/nvidia/parameters")


# --- NICs --------------------------------------------------------------------------------------------------


def _add_function(kernel: Kernel, function: Facts, number: int) -> None:
    address, driver = function["address"], function.get("driver") or ""
    devices = function.get("rdma", ())
    layers = [port.get("link_layer", "Ethernet") for device in devices[:1] for port in device["ports"]]
    kind = function.get("class", INFINIBAND if layers[:1] == ["InfiniBand"] else ETHERNET)
    links = [
        _link(netdev, layers[netdev.get("dev_port", 0) :][:1] == ["InfiniBand"], number, place)
        for place, netdev in enumerate(function.get("netdevs", ()))
    ]
    netdevs = [
        Netdev(address, link, netdev.get("port_name", ""), netdev.get("dev_port", 0))
        for link, netdev in zip(links, function.get("netdevs", ()), strict=True)
    ]
    name = netdevs[0].link.name if netdevs else None
    virtio = function.get("virtio")
    kernel.made[address] = [] if virtio else netdevs
    total = function.get("total_vfs", 0)
    kernel.add_nic(address, name or "", "", 0, total, driver, (kind, function["vendor"], function["device"]))
    _put(kernel, address, {"class": kind, **function}, function.get("numa_node"))
    for each in netdevs if virtio else ():
        kernel.netdevs[each.link.name] = Netdev("", evolve(each.link, ifindex=800 + number, up=True))
        folder = f"{NET}/{each.link.name}"
        kernel.tree.put(f"{folder}/ifindex", str(800 + number))
        kernel.tree.put(f"{folder}/address", each.link.mac)
        kernel.tree.link(f"{folder}/device", f"../../../{virtio}")
        kernel.tree.folder(f"{folder}/device/net")
        kernel.tree.folder(f"{PCI}/{address}/{virtio}/net/{each.link.name}")
        kernel.tree.link(f"{PCI}/{address}/{virtio}/driver", "../../../bus/virtio/drivers/virtio_net")
    if not total:
        for file in ("sriov_totalvfs", "sriov_numvfs", "sriov_drivers_autoprobe"):
            kernel.tree.remove(f"{PCI}/{address}/{file}")
    if not kernel.has_netdev(address):
        kernel.tree.remove(f"{PCI}/{address}/net")
    if function.get("nvlink_bridge"):
        kernel.config[f"{PCI}/{address}/vpd"] = bytearray(NVLINK_BRIDGE)
    if not driver:
        kernel.tree.unlink(f"{PCI}/{address}/driver")
    kernel.tree.link(f"{PCI}/{address}/iommu_group", f"../../../../kernel/iommu_groups/{100 + number}")
    of_management = [{"name": each, "ports": [{"rate": ""}]} for each in function.get("management_rdma", ())]
    kernel.rdma.made[address] = [
        *(_device(device, name, number) for device in devices),
        *(_device(device, None, number) | {"uverbs": False} for device in of_management),
    ]
    kernel.sriov.vf_devices[address] = function.get("vf", function["device"])
    if prefix := function.get("vf_rdma"):
        # Without a device of its PF a VF's is soft RoCE, as in the lab.
        port = devices[0]["ports"][0] if devices else {"link_layer": "Ethernet", "rate": ""}
        kernel.rdma.made_of_vfs[address] = {"prefix": prefix, "link_layer": port["link_layer"], "rate": port["rate"]}


def _link(netdev: Facts, infiniband: bool, number: int, place: int) -> Link:
    mac = netdev.get("mac") or f"02:00:00:00:{number:02x}:{place:02x}"
    if infiniband and len(mac) == len("02:00:00:00:00:00"):
        mac = f"00:00:10:29:fe:80:00:00:00:00:00:00:{mac[:8]}:03:00:{mac[9:]}"
    return Link(0, netdev["name"], mac, mac, 1500, False, False, tuple(netdev.get("altnames", ())))


def _device(device: Facts, netdev: str | None, number: int) -> dict[str, Any]:
    """An RDMA device as arguments of the simulated subsystem."""
    first, *others = device["ports"]
    made = {
        "name": device["name"],
        "netdev": first.get("netdev", netdev),
        "link_layer": first.get("link_layer", "Ethernet"),
        "rate": first["rate"],
        "state": first.get("state", "ACTIVE"),
        "other_ports": [(port.get("netdev"), port.get("link_layer", "Ethernet"), port["rate"]) for port in others],
        "node_type": device.get("node_type", "1: CA"),
        "node_guid": device.get("node_guid") or f"0200:0003:0000:{number:02x}00",
    }
    return made | ({"sys_image_guid": device["sys_image_guid"]} if "sys_image_guid" in device else {})


def _add_virtual(kernel: Kernel, netdev: Facts, ifindex: int) -> None:
    """A netdev without a PCI function."""
    name, kind, below = netdev["name"], netdev["kind"], netdev.get("of", [])
    kernel.netdevs[name] = Netdev("", Link(ifindex, name, "02:00:00:00:00:99", "", 1500, True, True))
    kernel.tree.put(f"{NET}/{name}/ifindex", str(ifindex))
    kernel.tree.put(f"{NET}/{name}/address", "02:00:00:00:00:99")
    if kind == "bond":
        kernel.tree.put(f"{NET}/{name}/bonding/slaves", " ".join(below))
    _stack(kernel, netdev)


def _stack(kernel: Kernel, netdev: Facts) -> None:
    """Put a netdev on top of others."""
    name, kind = netdev["name"], netdev["kind"]
    for lower in netdev.get("of", ()):
        kernel.tree.put(f"{NET}/{lower}/upper_{name}/ifindex", kernel.tree.files[f"{NET}/{name}/ifindex"])
        if kind in MASTERS:
            kernel.tree.link(f"{NET}/{lower}/master", f"../../../../virtual/net/{name}")
            kernel.netdevs[lower].link = evolve(kernel.netdevs[lower].link, member_of=MASTERS[kind])


NVLINK_BRIDGE = b"\x90\x0e\x00VA\x0bSMDL=SW_MNG\x78"
"""The Vital Product Data by which an NVLink bridge is known, without what it has beside."""

MASTERS = {"bond": "bond", "bridge": "bridge", "openvswitch": "openvswitch", "hv_netvsc": ""}
"""The kinds of netdevs that have members, with what the kernel calls a member of such a one (IFLA_INFO_SLAVE_KIND)."""
