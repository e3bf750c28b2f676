"""The parts of a function, which are its auxiliary devices and those on the virtio bus, and their netdevs."""

from __future__ import annotations

import re

from agent.hardware.functions import PCI, netdev, virtio_children
from agent.hardware.sysfs import names_in, target_of
from agent.machine import Files

# MODULE.NAME.NUMBER (drivers/base/auxiliary.c), such as mlx5_core.sf.4 of a subfunction, and mlx5_core.eth.4 below that one.
AUXILIARY = re.compile(r"\w+\.[\w.-]+\.\d+")
OF_NETDEV = re.compile(r"\w+\.eth\.\d+")


def auxiliary(files: Files, pci: str) -> list[str]:
    """The folders of a function's auxiliary devices, such as its subfunctions."""
    return [f"{PCI}/{pci}/{name}" for name in names_in(files, f"{PCI}/{pci}") if AUXILIARY.fullmatch(name)]


def own_netdev(files: Files, pci: str) -> str | None:
    """The netdev of a function. With virtio_net it lies below a child of the function."""
    if (own := netdev(files, pci)) is not None:
        return own
    children = virtio_children(names_in(files, f"{PCI}/{pci}"))
    return next((name for child in children for name in names_in(files, f"{PCI}/{pci}/{child}/net")), None)


def netdevs(files: Files, pci: str) -> list[str]:
    """The netdevs of a function and of its parts, which have the same port."""
    own = own_netdev(files, pci)
    of_parts = (name for names in _netdevs_of_parts(files, pci).values() for name in names)
    return list(dict.fromkeys([*filter(None, [own]), *of_parts]))


def away(files: Files, pci: str) -> list[str]:
    """The parts of a function that have a netdev, but none in the host's network namespace."""
    return sorted(part for part, names in _netdevs_of_parts(files, pci).items() if not names)


def _netdevs_of_parts(files: Files, pci: str) -> dict[str, list[str]]:
    """The netdevs in the host's network namespace of each part that has any, also elsewhere.

    Of a vDPA device virtio_vdpa makes a virtio device, beside it (virtio_vdpa_probe, drivers/virtio/virtio_vdpa.c).
    """
    found = {}
    for part in auxiliary(files, pci):
        names = names_in(files, f"{part}/net")
        if names or any(map(OF_NETDEV.fullmatch, names_in(files, part))):
            found[part] = names
    for folder in (f"{PCI}/{pci}", *auxiliary(files, pci)):
        for child in virtio_children(names_in(files, folder)):
            if target_of(files, f"{folder}/{child}/driver") == "virtio_net":
                found[child] = names_in(files, f"{folder}/{child}/net")
    return {part.rpartition("/")[2]: names for part, names in found.items()}
