"""Reads the node's network functions, and prints them.

It combines what `ibdev2netdev`, `lspci -s`, `ip a`, `ibv_devinfo`, `ls /dev/infiniband` and /proc/interrupts show. Devices may
come and go meanwhile: what cannot be read is None or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from attrs import evolve, fields, frozen

from agent.driver_families import family_of
from agent.hardware.bonds import bonded, master, rdma_devices
from agent.hardware.functions import (
    NET,
    PCI,
    device_path,
    driver,
    is_network,
    netdevs_by_rdma_port,
    port_netdevs,
    vf_addresses,
    virtio_children,
)
from agent.hardware.interrupts import function_irqs
from agent.hardware.rdma import CHAR_DEVICES, NO_NETDEVS, RdmaDevice, RdmaPort, Reader
from agent.hardware.sysfs import whole
from agent.hardware.vpd import is_nvlink_bridge, product_data, product_name, serial_numbers
from agent.machine import Link, Machine, VfInfo
from agent.report.printable import printable
from agent.spec.node import NodeSpec
from agent.spec.ranges import format_ranges
from agent.spec.vf_attributes import ordered
from agent.state.snapshot import nic_names
from cli import pci_ids
from cli.inspection_lines import rdma_lines, wrapped

WIDTH = 80

T = TypeVar("T")


@frozen
class Interrupt:
    """An interrupt that the function's driver has requested.

    ``queue``: its role and queue, as in changes; ``linked``: the kernel itself knows them, otherwise they are from its name.
    ``name`` and ``number`` are /proc/interrupts' (the kernel's /sys/kernel/irq/N/actions), ``affinity`` and ``effective``
    /proc/irq/N/smp_affinity_list (the CPUs that may serve it) and effective_affinity_list (those that do).
    """

    queue: str
    number: int
    name: str
    affinity: str
    effective: str
    linked: bool = False


@frozen
class Netdev:
    """A netdev in this network namespace, by rtnetlink (RTM_GETLINK, RTM_GETADDR).

    ``addresses`` have their prefix length; ``firmware`` is the driver's (ETHTOOL_GDRVINFO). ``master``: the netdev that it is a
    member of (a bond, a bridge, a VRF), and ``member_of`` the kind of it; empty for a master that has no kind (hv_netvsc).
    """

    name: str
    ifindex: int
    up: bool
    carrier: bool
    mtu: int
    mac: str
    permanent_mac: str
    altnames: tuple[str, ...]
    addresses: tuple[str, ...]
    firmware: str | None
    master: str | None = None
    member_of: str = ""


@frozen
class NetworkFunction:
    """A PCI function that is a network controller or an RDMA device, or a VF of one.

    ``model``: the product name of its VPD (PCI Local Bus Specification 3.0, appendix I), else what pci.ids calls it.
    ``vendor`` and ``device`` are hexadecimal ids, ``serials`` what a selector's ``serial`` may be. ``numa_node`` is None where
    the firmware gives none. ``index`` is the number of a VF, and ``granted`` what its PF says of it (IFLA_VFINFO_LIST).
    ``nic``: the name of the NIC of the spec whose function it is, or of which it is a VF. ``netdevs``: one for each of its
    ports; ``representors``: the others in its folder, which represent VFs and subfunctions (switchdev). ``total_vfs`` is 0
    without SR-IOV. With RoCE LAG the two ports of a card have one RDMA device, and both show it in ``rdma``.
    ``management_rdma``: its RDMA devices that do no RDMA (:meth:`Reader.carrying`). ``nvlink_bridge``: it is no NIC, but
    connects the host to NVLink switches.
    """

    address: str
    model: str
    vendor: str
    device: str
    driver: str | None
    firmware: str | None
    numa_node: int | None
    netdevs: tuple[Netdev, ...]
    rdma: tuple[RdmaDevice, ...]
    interrupts: tuple[Interrupt, ...]
    index: int | None = None
    granted: VfInfo | None = None
    total_vfs: int = 0
    vfs: tuple[NetworkFunction, ...] = ()
    serials: tuple[str, ...] = ()
    nic: str | None = None
    representors: tuple[Netdev, ...] = ()
    management_rdma: tuple[str, ...] = ()
    nvlink_bridge: bool = False


@frozen
class Inspection:
    """The node's network functions by PCI address, and the RDMA devices that belong to none of them.

    ``rdma_cm``: /dev/infiniband/rdma_cm is there, one for the whole node.
    """

    functions: tuple[NetworkFunction, ...]
    other_rdma: tuple[RdmaDevice, ...]
    rdma_cm: bool


# --- reading ---------------------------------------------------------------------------------------------


def inspect(machine: Machine, spec: NodeSpec | None = None) -> Inspection:
    """Read the machine once. ``spec``: names the NICs of the functions."""
    reader = _Reader(machine, nic_names(machine, spec) if spec else {})
    functions = tuple(reader.functions())
    owners = [owner for function in functions for owner in (function, *function.vfs)]
    claimed = {name for owner in owners for name in (*(device.name for device in owner.rdma), *owner.management_rdma)}
    others = tuple(reader.rdma_device(name) for name in reader.rdma.all() if name not in claimed)
    return Inspection(functions, others, reader.rdma.rdma_cm)


class _Reader:
    """Reads functions. What all of them need is read once and kept."""

    def __init__(self, machine: Machine, nics: Mapping[str, str]) -> None:
        self._machine = machine
        self._nics = nics
        self._files = machine.files
        self._links: dict[str, Link | None] = {}
        self._addresses = _unless_gone(machine.netlink.addresses) or {}
        self._pci_ids = next((text for path in pci_ids.PATHS if (text := self._text(path))), "")
        self.rdma = Reader(machine.files)
        self._char_devices = self.rdma.char_devices()

    def functions(self) -> Iterator[NetworkFunction]:
        for address in self._names(PCI):
            entries = self._names(device_path(address))
            # VFs are listed below their PF.
            network = _unless_gone(partial(is_network, self._files, address, entries))
            if network and "physfn" not in entries:
                yield self._physical(address)

    def _physical(self, address: str) -> NetworkFunction:
        granted: dict[int, VfInfo] = {}
        for name in self._net(address):
            link = self._link(name)
            granted |= {vf.index: vf for vf in link.vfs} if link else {}
        vfs = sorted((_unless_gone(lambda: vf_addresses(self._files, address)) or {}).items())
        nic = self._nics.get(address)
        return self._function(
            address,
            nic,
            granted=None,
            total_vfs=whole(self._text(f"{device_path(address)}/sriov_totalvfs")) or 0,
            vfs=tuple(self._function(vf, nic, index=index, granted=granted.get(index)) for index, vf in vfs),
        )

    def _function(
        self,
        address: str,
        nic: str | None,
        *,
        granted: VfInfo | None,
        index: int | None = None,
        total_vfs: int = 0,
        vfs: tuple[NetworkFunction, ...] = (),
    ) -> NetworkFunction:
        path = device_path(address)
        vendor = self._text(f"{path}/vendor").removeprefix("0x")
        device = self._text(f"{path}/device").removeprefix("0x")
        own = self._net(address)
        netdevs = self._netdevs(own)
        served = _unless_gone(lambda: netdevs_by_rdma_port(self._files, address)) or {}
        shared = () if index is not None else _unless_gone(lambda: rdma_devices(self._files, address)) or ()
        below = self.rdma.below(address)
        carrying = self.rdma.carrying(address, below)
        rdma = tuple(self.rdma_device(name, served) for name in carrying or shared)
        firmware = [netdev.firmware for netdev in netdevs] + [device.firmware for device in rdma]
        vpd = product_data(self._files, path)
        return NetworkFunction(
            address=address,
            model=product_name(vpd or b"") or pci_ids.name(self._pci_ids, vendor, device),
            vendor=vendor,
            device=device,
            driver=_unless_gone(lambda: driver(self._files, address)),
            firmware=next(filter(None, firmware), None),
            numa_node=whole(self._text(f"{path}/numa_node")),
            netdevs=netdevs,
            rdma=rdma,
            interrupts=tuple(self._interrupts(address)),
            index=index,
            granted=granted,
            total_vfs=total_vfs,
            vfs=vfs,
            serials=serial_numbers(self._files, path, vpd)[0] if index is None else (),
            nic=nic,
            nvlink_bridge=is_nvlink_bridge(vpd or b""),
            representors=self._netdevs(name for name in self._names(f"{path}/net") if name not in own),
            management_rdma=tuple(name for name in below if name not in carrying),
        )

    def _netdevs(self, names: Iterable[str]) -> tuple[Netdev, ...]:
        return tuple(self._netdev(link) for link in map(self._link, names) if link is not None)

    def _link(self, name: str) -> Link | None:
        if name not in self._links:
            self._links[name] = _unless_gone(partial(self._machine.netlink.link, name))
        return self._links[name]

    def _net(self, address: str) -> list[str]:
        """The netdevs of a function's ports. A virtio function has them below a child device."""
        path = device_path(address)
        below = [name for child in virtio_children(self._names(path)) for name in self._names(f"{path}/{child}/net")]
        return below or _unless_gone(lambda: port_netdevs(self._files, address)) or []

    def _netdev(self, link: Link) -> Netdev:
        shared = {f.name: getattr(link, f.name) for f in fields(Netdev) if hasattr(link, f.name)}
        return Netdev(
            **shared,
            addresses=self._addresses.get(link.ifindex, ()),
            firmware=self._machine.ethtool.firmware(link.name),
            master=master(self._files, link.name),
        )

    def rdma_device(self, name: str, served: Mapping[int, str] = NO_NETDEVS) -> RdmaDevice:
        """An RDMA device. ``served``: its function's netdevs by RDMA port, for a port whose GIDs name none."""
        numbers = self.rdma.port_numbers(name)
        beside = dict(zip(numbers, served.values(), strict=True)) if len(numbers) == len(served) == 1 else served
        device = self.rdma.detailed(self.rdma.device(name, self._char_devices.get(name, ()), beside))
        return evolve(device, ports=tuple(self._port(device, port) for port in device.ports))

    def _port(self, device: RdmaDevice, port: RdmaPort) -> RdmaPort:
        name = port.netdev or self._netdev_of(self.rdma.mac_in_gid(device.name, port.number))
        return evolve(
            port,
            netdev=name,
            bonded=(_unless_gone(lambda: bonded(self._files, name)) or ()) if name else (),
            gids=tuple(self.rdma.gids(device, port.number)),
            pkeys=self.rdma.pkeys(device.name, port.number) if port.link_layer == "InfiniBand" else (),
        )

    def _netdev_of(self, mac: str | None) -> str | None:
        # A VLAN or a bond may have the same MAC, but no device.
        named = ((name, f"{NET}/{name}") for name in self._names(NET))
        names = [name for name, path in named if self._text(f"{path}/address") == mac and self._names(f"{path}/device")]
        return names[0] if mac and len(names) == 1 else None

    def _interrupts(self, address: str) -> Iterator[Interrupt]:
        for irq in _unless_gone(lambda: function_irqs(self._machine, address)) or ():
            yield Interrupt(
                queue=irq.name,
                number=irq.number,
                name=self._text(f"/sys/kernel/irq/{irq.number}/actions"),
                affinity=format_ranges(irq.affinity),
                effective=self._text(f"/proc/irq/{irq.number}/effective_affinity_list"),
                linked=irq.linked,
            )

    def _text(self, path: str) -> str:
        return (_unless_gone(partial(self._files.read, path)) or "").strip()

    def _names(self, path: str) -> list[str]:
        return _unless_gone(partial(self._files.names, path)) or []


def _unless_gone(read: Callable[[], T]) -> T | None:
    """The result of ``read``; None if it fails, since a device may disappear at any time."""
    try:
        return read()
    except OSError:
        return None


# --- showing ---------------------------------------------------------------------------------------------


def render(inspection: Inspection, width: int = WIDTH) -> str:
    """Text for people: a block for each function, with its VFs indented below it."""
    blocks = [_block(function, width) for function in inspection.functions]
    if inspection.other_rdma:
        lines = [line for device in inspection.other_rdma for line in rdma_lines(device, "  ", width)]
        blocks.append(["RDMA devices without a PCI function", *lines])
    if not blocks:
        return "no network function"
    if inspection.other_rdma or any(
        owner.rdma for function in inspection.functions for owner in (function, *function.vfs)
    ):
        blocks.append([f"{CHAR_DEVICES}/rdma_cm: {'there' if inspection.rdma_cm else 'missing (load rdma_ucm)'}"])
    return "\n\n".join("\n".join(map(printable, block)) for block in blocks)


def _block(function: NetworkFunction, width: int, indent: str = "") -> list[str]:
    vf = "" if function.index is None else f"VF {function.index}  "
    ids = f"[{function.vendor}:{function.device}]"
    facts = [f"NIC {function.nic}"] if function.nic and function.index is None else []
    facts += ["NVLink bridge"] if function.nvlink_bridge else []
    facts += [f"driver {function.driver or 'none'}"]
    facts += [f"firmware {function.firmware}"] if function.firmware else []
    facts += [f"serial {serial}" for serial in function.serials]
    facts += [] if function.numa_node is None else [f"NUMA node {function.numa_node}"]
    facts += [f"VFs {len(function.vfs)} of {function.total_vfs}"] if function.total_vfs else []
    lines = [indent + "  ".join(filter(None, (f"{vf}{function.address}", function.model, ids)))]
    inner = indent + "  "
    lines += wrapped(inner, "", facts, width)
    if function.granted is not None:
        granted = [fact for attribute in ordered() for fact in attribute.shown(function.granted)]
        lines += wrapped(inner, "granted", granted, width)
    for label, netdevs in (("netdev", function.netdevs), ("representor", function.representors)):
        lines += [line for each in netdevs for line in wrapped(inner, label, _netdev_facts(each), width)]
    lacking = function.driver and not function.netdevs and not function.rdma
    if lacking and family_of(function.driver).creates_netdev(function.total_vfs):
        lines += [f"{inner}{'netdev':<8} none in this network namespace"]
    for device in function.rdma:
        lines += rdma_lines(device, inner, width)
    lines += [f"{inner}{'rdma':<8} {name}  for management or raw packets only" for name in function.management_rdma]
    if function.interrupts:
        known = ["(the kernel knows their queues)"] if any(irq.linked for irq in function.interrupts) else []
        lines += wrapped(inner, "irqs", [*map(_irq_fact, function.interrupts), *known], width)
    return lines + [line for each in function.vfs for line in _block(each, width, inner)]


def _netdev_facts(netdev: Netdev) -> list[str]:
    state = ("up" if netdev.carrier else "up (no carrier)") if netdev.up else "down"
    mac = netdev.mac
    if netdev.permanent_mac not in ("", netdev.mac):
        mac += f" (permanent {netdev.permanent_mac})"
    return [netdev.name, state, f"MTU {netdev.mtu}", mac, *netdev.addresses]


def _irq_fact(irq: Interrupt) -> str:
    return f"{irq.queue} {irq.affinity}" + (f" (on {irq.effective})" if irq.effective != irq.affinity else "")
