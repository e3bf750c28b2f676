"""Drivers that hand a function to a process or a virtual machine as it is (Documentation/driver-api/vfio.rst)."""

from agent.vendors import UNKNOWN, Vendor

VENDOR = Vendor(
    name="passthrough",
    drivers=("vfio-pci", "uio_pci_generic", "igb_uio"),
    queue_irqs=UNKNOWN.queue_irqs,
    has_netdev=False,
)
