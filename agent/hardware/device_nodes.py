"""The device nodes by which processes use a function or a part of it."""

from __future__ import annotations

from collections.abc import Iterator

from agent.hardware.functions import PCI, driver
from agent.hardware.sysfs import names_in, number_or
from agent.machine import Files

VDPA = "/sys/bus/vdpa/devices"


def of_vfio(files: Files, pci: str) -> list[str]:
    """The nodes of the function's VFIO group, which other functions may share, and of the function alone (Linux 6.6)."""
    group = files.target(f"{PCI}/{pci}/iommu_group")
    # noiommu-N exists without an IOMMU (vfio_noiommu_group_alloc); devices/vfioN is for iommufd.
    own = (f"devices/{name}" for name in names_in(files, f"{PCI}/{pci}/vfio-dev"))
    return [f"/dev/vfio/{name}" for name in (group, f"noiommu-{group}", *own)]


def vfio_is_open(files: Files, pci: str) -> bool:
    """Whether anybody has the VFIO device open. Its driver enables the device only meanwhile (vfio_pci_core_enable).

    A device is open without a descriptor while its memory is mapped, such as of a virtual machine whose process has ended but
    whose memory vhost keeps. To take the device from its driver would wait for that.
    """
    return number_or(files, f"{PCI}/{pci}/enable", 0) > 0


def of_uio(files: Files, pci: str) -> list[str]:
    """The nodes of the function's UIO device."""
    return [f"/dev/{name}" for name in names_in(files, f"{PCI}/{pci}/uio")]


def of_vdpa(files: Files, folder: str, devices: frozenset[str]) -> Iterator[str]:
    """The nodes of the vDPA devices in the folder of a function or a part of it. ``devices``: the machine's vDPA devices."""
    for device in sorted(devices.intersection(names_in(files, folder))):
        names = names_in(files, f"{folder}/{device}")
        yield from (f"/dev/{name}" for name in names if name.startswith("vhost-vdpa-"))


def of_psm(files: Files, pci: str) -> list[str]:
    """The nodes that MPI opens on Omni-Path (drivers/infiniband/hw/hfi1/file_ops.c). No file ties them to one function."""
    return [f"/dev/{name}" for name in names_in(files, f"/sys/class/{driver(files, pci)}_user")]


def of_clock(files: Files, pci: str) -> list[str]:
    """The node of the function's PTP clock."""
    return [f"/dev/{name}" for name in names_in(files, f"{PCI}/{pci}/ptp")]
