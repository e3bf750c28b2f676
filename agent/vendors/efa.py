"""AWS's Elastic Fabric Adapter. From the driver's source (drivers/infiniband/hw/efa), not run on such an instance."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="efa",
    drivers=("efa",),
    # efa-comp<n>@pci:<BDF> are the completion queues' interrupts (efa_setup_comp_irq in efa_main.c); efa-mgmnt@pci:<BDF> is the
    # management one.
    queue_irqs=re.compile(r"^efa-(?P<role>comp)(?P<queue>\d+)@"),
    # The instance's network is ENA's, a PCI function of its own.
    has_netdev=False,
)
