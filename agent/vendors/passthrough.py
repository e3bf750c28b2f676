"""Drivers that pass a function through to a process or a virtual machine (Documentation/driver-api/vfio.rst)."""

from agent.vendors import UNKNOWN, VFIO, Vendor

VENDOR = Vendor(
    name="passthrough",
    drivers=(VFIO, "uio_pci_generic", "igb_uio"),
    queue_irqs=UNKNOWN.queue_irqs,
    has_netdev=False,
)
