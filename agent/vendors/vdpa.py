"""PCI drivers that create a vDPA device for a function instead of a netdev. From the kernel's source (drivers/vdpa): not run.

pds_core is the PCI driver of the VFs that pds_vdpa uses (drivers/net/ethernet/amd/pds_core).
"""

from agent.vendors import UNKNOWN, Vendor

VENDOR = Vendor(
    name="vdpa",
    drivers=("ifcvf", "vp-vdpa", "octep_vdpa", "alibaba-eni-vdpa", "snet-vdpa-driver", "pds_core"),
    queue_irqs=UNKNOWN.queue_irqs,
    has_netdev=False,
)
