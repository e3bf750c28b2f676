"""The fake's RDMA devices, its rdma_cm and its DCB, as Linux 6.1 was seen to behave with rxe, siw and a driver with DCB."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from agent.machine import CmDefaults, DcbState, QueuePair
from tests.sim.tree import error

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

PCI = "/sys/bus/pci/devices"
RDMA = "/sys/class/infiniband"
GIDS = 8
"""The length of a GID table; rxe has 1,024 entries, mlx5 256."""

ZERO = ":".join(["0000"] * 8)


def _gid(address: str) -> str:
    """The GID of an IP address as sysfs prints it: an IPv4 address is mapped to IPv6."""
    return IPv6Address(address if ":" in address else f"::ffff:{address}").exploded


@define
class Subsystem:
    """``rxe``: each VF's netdev gets an RDMA device, as the lab's udev rule makes one. ``other_netns``: a container runs.

    ``managed``: netdevs whose NIC's firmware manages DCB. ``replaces_dscp``: a new entry replaces those of the same DSCP,
    as mlx5_core does it (mlx5e_dcbnl_ieee_setapp). Other drivers add it to them. ``made``: the RDMA devices that the driver
    of a function makes, as arguments of :meth:`add`; ``made_of_vfs``: the same of the one that each VF of a PF has, whose
    name is the next free one.
    ``pairs``: the kernel's queue pairs on a device, beside those for management datagrams.
    """

    kernel: Kernel
    rxe: bool = False
    other_netns: bool = False
    mode: str | None = "shared"
    dcb: dict[str, DcbState] = field(factory=dict)
    refused_priorities: frozenset[int] = frozenset()
    managed: set[str] = field(factory=set)
    replaces_dscp: bool = False
    made: dict[str, list[dict[str, Any]]] = field(factory=dict)
    made_of_vfs: dict[str, Mapping[str, Any]] = field(factory=dict)
    pairs: dict[str, tuple[QueuePair, ...]] = field(factory=dict)
    _below: dict[str, set[str]] = field(factory=dict)
    _char_devices: dict[str, list[str]] = field(factory=dict)
    _cm: dict[tuple[str, int], CmDefaults] = field(factory=dict)
    _uverbs: int = 0

    # --- what a test does to the world --------------------------------------------------------------------

    def add(
        self,
        function: str | None,
        name: str,
        netdev: str | None,
        *,
        node_type: str = "1: CA",
        link_layer: str = "Ethernet",
        rate: str = "100 Gb/sec (4X EDR)",
        umad: bool = True,
        uverbs: bool = True,
        parent: str | None = None,
        node_guid: str | None = None,
        sys_image_guid: str = "0200:00ff:fe00:0001",
        state: str = "ACTIVE",
        other_ports: Sequence[tuple[str | None, str, str]] = (),
    ) -> None:
        """Add an RDMA device. Without ``uverbs`` it is for management only.

        ``parent``: the netdev that rxe names in its file of that name.
        ``other_ports``: netdev, link layer and rate of its ports from the second one on.
        """
        put = self.kernel.tree.put
        put(f"{RDMA}/{name}/node_type", node_type)
        put(f"{RDMA}/{name}/node_guid", node_guid or self._node_guid(function, link_layer))
        put(f"{RDMA}/{name}/sys_image_guid", sys_image_guid)
        if function is not None:
            self.kernel.tree.link(f"{RDMA}/{name}/device", f"../../../{function}")
        if parent is not None:
            put(f"{RDMA}/{name}/parent", parent)
        iwarp = node_type.endswith("RNIC")
        for number, port in enumerate(((netdev, link_layer, rate), *other_ports), 1):
            self._add_port(f"{RDMA}/{name}/ports/{number}", *port, iwarp, state)
        folder = "/sys/class" if function is None else f"{PCI}/{function}"
        kinds = [("infiniband_verbs", "uverbs")] if uverbs else []
        kinds += [("infiniband_mad", "umad")] if umad and not iwarp else []
        for classes, kind in kinds:
            made = [f"{where}/{classes}/{kind}{self._uverbs}" for where in {folder, "/sys/class"}]
            for path in made:
                put(f"{path}/ibdev", name)
            put(f"/dev/infiniband/{kind}{self._uverbs}", "")
            self._char_devices.setdefault(name, []).extend([*made, f"/dev/infiniband/{kind}{self._uverbs}"])
        put("/dev/infiniband/rdma_cm", "")
        self._uverbs += 1
        if function is not None:
            self.kernel.tree.folder(f"{PCI}/{function}/infiniband/{name}")
            self._below.setdefault(function, set()).add(name)
        self._cm[name, 1] = CmDefaults(0, "RoCE v2")

    def _add_port(self, port: str, netdev: str | None, link_layer: str, rate: str, iwarp: bool, state: str) -> None:
        put = self.kernel.tree.put
        for file, text in (
            ("state", "4: ACTIVE" if state == "ACTIVE" else f"1: {state}"),
            ("phys_state", "5: LinkUp" if state == "ACTIVE" else "3: Disabled"),
            ("link_layer", link_layer),
            ("rate", rate),
            ("lid", "0x0"),
            ("lid_mask_count", "0"),
            ("sm_lid", "0x1" if link_layer == "InfiniBand" else "0x0"),
        ):
            put(f"{port}/{file}", text)
        put(f"{port}/pkeys/0", "0xffff")
        for index in range(GIDS):
            put(f"{port}/gids/{index}", ZERO)
        mac = self.kernel.tree.files.get(f"/sys/class/net/{netdev}/address", "").replace(":", "")
        if link_layer == "InfiniBand":
            # It belongs to no netdev (gid_attrs/ndevs), also where there is an IPoIB one.
            guid = mac[24:] or "020000fffe000001"
            put(
                f"{port}/gids/0",
                ":".join(["fe80:0000:0000:0000", *(guid[place : place + 4] for place in range(0, 16, 4))]),
            )
            put(f"{port}/gid_attrs/types/0", "IB/RoCE v1")
        elif netdev is not None and iwarp:
            put(f"{port}/gids/0", ":".join([mac[:4], mac[4:8], mac[8:], *["0000"] * 5]))
            put(f"{port}/gid_attrs/types/0", "IB/RoCE v1")
        elif netdev is not None:
            self._put_gid(port, 0, "fe80:0000:0000:0000:0200:00ff:fe00:0001", "RoCE v2", netdev)

    def set_gid(self, name: str, index: int, gid: str, type: str, netdev: str) -> None:
        self._put_gid(f"{RDMA}/{name}/ports/1", index, gid, type, netdev)

    def _put_gid(self, port: str, index: int, gid: str, type: str, netdev: str) -> None:
        for path, text in (
            (f"gids/{index}", gid),
            (f"gid_attrs/types/{index}", type),
            (f"gid_attrs/ndevs/{index}", netdev),
        ):
            self.kernel.tree.put(f"{port}/{path}", text)

    def address_added(self, netdev: str, address: str) -> None:
        """Each RoCE device of a netdev has a GID for each of its addresses, at the first free index."""
        for name in self._on(netdev):
            free = (
                index for index in range(GIDS) if self.kernel.files.read(f"{RDMA}/{name}/ports/1/gids/{index}") == ZERO
            )
            self.set_gid(name, next(free), _gid(address), "RoCE v2", netdev)

    def address_removed(self, netdev: str, address: str) -> None:
        for name in self._on(netdev):
            for index in range(GIDS):
                if self.kernel.files.read(f"{RDMA}/{name}/ports/1/gids/{index}") == _gid(address):
                    self.kernel.tree.put(f"{RDMA}/{name}/ports/1/gids/{index}", ZERO)

    def _on(self, netdev: str) -> list[str]:
        path = "ports/1/gid_attrs/ndevs/0"
        return [name for name, _ in self._cm if self.kernel.tree.files.get(f"{RDMA}/{name}/{path}") == netdev]

    def add_port(self, name: str, number: int, netdev: str | None) -> None:
        """A further port, in the same state as port 1."""
        for path, text in list(self.kernel.tree.files.items()):
            if path.startswith(f"{RDMA}/{name}/ports/1/"):
                self.kernel.tree.put(path.replace("/ports/1/", f"/ports/{number}/"), text)
        self.kernel.tree.put(f"{RDMA}/{name}/ports/{number}/gid_attrs/ndevs/0", netdev or "")

    def set_port(self, name: str, **texts: str) -> None:
        for file, text in texts.items():
            self.kernel.tree.put(f"{RDMA}/{name}/ports/1/{file}", text)

    def delete(self, name: str) -> None:
        """rdma link delete."""
        self.kernel.tree.remove(f"{RDMA}/{name}")
        del self._cm[name, 1]
        for path in self._char_devices.pop(name, ()):
            self.kernel.tree.remove(path)
        for function, names in self._below.items():
            if name in names:
                self.kernel.tree.remove(f"{PCI}/{function}/infiniband/{name}")
                names.discard(name)

    def bound(self, function: str, netdev: str) -> None:
        """A driver made a netdev."""
        if self.rxe and f"{PCI}/{function}/physfn" in self.kernel.tree.links:
            self.add(function, f"roce_{netdev}", netdev, rate="2.5 Gb/sec (1X SDR)", umad=False)

    def probed(self, function: str, netdev: str) -> None:
        """A driver has been bound to a function, and has made this netdev, if any."""
        for each in self.made.get(function, ()):
            self.add(function, **each)
        physical = self.kernel.sriov.physical(function)
        if physical in self.made_of_vfs:
            given = dict(self.made_of_vfs[physical])
            prefix = given.pop("prefix")
            taken = self.kernel.tree.folders.get(RDMA, set())
            free = next(f"{prefix}{number}" for number in itertools.count() if f"{prefix}{number}" not in taken)
            self.add(function, free, netdev or None, **given)

    def _node_guid(self, function: str | None, link_layer: str) -> str:
        """A VF's driver takes the one that its PF has granted by then, mlx5 on Ethernet with the MAC address."""
        granted = None
        if function is not None and self.kernel.sriov.is_vf(function):
            info = self.kernel.sriov.granted(function)
            granted = info.node_guid
            if link_layer == "Ethernet" and self.kernel.driver(function) == "mlx5_core":
                first, last = info.mac[:8], info.mac[9:]
                granted = f"{first}:ff:fe:{last}" if int(info.mac.replace(":", ""), 16) else ":".join(["00"] * 8)
        octets = (granted or "02:00:00:ff:fe:00:00:01").replace(":", "")
        return ":".join(octets[place : place + 4] for place in range(0, 16, 4))

    def unbound(self, function: str) -> None:
        for name in list(self._below.get(function, ())):
            self.delete(name)

    # --- Rdma -----------------------------------------------------------------------------------------------

    def queue_pairs(self, device: str) -> tuple[QueuePair, ...]:
        """ib_core has one for management datagrams on each port but iWARP's (create_mad_qp, drivers/infiniband/core/mad.c)."""
        node_type = self.kernel.tree.files.get(f"{RDMA}/{device}/node_type")
        if node_type is None:
            return ()
        own = () if node_type.endswith("RNIC") else (QueuePair("ib_core", "GSI"),)
        return (*own, *self.pairs.get(device, ()))

    def netns_mode(self) -> str | None:
        return self.mode

    def set_netns_mode(self, mode: str) -> None:
        self.kernel.refuse("rdma", "netns_mode", mode)
        if self.mode is None:
            raise error(errno.EPROTONOSUPPORT, mode)
        if self.other_netns and mode != self.mode:
            raise error(errno.EBUSY, mode)
        self.mode = mode

    def cm_defaults(self, device: str, port: int) -> CmDefaults | None:
        return self._cm.get((device, port))

    def set_cm_defaults(self, device: str, port: int, *, tos: int | None = None, mode: str | None = None) -> None:
        self.kernel.refuse("rdma", f"rdma_cm/{device}/{port}", f"tos={tos} mode={mode}")
        if (device, port) not in self._cm:
            raise error(errno.ENODEV, device)
        if tos is not None:
            if tos > 255:
                raise error(errno.ERANGE, device)
            self._cm[device, port] = evolve(self._cm[device, port], tos=tos)
        if mode is not None:
            if mode == "RoCE v1":
                raise error(errno.EINVAL, device)  # rxe has RoCE v2 alone
            self._cm[device, port] = evolve(self._cm[device, port], mode=mode)

    # --- Dcb ------------------------------------------------------------------------------------------------

    def state(self, netdev: str) -> DcbState | None:
        return self.dcb.get(netdev)

    def set_pfc(self, netdev: str, priorities: frozenset[int]) -> None:
        state = self._dcb(netdev, f"pfc {sorted(priorities)}")
        if priorities & self.refused_priorities:
            raise error(errno.EOPNOTSUPP, netdev)
        self.dcb[netdev] = evolve(state, pfc=priorities)

    def add_dscp(self, netdev: str, entries: frozenset[tuple[int, int]]) -> None:
        state = self._dcb(netdev, f"add {len(entries)}")
        if entries & state.dscp:
            raise error(errno.EEXIST, netdev)
        given = {dscp for dscp, _ in entries} if self.replaces_dscp else set()
        kept = {(dscp, priority) for dscp, priority in state.dscp if dscp not in given}
        self.dcb[netdev] = evolve(state, dscp=entries | kept)

    def remove_dscp(self, netdev: str, entries: frozenset[tuple[int, int]]) -> None:
        state = self._dcb(netdev, f"remove {len(entries)}")
        if not entries <= state.dscp:
            raise error(errno.ENOENT, netdev)
        self.dcb[netdev] = evolve(state, dscp=state.dscp - entries)

    def _dcb(self, netdev: str, what: str) -> DcbState:
        self.kernel.refuse("rdma", netdev, what)
        if self.kernel.netlink.link(netdev) is None:
            raise error(errno.ENODEV, netdev)
        if netdev not in self.dcb:
            raise error(errno.EOPNOTSUPP, netdev)
        if netdev in self.managed:
            raise error(errno.EINVAL, netdev)
        return self.dcb[netdev]
