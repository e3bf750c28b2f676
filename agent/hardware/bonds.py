"""Bonds and others on top of netdevs, and the RDMA device that ports of one card share in a bond (RoCE LAG)."""

from __future__ import annotations

from agent.hardware.functions import NET, PCI, RDMA, driver, ifindex, netdev, physical_function
from agent.hardware.sysfs import names_in, number_or, read_or, target_of
from agent.machine import ARPHRD_INFINIBAND, Files, Link

NO_GUID = "0000:0000:0000:0000"


def rdma_devices(files: Files, address: str) -> list[str]:
    """The RDMA devices of a function.

    With RoCE LAG the ports of a card share one device, ``mlx5_bond_0``, which sysfs shows only under the first port. Its netdev
    is the bond (gid_attrs/ndevs), so another port is recognised by its netdev being in that bond. This follows the vendor's
    documents (NVIDIA, "RoCE over LAG"; drivers/infiniband/hw/mlx5/main.c) and was not tried on such a card.
    """
    own = names_in(files, f"{PCI}/{address}/infiniband")
    name = netdev(files, address)
    if own or name is None or (bond := master(files, name)) is None:
        return own
    return [
        device
        for other in ports_of(files, bond)
        if physical_function(files, other) == other != address and _are_one_card(files, address, other)
        for device in names_in(files, f"{PCI}/{other}/infiniband")
        if rdma_bond(files, device) == bond
    ]


def _are_one_card(files: Files, one: str, other: str) -> bool:
    """Whether two functions are ports of one card, which may be on different buses (passed through, or socket direct).

    mlx5 pairs those with the same system image GUID, unless it is 0 (mlx5_same_hw_devs in
    drivers/net/ethernet/mellanox/mlx5/core/dev.c). In RoCE LAG the one without an RDMA device is known by its driver.
    """
    if one.rpartition(".")[0] == other.rpartition(".")[0]:
        return True
    guids = {_system_image_guid(files, each) for each in (one, other)}
    if len(known := guids - {None}) != 1 or known <= {"", NO_GUID}:
        return False
    return known == guids or driver(files, one) == driver(files, other) is not None


def _system_image_guid(files: Files, address: str) -> str | None:
    """The GUID that all RDMA devices of a card have; None without such a device."""
    devices = names_in(files, f"{PCI}/{address}/infiniband")
    return next((read_or(files, f"{RDMA}/{device}/sys_image_guid", "") for device in devices[:1]), None)


def rdma_bond(files: Files, device: str) -> str | None:
    """The bond whose two ports an RDMA device serves (RoCE LAG); None for a device with a netdev of its own."""
    folder = f"{RDMA}/{device}/ports/1/gid_attrs/ndevs"
    name = next((read_or(files, f"{folder}/{index}", "") for index in names_in(files, folder)[:1]), "")
    return name if name and bonded(files, name) else None


def lag_device(files: Files, address: str) -> str | None:
    """The RDMA device that a function's port shares with the other ports of its card (RoCE LAG); None without one."""
    return next((device for device in rdma_devices(files, address) if rdma_bond(files, device) is not None), None)


def bond_of_ports(files: Files, address: str) -> str | None:
    """The bond of a function's netdev, if all its members are ports of this card, so that they may have RoCE LAG.

    So ConnectX sees it (mlx5_handle_changeupper_event, drivers/net/ethernet/mellanox/mlx5/core/lag/lag.c).
    """
    name = netdev(files, address)
    if name is None or (bond := master(files, name)) is None:
        return None
    ports = [port for port in ports_of(files, bond) if _are_one_card(files, address, port)]
    return bond if len(ports) == len(bonded(files, bond)) > 1 else None


def ports_of(files: Files, bond: str) -> list[str]:
    """The PCI addresses of the functions whose netdevs are members of a bond."""
    functions = (target_of(files, f"{NET}/{member}/device") for member in bonded(files, bond))
    return [function for function in functions if function is not None]


def bonded(files: Files, name: str) -> tuple[str, ...]:
    """The member netdevs of a bond; empty if the netdev is not a bond."""
    return tuple(read_or(files, f"{NET}/{name}/bonding/slaves", "").split())


def master(files: Files, name: str) -> str | None:
    """The netdev whose member a netdev is (a bond, a bridge, a VRF); None if it is no member."""
    return target_of(files, f"{NET}/{name}/master")


def on_top(files: Files, name: str) -> list[str]:
    """The netdevs on top of a netdev: its master, VLANs, macvlans."""
    entries = names_in(files, f"{NET}/{name}")
    return [entry.removeprefix("upper_") for entry in entries if entry.startswith("upper_")]


def ipoib_children(files: Files, name: str) -> list[str]:
    """The netdevs that an IPoIB netdev has for other partitions; empty for another netdev.

    A child has no link ``upper_*`` and no PCI function, but its parent's index (ipoib_get_iflink and ipoib_child_init in
    drivers/infiniband/ulp/ipoib/ipoib_main.c; not run).
    """
    if not is_ipoib(files, name):
        return []
    index = ifindex(files, name)
    others = [other for other in names_in(files, NET) if number_or(files, f"{NET}/{other}/iflink", 0) == index]
    return [other for other in others if other != name and is_ipoib(files, other)]


def is_ipoib(files: Files, name: str) -> bool:
    """Whether a netdev is IPoIB's."""
    return number_or(files, f"{NET}/{name}/type", 0) == ARPHRD_INFINIBAND


def vrf(files: Files, link: Link) -> str | None:
    """The VRF that a netdev is in; None if it is in none.

    A VRF only says which routing table the netdev has (Documentation/networking/vrf.rst): the netdev keeps its addresses, and
    packets pass it as before. Other masters take over what their members receive.
    """
    return master(files, link.name) if link.member_of == "vrf" else None
