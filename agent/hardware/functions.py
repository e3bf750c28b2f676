"""Physical functions: which there are, and which of them the spec means."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from attrs import evolve, field, frozen

from agent.hardware.sysfs import names_or_none, number_or, parsed, read_or
from agent.hardware.vpd import device_serial_number, vpd_serial_number
from agent.machine import Attributes, Files, Link, Machine
from agent.report.records import Condition
from agent.spec.nic import Nic, VfAttributes
from agent.spec.node import NodeSpec
from agent.spec.ranges import parse_ranges

PCI = "/sys/bus/pci/devices"
NET = "/sys/class/net"

VFIO = "vfio-pci"

UNREADABLE = "DeviceUnreadable"
REMEDY = "see the kernel's log (dmesg), and reset the device, load its driver again or reboot the node"

# No configuration space (4096 bytes) and no Vital Product Data (32768) is larger.
LARGEST = 1 << 15


@frozen
class Function:
    """A physical function of a network controller.

    ``numa_node`` is -1 where the firmware tells none; ``total_vfs`` is 0 where there is no SR-IOV. ``hung``: a call to it
    never returned, so nothing but what the PCI core knows is asked of it. ``serials``: the serial numbers of its
    configuration space and of its Vital Product Data, empty unless they were asked for.
    ``unreadable``: why it is left alone until it is read again: a file or a netlink request of it failed. If that was while
    it was looked for, nothing but its address is known (``vendor`` is empty).
    """

    address: str
    vendor: str
    device: str
    driver: str | None
    numa_node: int
    total_vfs: int
    link: Link | None
    hung: bool = False
    serials: tuple[str, ...] = ()
    unreadable: str = ""


@frozen
class WantedNic:
    """A NIC of the spec and the function it stands for."""

    nic: Nic
    function: Function
    _vfs: dict[int, VfAttributes] = field(factory=dict, init=False, eq=False, repr=False)
    # By what the spec gives: all VFs of a group differ in their addresses alone, and there may be a thousand.
    _filled: dict[VfAttributes, VfAttributes] = field(factory=dict, init=False, eq=False, repr=False)

    def vf_count(self) -> int | None:
        """How many VFs it should have; None leaves them alone."""
        return None if self.nic.vfs is None else self.nic.vfs.count

    def vf(self, index: int) -> VfAttributes:
        """All that VF ``index`` should be, defaults filled in."""
        if index not in self._vfs:
            self._vfs[index] = self._with_address(index)
        return self._vfs[index]

    def _with_address(self, index: int) -> VfAttributes:
        assert self.nic.vfs is not None  # noqa: S101  callers iterate over vf_count()
        given = self.nic.vfs.attributes(index)
        if given not in self._filled:
            self._filled[given] = self._fill(given)
        filled = self._filled[given]
        link = self.function.link
        permanent = link.permanent_mac if link and self.nic.vfs.derive_macs else ""
        # An InfiniBand PF's address has 20 octets, and its VFs have GUIDs instead.
        if filled.mac or len(permanent) != len("00:00:00:00:00:00"):
            return filled
        return _with_derived_mac(filled, permanent, index)

    def _fill(self, given: VfAttributes) -> VfAttributes:
        has_netdev = given.driver != VFIO
        return evolve(
            given,
            # A VF without a VLAN has no priority in it either.
            qos=0 if given.vlan == 0 and given.qos is None else given.qos,
            mtu=(given.mtu or self.nic.mtu) if has_netdev else None,
            state=(given.state or self.nic.state) if has_netdev else None,
            txqueuelen=(given.txqueuelen or self.nic.txqueuelen) if has_netdev else None,
            owner=given.owner or "taker",
        )

    def settings(self, key: str) -> dict[str, Any]:
        """What the spec gives under ``key`` to the PF's netdev and to its VFs', by target; who is given nothing is left out."""
        address, vfs = self.function.address, self.nic.vfs
        given = {address: getattr(self.nic, key)}
        if vfs is not None:
            # The same as vfs.attributes(index) of each, of which there may be a thousand.
            if (default := getattr(vfs.defaults, key)) is not None:
                given |= {f"{address}#{index}": default for index in range(vfs.count)}
            for group in vfs.groups:
                if (value := getattr(group, key)) is not None:
                    given |= {f"{address}#{index}": value for index in parse_ranges(group.index)}
        return {target: value for target, value in given.items() if value is not None}

    def vf_wanted(self, index: int) -> VfAttributes:
        """:meth:`vf`, and nothing of a VF that the spec does not have."""
        return self.vf(index) if index < (self.vf_count() or 0) else VfAttributes()


@frozen
class Wanted:
    """The spec, resolved against what the machine has. ``missing`` says which NICs could not be found, and why.

    ``unreadable``: those of them whose function cannot be read, by its address.
    """

    spec: NodeSpec
    nics: Mapping[str, WantedNic] = field(factory=dict)
    missing: tuple[Condition, ...] = ()
    unreadable: Mapping[str, Nic] = field(factory=dict)


@lru_cache(maxsize=16384)
def _with_derived_mac(filled: VfAttributes, permanent: str, index: int) -> VfAttributes:
    """The same in every pass, and there may be thousands."""
    return evolve(filled, mac=derived_mac(permanent, index))


def derived_mac(permanent: str, index: int) -> str:
    """A VF's address made from its PF's permanent one: locally administered, and the same after every reload.

    Two PFs of one vendor never share one, up to 1,024 VFs each: the PF's last three octets and the index are kept as they are,
    the vendor's prefix is folded to 12 bits.
    """
    octets = bytes.fromhex(permanent.replace(":", ""))
    prefix = int.from_bytes(hashlib.sha256(octets[:3]).digest()[:2], "big")
    made = bytes([prefix >> 8 & 0xFC | 0x02, prefix & 0xFC | index >> 8 & 0x03, index & 0xFF, *octets[3:]])
    return made.hex(":")


def device_path(address: str) -> str:
    """The sysfs folder of a PCI function."""
    return f"{PCI}/{address}"


def driver(files: Files, address: str) -> str | None:
    """The driver bound to a PCI function; None if there is none."""
    try:
        return files.target(f"{PCI}/{address}/driver")
    except FileNotFoundError:
        return None


def netdev(files: Attributes, address: str) -> str | None:
    """The function's netdev in the host's network namespace; None if it has none, or it was moved away."""
    found = names_or_none(files, f"{PCI}/{address}/net")
    return found[0] if found else None


def physical_function(files: Files, address: str) -> str:
    """The address of the PF that a function is a VF of, or its own."""
    try:
        return files.target(f"{PCI}/{address}/physfn")
    except FileNotFoundError:
        return address


def rdma_devices(files: Files, address: str) -> list[str]:
    """The RDMA devices of a function.

    With RoCE LAG two ports of a card share one, ``mlx5_bond_0``, whose PCI function is that of the first port alone. Its netdev
    is the bond (gid_attrs/ndevs), and the second port is told by its netdev being in that bond. From vendor documents (NVIDIA,
    "RoCE over LAG"; drivers/infiniband/hw/mlx5/main.c): not run on such a card.
    """
    own = names_or_none(files, f"{PCI}/{address}/infiniband")
    name = netdev(files, address)
    if own or name is None or (bond := _master(files, name)) is None:
        return own
    card = address.rpartition(".")[0]
    return [
        device
        for other in names_or_none(files, PCI)
        if other != address and other.startswith(f"{card}.") and "physfn" not in names_or_none(files, f"{PCI}/{other}")
        for device in names_or_none(files, f"{PCI}/{other}/infiniband")
        if rdma_bond(files, device) == bond
    ]


def rdma_bond(files: Files, device: str) -> str | None:
    """The bond whose two ports an RDMA device serves (RoCE LAG); None for a device with a netdev of its own."""
    folder = f"/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs"
    told = next((read_or(files, f"{folder}/{index}", "") for index in names_or_none(files, folder)[:1]), "")
    return told if told and bonded(files, told) else None


def bonded(files: Files, name: str) -> tuple[str, ...]:
    """The netdevs that a bond is made of; none of a netdev that is no bond."""
    return tuple(read_or(files, f"{NET}/{name}/bonding/slaves", "").split())


def _master(files: Files, name: str) -> str | None:
    try:
        return files.target(f"{NET}/{name}/master")
    except OSError:
        return None


def vf_addresses(files: Files, address: str) -> dict[int, str]:
    """The PCI addresses of a PF's VFs by their index."""
    links = (name for name in names_or_none(files, f"{PCI}/{address}") if name.startswith("virtfn"))
    return {int(name[6:]): files.target(f"{PCI}/{address}/{name}") for name in links}


def targets(files: Files, address: str) -> dict[str, str]:
    """A PF and its VFs as changes call them (``ADDRESS``, ``ADDRESS#N``), with the PCI address of each."""
    vfs = sorted(vf_addresses(files, address).items())
    return {address: address} | {f"{address}#{index}": vf for index, vf in vfs}


def pci_of(files: Files, target: str) -> str:
    """The PCI address that a change's target stands for now.

    :raises FileNotFoundError: that VF does not exist.
    """
    address, _, index = target.partition("#")
    try:
        return files.target(f"{PCI}/{address}/virtfn{index}") if index else address
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, f"{target} does not exist") from None


def netdev_of(files: Files, target: str) -> str:
    """The netdev that a change's target has now.

    :raises FileNotFoundError: it has none in the host's network namespace.
    """
    name = netdev(files, pci_of(files, target))
    if name is None:
        raise FileNotFoundError(errno.ENOENT, f"the netdev of {target} is not in the host's network namespace")
    return name


def ifindex(files: Files, name: str) -> int:
    """The index of a netdev in the host's network namespace; 0 if it is gone."""
    return number_or(files, f"{NET}/{name}/ifindex", 0)


def ifindex_of(files: Files, target: str) -> int:
    """The index of the netdev that a change's target has now; raises as :func:`netdev_of`.

    All that most changes need: asking rtnetlink for the link costs twenty times as much, and a PF's answer tells all its VFs.
    """
    path = f"{NET}/{netdev_of(files, target)}/ifindex"
    return parsed(int, files.read(path), path)


def link_of(machine: Machine, target: str) -> Link:
    """The link that a change's target has now; raises as :func:`netdev_of`."""
    name = netdev_of(machine.files, target)
    link = machine.netlink.link(name)
    if link is None:
        raise FileNotFoundError(errno.ENOENT, f"the netdev {name} of {target} is gone")
    return link


def asks_serials(spec: NodeSpec) -> bool:
    """Whether a selector of the spec wants a serial number: reading Vital Product Data may take a card a tenth of a second."""
    return any(nic.select.serial for nic in spec.nics)


def discover(machine: Machine, serials: bool = False) -> tuple[Function, ...]:
    """Every physical function of PCI class 02 (network controller), by address."""
    # One by one: a node may have a thousand netdevs that are none of a PCI function, and a dump tells all of them.
    found = (_function(machine, address, serials) for address in names_or_none(machine.files, PCI))
    return tuple(function for function in found if function is not None)


def rediscover(
    machine: Machine, functions: tuple[Function, ...], addresses: frozenset[str], serials: bool = False
) -> tuple[Function, ...]:
    """``functions`` with those at ``addresses`` read again: gone, or with the netdev that they have now."""
    kept = {function.address: function for function in functions}
    read = {address: _function(machine, address, serials) for address in addresses - machine.hung}
    return tuple(function for _, function in sorted({**kept, **read}.items()) if function is not None)


def _function(machine: Machine, address: str, serials: bool) -> Function | None:
    """The function at an address, None if it is no physical one of a network; of one that fails to read only that it does."""
    try:
        return _read_function(machine, address, serials)
    except OSError as error:
        return Function(address, "", "", None, -1, 0, None, address in machine.hung, unreadable=str(error))


def _read_function(machine: Machine, address: str, serials: bool) -> Function | None:
    files = machine.files
    path = device_path(address)
    if not read_or(files, f"{path}/class", "").startswith("0x02") or "physfn" in names_or_none(files, path):
        return None
    name = netdev(files, address)
    return Function(
        address=address,
        vendor=read_or(files, f"{path}/vendor", "").removeprefix("0x"),
        device=read_or(files, f"{path}/device", "").removeprefix("0x"),
        driver=driver(files, address),
        numa_node=number_or(files, f"{path}/numa_node", -1),
        total_vfs=number_or(files, f"{path}/sriov_totalvfs", 0),
        link=_link(machine, address, name) if name else None,
        hung=address in machine.hung,
        serials=serial_numbers(files, address) if serials and address not in machine.hung else (),
    )


def _link(machine: Machine, address: str, name: str) -> Link | None:
    if address in machine.hung:
        # A dump asks no driver for its VFs.
        return next((link for link in machine.netlink.links() if link.name == name), None)
    return machine.netlink.link(name)


def serial_numbers(files: Files, address: str) -> tuple[str, ...]:
    """The serial numbers of a function's configuration space and of its Vital Product Data, as far as it has them."""
    path = device_path(address)
    told = (device_serial_number(_data(files, f"{path}/config")), vpd_serial_number(_data(files, f"{path}/vpd")))
    return tuple(serial for serial in told if serial)


def _data(files: Files, path: str) -> bytes:
    try:
        return files.read_at(path, 0, LARGEST)
    except OSError:
        return b""  # not every card has Vital Product Data, and one that does may fail to read it
