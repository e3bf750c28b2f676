"""RDMA devices in sysfs: the PCI function that each belongs to, their ports, and their GIDs.

Each reading starts again from the PCI function or the class folder, because udev renames an RDMA device just after it appears,
and GIDs come and go with IP addresses. A device may vanish at any time: what cannot be read is None or empty.
"""

from __future__ import annotations

import ipaddress
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from attrs import evolve, frozen

from agent.hardware.bonds import rdma_devices
from agent.hardware.functions import NET, RDMA, device_path, virtio_children
from agent.hardware.sysfs import ABSENT, numbered, whole
from agent.machine import Files

CHAR_DEVICES = "/dev/infiniband"
GAP = 64
CHAR_DEVICE_CLASSES = ("infiniband_verbs", "infiniband_mad")
NO_NETDEVS: Mapping[int, str] = MappingProxyType({})

RAW = "raw packets"
# A rate with one of these ends may be wrong: the port may be faster. The first is of drivers that call ib_get_eth_speed (before
# Linux 6.6; later if they name no lanes), the second of mlx5. The third is of lanes of 200 Gbit/s, which have no word
# (ib_get_width_and_speed), and of bnxt_re in Linux 6.3, which asked once, perhaps with the link down (bnxt_re_ib_init).
GUESSED = ("100 Gb/sec (4X EDR)", "40 Gb/sec (4X QDR)", "X SDR)")
Family = Literal["IPv4", "IPv6"]
# 169.254.0.0/16 and fe80::/10
LINK_LOCAL = ("169.254.", "fe8", "fe9", "fea", "feb")


@frozen
class Gid:
    """An entry of a port's GID table (ports/N/gids, gid_attrs/types, gid_attrs/ndevs).

    ``type`` is ``RoCE v2`` or ``RoCE v1`` on a RoCE port, ``IB`` on InfiniBand, and empty on iWARP, where GIDs have no use.
    ``address`` is the GID's IP address as text, IPv4 for a mapped one. ``netdev`` is the netdev with that address.
    """

    index: int
    type: str
    address: str
    netdev: str | None

    @property
    def family(self) -> Family:
        """``IPv4`` if the GID is a mapped IPv4 address."""
        return "IPv6" if ":" in self.address else "IPv4"


@frozen
class RdmaPort:
    """A port of an RDMA device, by /sys/class/infiniband/D/ports/N (drivers/infiniband/core/sysfs.c).

    ``state`` (ACTIVE, DOWN), ``physical_state`` (LinkUp, Disabled) and ``link_layer`` (Ethernet, InfiniBand) are the kernel's
    words. ``netdev`` is that of its first GID (gid_attrs/ndevs), and ``bonded`` its members, if it is a bond (RoCE LAG).
    ``speed``: the netdev's in Mbit/s, if ``rate`` ends as :data:`GUESSED`. ``pkeys``: partition keys, as far as they were read.
    ``lid``, ``lmc`` and ``sm_lid`` are the files lid, lid_mask_count and sm_lid: what an InfiniBand subnet manager gave the
    port, 0 before that and on Ethernet. :meth:`Reader.detailed` reads them; ``sm_lid`` of InfiniBand is always read.
    """

    number: int
    netdev: str | None
    link_layer: str | None
    state: str | None
    physical_state: str | None
    rate: str | None
    bonded: tuple[str, ...] = ()
    gids: tuple[Gid, ...] = ()
    lid: int | None = None
    lmc: int | None = None
    sm_lid: int | None = None
    pkeys: tuple[int, ...] = ()
    speed: int = 0

    @property
    def gigabits(self) -> float | None:
        """The rate in Gbit/s, as 100 for `100 Gb/sec (4X EDR)`. If the netdev is faster, its speed."""
        match = re.match(r"([\d.]+) Gb/sec", self.rate or "")
        return max(float(match[1]), self.speed / 1000) if match else None


@frozen
class CharDevice:
    """uverbsN, umadN or issmN of an RDMA device (/sys/class/infiniband_{verbs,mad}/*/ibdev). ``present``: it is in /dev."""

    name: str
    present: bool


@frozen
class RdmaDevice:
    """An RDMA device, by /sys/class/infiniband.

    ``transport`` (InfiniBand, RoCE, iWARP, raw packets) follows from node_type, link layer and whether there are GIDs; it is
    the kernel's word for a node of another type.
    ``sys_image_guid``: the same for all devices of one card or system. ``hw_rev`` (the hardware's revision, hw_ver of
    ibv_devinfo) and ``board_id`` are files of some drivers, among them mlx5 (drivers/infiniband/hw/mlx5/main.c), as these print
    them. :meth:`Reader.detailed` reads the three.
    """

    name: str
    transport: str | None
    node_guid: str | None
    firmware: str | None
    ports: tuple[RdmaPort, ...]
    char_devices: tuple[CharDevice, ...]
    sys_image_guid: str | None = None
    hw_rev: str | None = None
    board_id: str | None = None


def gid_fits(gid: Gid, type: str | None, family: Family | None = None) -> bool:
    """Whether a GID is of the given type and address family, as far as they are given.

    If a family is given, a link-local address does not count: a netdev gets one by itself, and no router passes it on.
    """
    if family is not None and gid.address.startswith(LINK_LOCAL):
        return False
    return type in (None, gid.type) and family in (None, gid.family)


def transport(node_type: str, link_layer: str | None) -> str | None:
    """The transport, from node_type (node_type_show, drivers/infiniband/core/sysfs.c) and link layer."""
    if node_type == "RNIC":
        return "iWARP"
    if node_type == "CA" and link_layer is not None:
        return "RoCE" if link_layer == "Ethernet" else link_layer
    return node_type or None


# --- reading ---------------------------------------------------------------------------------------------


class Reader:
    """Reads the RDMA devices of a machine; a new one is created for each reading.

    ``failed``: the last error from reading something that exists. It is treated as absent.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.failed: OSError | None = None
        self._present = frozenset(self._names(CHAR_DEVICES))
        self._serving: list[tuple[str, str]] | None = None

    @property
    def rdma_cm(self) -> bool:
        """Whether /dev/infiniband/rdma_cm is there, one for the whole node."""
        return "rdma_cm" in self._present

    def all(self) -> list[str]:
        """The names of all RDMA devices."""
        return self._names(RDMA)

    def below(self, address: str) -> list[str]:
        """The RDMA devices of a PCI function; virtio's lie below a child of it."""
        path = device_path(address)
        if names := self._names(f"{path}/infiniband"):
            return names
        children = virtio_children(self._names(path))
        return [name for child in children for name in self._names(f"{path}/{child}/infiniband")]

    def of(self, address: str) -> list[str]:
        """The RDMA devices that serve a PCI function: those below it, that of its card's bond (RoCE LAG), else its netdev's.

        siw and rxe have no parent, and eRDMA's is not the function that the netdev belongs to.
        """
        if own_names := self.below(address) or self._in_lag(address):
            return own_names
        names = set(self._names(f"{device_path(address)}/net"))
        names |= {self._text(f"{NET}/{netdev}/address") for netdev in names}
        return sorted({device for device, owner in self._owners() if owner in names})

    def carrying(self, address: str, names: list[str]) -> list[str]:
        """A function's RDMA devices, without the devices that are only for management or only for raw packets.

        An XDR port has a device for the subnet manager of its planes (RDMA_DEVICE_TYPE_SMI). It has no uverbs
        (ib_uverbs_add_one, drivers/infiniband/core/uverbs_main.c). If no device has any, the module is not loaded.
        """
        if len(names) < 2:
            return names
        of_each = {name: self.char_devices_of(address, name) for name in names if self._with_gids(name)}
        return [name for name, each in of_each.items() if any(one.startswith("uverbs") for one in each)] or names

    def _in_lag(self, address: str) -> list[str]:
        try:
            return rdma_devices(self._files, address)
        except OSError:
            return []

    def _owners(self) -> list[tuple[str, str]]:
        """Each device with the netdev of its port, or with that netdev's address where the kernel does not report the name."""
        if self._serving is None:
            self._serving = [(name, owner) for name in self.all() for owner in self._owners_of(name)]
        return self._serving

    def _owners_of(self, device: str) -> list[str]:
        before = self.failed
        ports = self.port_numbers(device)
        owners = [self._netdev(device, number) or self.mac_in_gid(device, number) for number in ports]
        if self.failed is not before and self._has_owner(device):
            # The device belongs to another function, so its fault does not concern the present one.
            self.failed = before
        return [owner for owner in owners if owner]

    def _has_owner(self, device: str) -> bool:
        """Whether an RDMA device lies below a function that has a netdev, and so serves that one."""
        try:
            parent = self._files.target(f"{RDMA}/{device}/device")
        except OSError:
            return False
        return bool(self._names(f"{device_path(parent)}/net"))

    def roce_ports(self, address: str) -> list[tuple[str, int]]:
        """The RoCE ports (device, number) that serve a PCI function."""
        return [
            (name, number)
            for name in self.of(address)
            for number in self._with_gids(name)
            if transport(self._node_type(name), self._text(f"{RDMA}/{name}/ports/{number}/link_layer")) == "RoCE"
        ]

    def device(self, name: str, char_devices: Iterable[str], beside: Mapping[int, str] = NO_NETDEVS) -> RdmaDevice:
        """An RDMA device, without its GIDs.

        :param char_devices: the names of its character devices, of :meth:`char_devices`.
        :param beside: netdevs by port, for ports whose own netdev no file names.
        """
        path = f"{RDMA}/{name}"
        ports = tuple(self._port(name, number, beside.get(number)) for number in self.port_numbers(name))
        kind = transport(self._node_type(name), ports[0].link_layer if ports else None)
        if kind in ("RoCE", "InfiniBand"):
            with_gids = self._with_gids(name)
            active = tuple(port for port in ports if port.state == "ACTIVE") or ports[:1]
            ports = tuple(port for port in ports if port.number in with_gids) or active
            kind = kind if with_gids else RAW
        return RdmaDevice(
            name=name,
            transport=kind,
            node_guid=self._text(f"{path}/node_guid") or None,
            firmware=self._text(f"{path}/fw_ver") or None,
            ports=ports,
            char_devices=tuple(CharDevice(char_device, char_device in self._present) for char_device in char_devices),
        )

    def _with_gids(self, device: str) -> list[int]:
        """The numbers of the ports with a GID table. A port without one only passes raw packets, by DPDK for one (not run).

        So does mana's `manae` (mana_ib_probe in device.c), and of its first versions `mana_0`, which seems to be InfiniBand: it
        names no link layer. The device of a PF of mlx5 in switchdev mode has a port for each representor that there may be,
        most of them DOWN (mlx5_ib_vport_rep_load in ib_rep.c). Of a ConnectX-8 with four planes, ports 3, 6, 9 and 12 do RoCE.
        """
        return [port for port in self.port_numbers(device) if self._text(f"{RDMA}/{device}/ports/{port}/gids/0")]

    def detailed(self, device: RdmaDevice) -> RdmaDevice:
        """The device with what only people look at. Each of a port's files makes its driver ask the device (ib_query_port).

        The kernel shows a port's MTU (max_mtu, active_mtu) neither in sysfs nor over RDMA netlink (rdma_netlink.h): only to
        programs that open the device, as ibv_devinfo does.
        """
        path = f"{RDMA}/{device.name}"
        return evolve(
            device,
            sys_image_guid=self._text(f"{path}/sys_image_guid") or None,
            hw_rev=self._text(f"{path}/hw_rev") or None,
            board_id=self._text(f"{path}/board_id") or None,
            ports=tuple(
                evolve(
                    port,
                    lid=_number(self._text(f"{path}/ports/{port.number}/lid")),
                    lmc=_number(self._text(f"{path}/ports/{port.number}/lid_mask_count")),
                    sm_lid=_number(self._text(f"{path}/ports/{port.number}/sm_lid")),
                )
                for port in device.ports
            ),
        )

    def _node_type(self, device: str) -> str:
        return self._text(f"{RDMA}/{device}/node_type").partition(": ")[2]

    def _port(self, device: str, number: int, beside: str | None) -> RdmaPort:
        path = f"{RDMA}/{device}/ports/{number}"
        link_layer = self._text(f"{path}/link_layer") or None
        netdev, rate = self._netdev(device, number) or beside, self._text(f"{path}/rate")
        return RdmaPort(
            number=number,
            netdev=netdev,
            link_layer=link_layer,
            state=self._text(f"{path}/state").partition(": ")[2] or None,
            physical_state=self._text(f"{path}/phys_state").partition(": ")[2] or None,
            rate=rate or None,
            speed=whole(self._text(f"{NET}/{netdev}/speed") if rate.endswith(GUESSED) else "") or 0,
            sm_lid=_number(self._text(f"{path}/sm_lid")) if link_layer == "InfiniBand" else None,
        )

    def pkeys(self, device: str, number: int) -> tuple[int, ...]:
        """The partition keys of a port, sorted, without the empty entries of its table (0)."""
        path = f"{RDMA}/{device}/ports/{number}/pkeys"
        keys = {_number(self._text(f"{path}/{index}")) for index in self._names(path)}
        return tuple(sorted(key for key in keys if key))

    def _netdev(self, device: str, number: int) -> str | None:
        # rxe alone names its netdev in `parent` (rxe_verbs.c, parent_show), which helps while a port has no GID.
        path = f"{RDMA}/{device}"
        return self._text(f"{path}/ports/{number}/gid_attrs/ndevs/0") or self._text(f"{path}/parent") or None

    def gids(self, device: RdmaDevice, number: int) -> Iterator[Gid]:
        """The GIDs of a port by index, each read when it is needed: a table of 256 (rxe: 1,024) is mostly empty.

        The kernel takes the first free entry (find_gid, drivers/infiniband/core/cache.c): after :data:`GAP` empty ones
        another follows only if that many were removed at once.
        """
        path = f"{RDMA}/{device.name}/ports/{number}"
        empty = 0
        for index in numbered(self._names(f"{path}/gids")):
            text = self._text(f"{path}/gids/{index}")
            empty = empty + 1 if text.strip("0:") == "" else 0
            if empty == GAP:
                return
            if empty or (address := _address(text)) is None:
                continue
            kind = self._text(f"{path}/gid_attrs/types/{index}")
            yield Gid(
                index, _gid_type(kind, device.transport), address, self._text(f"{path}/gid_attrs/ndevs/{index}") or None
            )

    def mac_in_gid(self, device: str, number: int) -> str | None:
        """The address of the netdev of an iWARP port: its GID begins with it, and has nothing else.

        So says query_gid of erdma, siw, irdma and cxgb4. Linux 6.1 leaves their `ndevs` empty, and eRDMA's netdev belongs
        to another PCI function.
        """
        gid = self._text(f"{RDMA}/{device}/ports/{number}/gids/0").replace(":", "")
        return ":".join(textwrap.wrap(gid[:12], 2)) if gid[12:] == "0" * 20 and gid.strip("0") else None

    def port_numbers(self, device: str) -> list[int]:
        """The numbers of a device's ports."""
        return list(numbered(self._names(f"{RDMA}/{device}/ports")))

    def char_devices(self, parent: str = "/sys/class") -> dict[str, list[str]]:
        """The character devices below a PCI function's folder, or all, by RDMA device.

        uverbs_main.c and user_mad.c give each an attribute `ibdev`.
        """
        by_device: dict[str, list[str]] = {}
        for folder in CHAR_DEVICE_CLASSES:
            for name in self._names(f"{parent}/{folder}"):
                if device := self._text(f"{parent}/{folder}/{name}/ibdev"):
                    by_device.setdefault(device, []).append(name)
        return by_device

    def char_devices_of(self, address: str, device: str) -> list[str]:
        """The character devices of an RDMA device that serves a PCI function, of :meth:`of`."""
        # They are elsewhere if the RDMA device has no parent, or another function as its parent.
        return self.char_devices(device_path(address)).get(device) or self.char_devices().get(device, [])

    def _text(self, path: str) -> str:
        try:
            return self._files.read(path).strip()
        except OSError as error:
            self._note(error)
            return ""

    def _names(self, path: str) -> list[str]:
        try:
            return self._files.names(path)
        except OSError as error:
            self._note(error)
            return []

    def _note(self, error: OSError) -> None:
        if error.errno not in ABSENT and not isinstance(error, NotADirectoryError):
            self.failed = error


def _number(text: str) -> int | None:
    """A number as the kernel prints it, decimal or as 0x1f."""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]{1,16}", text) else whole(text)


def _gid_type(kind: str, transport: str | None) -> str:
    """The kernel has one word for two types (`IB/RoCE v1`, drivers/infiniband/core/cache.c), and uses it for iWARP as well."""
    if transport == "RoCE":
        return "RoCE v1" if kind == "IB/RoCE v1" else kind
    return "" if transport == "iWARP" else "IB"


def _address(text: str) -> str | None:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    return str(address.ipv4_mapped or address)
