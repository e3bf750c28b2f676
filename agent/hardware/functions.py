"""Network controllers in sysfs: the physical functions, their VFs, drivers, netdevs and RDMA devices."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterable, Mapping

from attrs import evolve, frozen

from agent.driver_families import family_of, unclassified
from agent.hardware.sysfs import names_in, number_or, numbered, parsed, read_or, target_of
from agent.hardware.udev import initialised
from agent.hardware.vpd import is_nvlink_bridge, product_data, serial_numbers, silence
from agent.machine import Attributes, Files, Link, Machine
from agent.report.target import device_of, is_vf, vf_index, vf_target

PCI = "/sys/bus/pci/devices"
NET = "/sys/class/net"
RDMA = "/sys/class/infiniband"

# The first octet of a PCI class: "unclassified", and network controllers, InfiniBand's among them.
UNCLASSIFIED, NETWORK = "0x00", "0x02"

INFINIBAND = "0x0207"
MELLANOX = "0x15b3"

# The addr_assign_type of a netdev that has its hardware's address (include/uapi/linux/netdevice.h).
NET_ADDR_PERM = "0"

UNREADABLE = "DeviceUnreadable"
HUNG = "DeviceHung"


@frozen
class Function:
    """A physical function of a network controller.

    ``numa_node`` is -1 if the firmware does not report one; ``total_vfs`` is 0 without SR-IOV. ``hung``: a call to its driver
    never returned, so only what the kernel answers without that driver is read. ``serials``: the serial numbers in its
    configuration space and its Vital Product Data, read only on request.
    ``unreadable``: the error of a file or netlink request; the function is left alone until it can be read. If discovery
    itself failed, only the address is known (``vendor`` is empty).
    ``renaming``: udev has not initialised its netdev, whose names may still change. ``serials_unread``: there may be another
    serial number, which could not be read. ``other_ports``: the netdevs of its ports after the first one, which is ``link``.
    ``nvlink_bridge``: it connects the host to NVLink switches, and is no NIC; None: not known. It is read only on request.
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
    renaming: bool = False
    serials_unread: bool = False
    other_ports: tuple[Link, ...] = ()
    nvlink_bridge: bool | None = None


@frozen
class Asked:
    """What else to read of each function: to read its Vital Product Data takes about a tenth of a second.

    ``known``: functions as they were read before; what cannot change is taken from them. ``load``: also read how much time CPUs
    spend on packets.
    """

    serials: bool = False
    nvlink_bridges: bool = False
    known: tuple[Function, ...] = ()
    load: bool = False


NOTHING = Asked()


def device_path(address: str) -> str:
    """The sysfs folder of a PCI function."""
    return f"{PCI}/{address}"


def is_network(files: Files, address: str, entries: Collection[str]) -> bool:
    """Whether a PCI function, with these entries in its folder, is a network controller: by its class, devices or ID."""
    if not {"net", "infiniband"}.isdisjoint(entries):
        return True
    path = f"{PCI}/{address}"
    kind = read_or(files, f"{path}/class", "")
    if not kind.startswith(UNCLASSIFIED):
        return kind.startswith(NETWORK)
    # Before its driver has made a device, only its ID says what it is.
    vendor, device = (read_or(files, f"{path}/{name}", "").removeprefix("0x") for name in ("vendor", "device"))
    return f"{vendor}:{device}" in unclassified()


def driver(files: Files, address: str) -> str | None:
    """The driver bound to a PCI function; None if there is none."""
    return target_of(files, f"{PCI}/{address}/driver")


def has_netdev(files: Files, address: str, bound: str | None) -> bool:
    """Whether the driver that is bound to a function creates a netdev that passes packets."""
    family = family_of(bound)
    # This is asked of a thousand VFs, too, so the file is read only where it matters.
    return family.creates_netdev(total_vfs(files, address) if family.pfs_only_for_vfs else 0)


def is_away(files: Files, address: str) -> bool:
    """Whether a function has a driver that creates netdevs, but no netdev in the host's network namespace."""
    bound = driver(files, address)
    return bound is not None and netdev(files, address) is None and has_netdev(files, address, bound)


PORT_NAME = "/phys_port_name"
"""The file in a netdev's folder that has the name of its port. A path of such a file ends with this."""

# The phys_port_name of a function's own netdev: none, p0, p0s1 for a part of a port (__devlink_port_phys_port_name_get in
# net/devlink/port.c), n0 (nfp). In switchdev mode the netdevs that represent VFs and subfunctions are in the PF's folder, too,
# with other names: pf0vf1, c1pf0sf88, pf0vfr1 (ice_repr.c), p0pf0vf1 (ef100_rep.c), pf0s1 (nfp_port.c), 1 (older mlx5).
_OWN_PORT = re.compile(r"([np]\d+(s\d+)?)?")


def netdev(files: Attributes, address: str) -> str | None:
    """The function's netdev in the host's network namespace; None if it has none, or it was moved away.

    Of several ports (ConnectX-3) it is that of the first.
    """
    return next(iter(port_netdevs(files, address)), None)


def port_netdevs(files: Attributes, address: str) -> list[str]:
    """The netdevs of a function's ports in their order, without those of representors.

    Most functions have one port. Those of ConnectX-3 (mlx4) and PF 4 of Chelsio's cards have a netdev for each of several.
    """
    names = names_in(files, f"{PCI}/{address}/net")
    # A VF has no representors, and there may be a thousand VFs: no file of its netdev is read.
    if not names or (len(names) == 1 and physical_function(files, address) != address):
        return names
    own = [name for name in names if _OWN_PORT.fullmatch(read_or(files, f"{NET}/{name}{PORT_NAME}", ""))]
    if len(own) < 2:
        return own
    # The PF's netdev is older than representors, should a driver name none of them.
    order = {name: [number_or(files, f"{NET}/{name}/{file}", 0) for file in ("dev_port", "ifindex")] for name in own}
    return sorted(own, key=order.__getitem__)


def netdevs_by_rdma_port(files: Attributes, address: str) -> dict[int, str]:
    """The netdevs of a function's ports by the number of the RDMA port that serves them, in the order of the ports.

    Port 1 serves the netdev whose dev_port is 0 (mlx4_en_init_netdev in en_netdev.c, init_one in cxgb4_main.c). Netdevs whose
    driver numbers none of them are counted.
    """
    names = port_netdevs(files, address)
    numbers = [number_or(files, f"{NET}/{name}/dev_port", 0) + 1 for name in names]
    return dict(zip(numbers if len({*numbers}) == len(names) else range(1, len(names) + 1), names, strict=True))


def virtio_children(names: Iterable[str]) -> list[str]:
    """Of the names in a PCI function's folder those of its devices on the virtio bus, which have its netdev or RDMA device."""
    return [name for name in names if re.fullmatch(r"virtio\d+", name)]


def physical_function(files: Attributes, address: str) -> str:
    """The address of a VF's PF; a PF's own address."""
    return target_of(files, f"{PCI}/{address}/physfn") or address


def function_of(files: Attributes, name: str) -> str | None:
    """The address of the PF that a netdev or its VF belongs to; None for one without (a veth), and if it is gone."""
    device = target_of(files, f"{NET}/{name}/device")
    return None if device is None else physical_function(files, device)


def total_vfs(files: Files, address: str) -> int:
    """How many VFs a PF can have; 0 without SR-IOV."""
    return number_or(files, f"{PCI}/{address}/sriov_totalvfs", 0)


def vf_count(files: Files, address: str) -> int:
    """How many VFs a PF has; 0 without SR-IOV."""
    return number_or(files, f"{PCI}/{address}/sriov_numvfs", 0)


def vf_addresses(files: Files, address: str) -> dict[int, str]:
    """The PCI addresses of a PF's VFs by their index."""
    links = links_to_vfs(files, address)
    return {index: files.target(f"{PCI}/{address}/{name}") for index, name in links.items()}


def links_to_vfs(files: Attributes, address: str) -> Mapping[int, str]:
    """The names of the links in a PF's folder that lead to its VFs, by their index.

    While the kernel makes or deletes VFs, reading sriov_numvfs waits for the end of that; listing the folder does not.
    """
    return numbered(names_in(files, f"{PCI}/{address}"), "virtfn")


def targets(files: Files, address: str) -> dict[str, str]:
    """The targets of a PF and its VFs (``ADDRESS``, ``ADDRESS#N``), with the PCI address of each."""
    vfs = sorted(vf_addresses(files, address).items())
    return {address: address} | {vf_target(address, index): vf for index, vf in vfs}


def pci_of(files: Files, target: str) -> str:
    """The PCI address that a target has now.

    :raises FileNotFoundError: that VF does not exist.
    """
    if not is_vf(target):
        return target
    if (address := target_of(files, f"{PCI}/{device_of(target)}/virtfn{vf_index(target)}")) is None:
        raise FileNotFoundError(errno.ENOENT, f"{target} does not exist")
    return address


def netdev_of(files: Files, target: str) -> str:
    """The netdev that a target has now.

    :raises FileNotFoundError: it has none in the host's network namespace.
    """
    name = netdev(files, pci_of(files, target))
    if name is None:
        raise FileNotFoundError(errno.ENOENT, f"the netdev of {target} is not in the host's network namespace")
    return name


def ifindex(files: Files, name: str) -> int:
    """The index of a netdev in the host's network namespace; 0 if it is gone."""
    return number_or(files, f"{NET}/{name}/ifindex", 0)


def ifindexes(files: Files) -> dict[str, int]:
    """The index of each netdev in the host's network namespace, by its name. No driver is asked, as it would be for links."""
    return {name: index for name in names_in(files, NET) if (index := ifindex(files, name))}


def ifindex_of(files: Files, target: str) -> int:
    """The index of the netdev that a target has now; raises like :func:`netdev_of`.

    Most changes need only the index. Reading it from sysfs takes a twentieth of a link request, which lists a PF's VFs, too.
    """
    return ifindex_named(files, netdev_of(files, target))


def ifindex_named(files: Files, name: str) -> int:
    """The index of a netdev in the host's network namespace.

    :raises OSError: it is gone.
    """
    path = f"{NET}/{name}/ifindex"
    return parsed(int, files.read(path), path)


def ifindex_now(files: Files, target: str) -> int:
    """The index of the netdev that a target has now; 0 if it has none in the host's network namespace, or cannot be read."""
    try:
        return ifindex_of(files, target)
    except OSError:
        return 0


def link_of(machine: Machine, target: str) -> Link:
    """The link that a target has now; raises like :func:`netdev_of`."""
    name = netdev_of(machine.files, target)
    link = machine.netlink.link(name)
    if link is None:
        raise FileNotFoundError(errno.ENOENT, f"the netdev {name} of {target} is gone")
    return link


def discover(machine: Machine, asked: Asked = NOTHING) -> tuple[Function, ...]:
    """Every physical function that is a network controller, by address."""
    # One request for each function: a dump would list all netdevs, perhaps a thousand without a PCI function.
    candidates = (_function(machine, address, asked) for address in names_in(machine.files, PCI))
    return tuple(function for function in candidates if function is not None)


def rediscover(
    machine: Machine,
    functions: tuple[Function, ...],
    whole: frozenset[str],
    netdevs: frozenset[str] = frozenset(),
    asked: Asked = NOTHING,
) -> tuple[Function, ...]:
    """``functions`` with those at the addresses ``whole`` and ``netdevs`` read again; a function that is gone is left out.

    :param netdevs: addresses where only the netdev or the driver may have changed. The kernel announces another device at an
        address by a uevent of the PCI function, not by one of its netdev.
    """
    kept = {function.address: function for function in functions}
    read = {a: _function(machine, a, asked, None if a in whole else kept.get(a)) for a in whole | netdevs}
    return tuple(function for _, function in sorted({**kept, **read}.items()) if function is not None)


def _function(machine: Machine, address: str, asked: Asked, same: Function | None = None) -> Function | None:
    """The physical function at an address; None if it is no network controller. If it fails to read: the error.

    :param same: the same device as it was read before.
    """
    try:
        return _read_function(machine, address, asked, same)
    except OSError as error:
        return Function(address, "", "", None, -1, 0, None, address in machine.hung, unreadable=str(error))


def _read_function(machine: Machine, address: str, asked: Asked, same: Function | None) -> Function | None:
    files = machine.files
    path = device_path(address)
    entries = names_in(files, path)
    # The vendor ID of each VF reads as ones (PCI Express Base Specification), so it does not show whether a VF answers.
    if not is_network(files, address, entries) or "physfn" in entries:
        return None
    hung = address in machine.hung
    silent = "" if hung else silence(files, path)
    link, renaming, others = _links(machine, address, asked=not (hung or silent))
    known = same is not None and not same.unreadable
    function = same if same is not None and known else _unread(files, address)
    now = evolve(
        function,
        driver=driver(files, address),
        link=link,
        hung=hung,
        unreadable=silent,
        renaming=renaming,
        other_ports=others,
    )
    return now if known else _with_product_data(files, now, asked)


def _unread(files: Files, address: str) -> Function:
    """What the kernel itself knows of a function, and what does not change."""
    path = device_path(address)
    vendor, device = (read_or(files, f"{path}/{name}", "").removeprefix("0x") for name in ("vendor", "device"))
    node = number_or(files, f"{path}/numa_node", -1)
    return Function(address, vendor, device, None, node, total_vfs(files, address), None)


def _with_product_data(files: Files, function: Function, asked: Asked) -> Function:
    kind = (function.address, function.vendor, function.device)
    known = (each.nvlink_bridge for each in asked.known if (each.address, each.vendor, each.device) == kind)
    bridge = next(known, None)
    if asked.nvlink_bridges and bridge is None and not _may_be_nvlink_bridge(files, function.address):
        bridge = False
    path = device_path(function.address)
    serials: tuple[str, ...] = ()
    unread = asked.serials
    if not (function.hung or function.unreadable) and (asked.serials or (asked.nvlink_bridges and bridge is None)):
        vpd = product_data(files, path)
        if bridge is None and vpd is not None:
            bridge = is_nvlink_bridge(vpd)
        if asked.serials:
            serials, unread = serial_numbers(files, path, vpd)
    return evolve(function, serials=serials, serials_unread=unread, nvlink_bridge=bridge)


def _may_be_nvlink_bridge(files: Files, address: str) -> bool:
    """Whether it is an InfiniBand function of NVIDIA, as NVLink bridges are."""
    vendor_id, kind = (read_or(files, f"{device_path(address)}/{name}", "") for name in ("vendor", "class"))
    return vendor_id == MELLANOX and kind.startswith(INFINIBAND)


def _links(machine: Machine, address: str, asked: bool) -> tuple[Link | None, bool, tuple[Link, ...]]:
    """A function's netdev, whether its names may still change, and the netdevs of its other ports.

    ``asked``: its driver may be asked.
    """
    if not asked:
        return _unasked_link(machine.files, address), False, ()
    names = port_netdevs(machine.files, address)
    if not names:
        return None, False, ()
    first, *others = (machine.netlink.link(name) for name in names)
    renaming = first is not None and not initialised(machine.files, first.ifindex)
    return first, renaming, tuple(link for link in others if link is not None)


def _unasked_link(files: Files, address: str) -> Link | None:
    """The oldest netdev of a device that hangs or does not answer, by files that need no driver (net/core/net-sysfs.c).

    Its alternative names are in no file, nor is its hardware's address once another one was set. Both stay empty, and
    agent/state/selection.py takes them as unknown. Nobody asks for the rest of a device that is left alone.
    """
    indexes = {ifindex(files, name): name for name in names_in(files, f"{PCI}/{address}/net")}
    if not indexes:
        return None
    first = min(indexes)
    mac, origin = (read_or(files, f"{NET}/{indexes[first]}/{file}", "") for file in ("address", "addr_assign_type"))
    permanent = mac if origin == NET_ADDR_PERM else ""
    return Link(first, indexes[first], mac, permanent, mtu=0, up=False, carrier=False)
