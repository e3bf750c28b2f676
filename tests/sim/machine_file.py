"""Loads a file that describes a real machine, and makes a simulated one of it.

The file is YAML. Its words are those of `trackbed inspect --json`; what is left out is made up: MACs, GUIDs. The keys:

- `shows`: what the machine is in the zoo for. `sources`: the public pages that its facts are from.
- `cpus`: `nodes`, the CPUs of each NUMA node; `sockets`; `threads` of a core; `caches`, how many last-level caches a NUMA node
  has; `architecture`, `vendor`, `family` and `model`, as uname and /proc/cpuinfo have them.
- `functions`: the PCI functions for networks without VFs, as `trackbed inspect` shows them. Beside its keys: `class`;
  `subsystem`, vendor and device; `link`, the PCIe link (`32.0 GT/s x16`); `path`, the bridges above it from the root port on;
  `vf`, the PCI device ID of its VFs; `vf_rdma`, how the names of their RDMA devices begin; `virtio`, the device on the virtio
  bus that has the netdev. Of a netdev also `port_name` and `dev_port`, of an RDMA device `node_type` and `management`: it has
  no uverbs.
- `gpus`: NVIDIA's GPUs: `address`, `device`, `numa_node`, `path`, `link`. `bridges`: `ids` and `link` of bridges, by address.
- `netdevs`: those without a PCI function: `name`, `kind`, and `of`, the netdevs below it.
- `other_rdma`: RDMA devices without a PCI function. `route`: the netdev of the default route.
"""

from __future__ import annotations

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

ETHERNET, INFINIBAND, CONTROLLER, BRIDGE = "020000", "020700", "030200", "060400"


@frozen
class SimMachine:
    """A machine of a file. ``paths``: the folder of each PCI function below /sys/devices, by address."""

    name: str
    facts: Facts
    kernel: Kernel
    paths: Mapping[str, str]


def load(file: Path) -> SimMachine:
    """The machine that a file describes."""
    facts: Facts = yaml.safe_load(file.read_text())
    nodes = {int(node): parse_ranges(str(cpus or "")) for node, cpus in facts["cpus"]["nodes"].items()}
    kernel = Kernel(cpus=sum(map(len, nodes.values())), nodes=len(nodes), vf_queues=2, renames_running=True)
    kernel.ethtool.most = QUEUES
    _put_cpus(kernel, facts["cpus"], nodes)
    paths: dict[str, str] = {}
    for number, function in enumerate(facts.get("functions", ())):
        _put_path(kernel, facts, function, paths)
        _add_function(kernel, function, number)
    for gpu in facts.get("gpus", ()):
        _put_path(kernel, facts, gpu, paths)
        _add_gpu(kernel, gpu)
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
    return SimMachine(file.stem, facts, kernel, paths)


# --- CPUs --------------------------------------------------------------------------------------------------


def _put_cpus(kernel: Kernel, facts: Facts, nodes: Mapping[int, Sequence[int]]) -> None:
    put = kernel.tree.put
    every = sorted(cpu for cpus in nodes.values() for cpu in cpus)
    for stale in [name for name in kernel.tree.folders[NODE] if int(name[4:]) not in nodes]:
        kernel.tree.remove(f"{NODE}/{stale}")
    with_cpus = [node for node, cpus in nodes.items() if cpus]
    for node, cpus in nodes.items():
        put(f"{NODE}/node{node}/cpulist", format_ranges(cpus))
        put(f"{NODE}/node{node}/cpumap", _map(cpus, max(every) + 1))
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
    lines = [f"processor\t: {every[0]}"]
    for key, name in (("vendor", "vendor_id\t"), ("family", "cpu family\t"), ("model", "model\t\t")):
        lines += [f"{name}: {facts[key]}"] if key in facts else []
    put("/proc/cpuinfo", "\n".join([*lines, ""]))


def _cores(cpus: Sequence[int], threads: int) -> list[tuple[int, ...]]:
    """The CPUs of each core: the kernel numbers the first of all cores before the second ones."""
    count = len(cpus) // threads
    return [tuple(sorted(cpus)[core::count]) for core in range(count)]


def _map(cpus: Sequence[int], width: int) -> str:
    """A set of CPUs as a file `cpumap` shows it."""
    digits = f"{sum(1 << cpu for cpu in cpus):0{-(-width // 4)}x}"
    words = [digits[max(end - 8, 0) : end] for end in range(len(digits), 0, -8)]
    return ",".join(reversed(words))


# --- the PCI tree ------------------------------------------------------------------------------------------


def _put_path(kernel: Kernel, facts: Facts, function: Facts, paths: dict[str, str]) -> None:
    """The bridges above a function, and its own place."""
    address, above = function["address"], function.get("path", [])
    folder = f"/sys/devices/pci{(above or [address])[0].rpartition(':')[0]}"
    for bridge in above:
        folder += f"/{bridge}"
        if bridge not in paths:
            known = facts.get("bridges", {}).get(bridge, {})
            vendor, device = known.get("ids", "8086:352a").split(":")
            _put(
                kernel,
                bridge,
                {"class": BRIDGE, "vendor": vendor, "device": device, **known},
                function.get("numa_node"),
            )
            paths[bridge] = folder
    paths[address] = f"{folder}/{address}"


def _put(kernel: Kernel, address: str, facts: Facts, node: int | None) -> None:
    """The files of a PCI function that every one has."""
    path = f"{PCI}/{address}"
    for file in ("class", "vendor", "device"):
        kernel.tree.put(f"{path}/{file}", f"0x{facts[file]}")
    kernel.tree.put(f"{path}/numa_node", str(-1 if node is None else node))
    if subsystem := facts.get("subsystem"):
        vendor, device = subsystem.split(":")
        kernel.tree.put(f"{path}/subsystem_vendor", f"0x{vendor}")
        kernel.tree.put(f"{path}/subsystem_device", f"0x{device}")
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
    infiniband = any(port.get("link_layer") == "InfiniBand" for device in devices for port in device["ports"])
    kind = function.get("class", INFINIBAND if infiniband else ETHERNET)
    links = [_link(netdev, infiniband, number, place) for place, netdev in enumerate(function.get("netdevs", ()))]
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
        kernel.tree.put(f"{NET}/{each.link.name}/ifindex", str(800 + number))
        kernel.tree.folder(f"{PCI}/{address}/{virtio}/net/{each.link.name}")
    if not total:
        for file in ("sriov_totalvfs", "sriov_numvfs", "sriov_drivers_autoprobe"):
            kernel.tree.remove(f"{PCI}/{address}/{file}")
    if not driver:
        kernel.tree.unlink(f"{PCI}/{address}/driver")
    kernel.rdma.made[address] = [_device(device, name, number) for device in devices]
    kernel.sriov.vf_devices[address] = function.get("vf", function["device"])
    if (prefix := function.get("vf_rdma")) and devices:
        (port,) = devices[0]["ports"][:1]
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
        "other_ports": [port.get("netdev") for port in others],
        "node_type": device.get("node_type", "1: CA"),
        "uverbs": not device.get("management"),
        "node_guid": device.get("node_guid") or f"0200:0003:0000:{number:02x}00",
    }
    return made | ({"sys_image_guid": device["sys_image_guid"]} if "sys_image_guid" in device else {})


def _add_virtual(kernel: Kernel, netdev: Facts, ifindex: int) -> None:
    """A netdev on top of others; what its kind takes over of them as its members."""
    name, kind, below = netdev["name"], netdev["kind"], netdev.get("of", [])
    kernel.netdevs[name] = Netdev("", Link(ifindex, name, "02:00:00:00:00:99", "", 1500, True, True))
    kernel.tree.put(f"{NET}/{name}/ifindex", str(ifindex))
    kernel.tree.put(f"{NET}/{name}/address", "02:00:00:00:00:99")
    if kind == "bond":
        kernel.tree.put(f"{NET}/{name}/bonding/slaves", " ".join(below))
    for lower in below:
        kernel.tree.put(f"{NET}/{lower}/upper_{name}/ifindex", str(ifindex))
        if kind in MASTERS:
            kernel.tree.link(f"{NET}/{lower}/master", f"../../../../virtual/net/{name}")
            kernel.netdevs[lower].link = evolve(kernel.netdevs[lower].link, member_of=MASTERS[kind])


MASTERS = {"bond": "bond", "bridge": "bridge", "openvswitch": "openvswitch", "hv_netvsc": ""}
"""The kinds of netdevs that have members, with what the kernel calls a member of such a one (IFLA_INFO_SLAVE_KIND)."""
