"""Drivers that pass a function through to a process or a virtual machine, or keep other drivers from it.

Documentation/driver-api/vfio.rst, drivers/pci/pci-stub.c, drivers/xen/xen-pciback (its driver is called pciback).
"""

from agent.vendors import UNKNOWN, VFIO, Vendor

XEN = "pciback"

VENDOR = Vendor(
    name="passthrough",
    drivers=(VFIO, "uio_pci_generic", "igb_uio", "pci-stub", XEN),
    queue_irqs=UNKNOWN.queue_irqs,
    has_netdev=False,
)
