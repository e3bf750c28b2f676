"""Describes a server as a file of the zoo of machines, so that it becomes a test. docs/campaign/zoo.md has the command.

A node's own Python runs this file, with the modules of the agent that is installed there. The description has no name, serial
number, IP address, MAC or GUID of the server: whoever loads the file makes MACs and GUIDs up. Which RDMA devices are of one
card is kept. VFs, and netdevs that are not on top of a NIC, are left out. The keys are those of tests/sim/machine_file.py.
"""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from agent import linux
from agent.hardware.bonds import on_top
from agent.hardware.functions import NET, PCI, device_path, ifindexes, virtio_children
from agent.hardware.rdma import RdmaDevice
from agent.hardware.sysfs import names_in, read_or
from agent.hardware.topology import CPU, Cpu, read_topology
from agent.machine import Files, Machine
from agent.spec.ranges import format_ranges
from cli import topology
from cli.inspection import Netdev, NetworkFunction, inspect

Facts = dict[str, Any]


def describe(machine: Machine) -> Facts:
    """The server's facts."""
    files, inspection = machine.files, inspect(machine)
    gateways = machine.netlink.gateway_ifindexes()
    routed = sorted(name for name, index in ifindexes(files).items() if index in gateways)
    cards: dict[str | None, str] = {}
    functions = [_function(files, function, cards) for function in inspection.functions]
    own = [netdev for function in inspection.functions for netdev in function.netdevs]
    return _given(
        shows="a server that somebody has",
        sources=[],
        cpus=_cpus(machine),
        route=routed[0] if routed else None,
        functions=functions,
        gpus=[_gpu(files, address, node) for address, node in topology.gpus(files)],
        netdevs=_above(files, own, routed),
        other_rdma=[_rdma(device, None, cards) for device in inspection.other_rdma],
    )


def _given(**facts: Any) -> Facts:
    """The facts without those that there are not."""
    return {name: value for name, value in facts.items() if value not in (None, "", [], {}, 0, False)}


def _cpus(machine: Machine) -> Facts:
    cpus = read_topology(machine)
    by_node = {node: [cpu for cpu in cpus.cpus.values() if cpu.node == node] for node in cpus.distances}
    cores: dict[int, list[Cpu]] = {}
    for cpu in cpus.cpus.values():
        cores.setdefault(cpu.core, []).append(cpu)
    packages = {read_or(machine.files, f"{CPU}/cpu{id}/topology/physical_package_id", "") for id in cpus.cpus}
    return {
        "nodes": {node: format_ranges(cpu.id for cpu in here) for node, here in by_node.items()},
        "sockets": len(packages),
        "threads": max(map(len, cores.values())),
        "caches": max(len({cpu.llc for cpu in here}) for here in by_node.values()),
    }


def _function(files: Files, function: NetworkFunction, cards: dict[str | None, str]) -> Facts:
    path = device_path(function.address)
    virtio = virtio_children(names_in(files, path))
    vf = next((vf for vf in function.vfs), None)
    rdma_of_vf = re.sub(r"\d+$", "", vf.rdma[0].name) if vf and vf.rdma else None
    own = function.netdevs[0].name if function.netdevs else None
    netdevs = [*function.netdevs, *function.representors]
    facts = _given(
        driver=function.driver,
        link=_link(files, path),
        total_vfs=function.total_vfs,
        vf=vf.device if vf else None,
        vf_rdma=rdma_of_vf,
        virtio=virtio[0] if virtio and netdevs else None,
        nvlink_bridge=function.nvlink_bridge,
        netdevs=[_netdev(files, netdev, place, len(function.netdevs)) for place, netdev in enumerate(netdevs)],
        rdma=[_rdma(device, own, cards) for device in function.rdma if _is_below(files, path, device.name)],
        management_rdma=list(function.management_rdma),
    )
    return {
        "address": function.address,
        "class": read_or(files, f"{path}/class", "").removeprefix("0x"),
        "vendor": function.vendor,
        "device": function.device,
        **({} if function.numa_node in (None, -1) else {"numa_node": function.numa_node}),
        **facts,
    }


def _is_below(files: Files, path: str, device: str) -> bool:
    """Whether an RDMA device is the function's own, and not that of another port (RoCE LAG)."""
    parents = (path, *(f"{path}/{child}" for child in virtio_children(names_in(files, path))))
    return any(device in names_in(files, f"{parent}/infiniband") for parent in parents)


def _link(files: Files, path: str) -> str | None:
    speed = read_or(files, f"{path}/max_link_speed", "").removesuffix(" PCIe")
    width = read_or(files, f"{path}/max_link_width", "0")
    return f"{speed} x{width}" if speed.endswith("GT/s") and width not in ("0", "255") else None


def _netdev(files: Files, netdev: Netdev, place: int, ports: int) -> Facts:
    folder = f"{NET}/{netdev.name}"
    facts = _given(
        mtu=netdev.mtu if netdev.mtu != 1500 else None,
        port_name=read_or(files, f"{folder}/phys_port_name", ""),
        dev_port=place if place < ports else 0,
    )
    return {"name": netdev.name, **({} if netdev.up else {"up": False}), **facts}


def _rdma(device: RdmaDevice, own: str | None, cards: dict[str | None, str]) -> Facts:
    """An RDMA device. ``cards``: the number of each system image GUID."""
    card = cards.setdefault(device.sys_image_guid, f"0200:00ff:fe00:{len(cards) + 1:04x}")
    ports = [
        {
            "link_layer": port.link_layer,
            "rate": port.rate,
            **({} if port.state == "ACTIVE" else {"state": port.state}),
            **({} if port.netdev == own else {"netdev": port.netdev}),
        }
        for port in device.ports
    ]
    kind = {"iWARP": "4: RNIC", "unspecified": "7: unspecified"}.get(device.transport or "")
    return {"name": device.name, **({"node_type": kind} if kind else {}), "sys_image_guid": card, "ports": ports}


def _gpu(files: Files, address: str, node: int) -> Facts:
    device = read_or(files, f"{PCI}/{address}/device", "").removeprefix("0x")
    return {"address": address, "device": device, **({} if node == topology.EVERYWHERE else {"numa_node": node})}


def _above(files: Files, netdevs: list[Netdev], routed: list[str]) -> list[Facts]:
    """The netdevs on top of those of functions, each after those below it, and those that carry a default route."""
    kinds = {netdev.master: netdev.member_of or "hv_netvsc" for netdev in netdevs if netdev.master}
    below: dict[str, list[str]] = {}
    left = [netdev.name for netdev in netdevs]
    known = set(left)
    while left:
        lower = left.pop(0)
        for upper in on_top(files, lower):
            below.setdefault(upper, []).append(lower)
            if upper not in known:
                known.add(upper)
                left.append(upper)
    alone = [name for name in routed if name not in known and not names_in(files, f"{NET}/{name}/device")]
    every: Mapping[str, list[str]] = {**below, **{name: [] for name in alone}}
    return [_given(name=name, kind=kinds.get(name, "other"), of=lower) for name, lower in every.items()]


if __name__ == "__main__":
    json.dump(describe(linux.machine()), sys.stdout, indent=2)
