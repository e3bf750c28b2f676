"""virtio-net (drivers/net/virtio_net.c). Its netdev's parent is a device on the virtio bus, below the PCI function."""

from agent.vendors import UNKNOWN, Vendor

VENDOR = Vendor(
    name="virtio",
    drivers=("virtio-pci",),
    queue_irqs=UNKNOWN.queue_irqs,
    has_netdev=False,
)
