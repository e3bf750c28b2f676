"""The parts of a function, and their netdevs. A part is an auxiliary device, or a device on the virtio bus."""

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
    return _auxiliary(pci, names_in(files, f"{PCI}/{pci}"))


def _auxiliary(pci: str, names: list[str]) -> list[str]:
    return [f"{PCI}/{pci}/{name}" for name in names if AUXILIARY.fullmatch(name)]


def own_netdev(files: Files, pci: str) -> str | None:
    """The netdev of a function, or of its device on the virtio bus."""
    if (own := netdev(files, pci)) is not None:
        return own
    folder = f"{PCI}/{pci}"
    of_virtio = _of_virtio(files, folder, names_in(files, folder)).values()
    return next((name for names in of_virtio for name in names), None)


def netdevs(files: Files, pci: str) -> dict[str, list[str]]:
    """The netdevs in the host's network namespace of a function and of its parts, which have the same port.

    The keys are the names of the parts; the function's own netdev has an empty key. The netdev of a part with an empty list is
    in another network namespace.
    """
    own = netdev(files, pci)
    entries = names_in(files, f"{PCI}/{pci}")
    folders = {part: names_in(files, part) for part in _auxiliary(pci, entries)}
    found = {part: names_in(files, f"{part}/net") for part, names in folders.items() if _has_netdev(files, part, names)}
    for folder, names in ({f"{PCI}/{pci}": entries} | folders).items():
        found |= _of_virtio(files, folder, names)
    return {"": [] if own is None else [own]} | {part.rpartition("/")[2]: names for part, names in found.items()}


def _of_virtio(files: Files, folder: str, names: list[str]) -> dict[str, list[str]]:
    """The netdevs of the virtio devices in a folder with these names, by the device. virtio_net makes them.

    Of a vDPA device virtio_vdpa makes a virtio device, beside it (virtio_vdpa_probe, drivers/virtio/virtio_vdpa.c).
    """
    return {
        child: names_in(files, f"{folder}/{child}/net")
        for child in virtio_children(names)
        if target_of(files, f"{folder}/{child}/driver") == "virtio_net"
    }


def _has_netdev(files: Files, part: str, names: list[str]) -> bool:
    """Whether a part with these names in its folder has a netdev, perhaps in another network namespace: a driver made it."""
    drivers = (f"{part}/{name}/driver" for name in names if OF_NETDEV.fullmatch(name))
    return "net" in names or any(target_of(files, each) is not None for each in drivers)
