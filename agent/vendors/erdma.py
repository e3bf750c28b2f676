"""Alibaba Cloud eRDMA. From the source of the in-tree driver (drivers/infiniband/hw/erdma), not run on such an instance."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="erdma",
    drivers=("erdma",),
    # erdma-ceq<n>@pci:<BDF> are the completion queues' interrupts, erdma-common@pci:<BDF> is the management one.
    queue_irqs=re.compile(r"erdma-(?P<role>ceq)(?P<queue>\d+)@"),
    # Instances are seen with the class of a network controller and with class 00ff (kubernetes-sigs/dranet, issue 228).
    unclassified=("1ded:107f",),
    # It uses the netdev of the elastic network interface with the same permanent address.
    has_netdev=False,
    # The out-of-tree driver reports a constant, the in-tree one the netdev's rate. Neither is the rate of eRDMA.
    invents_rate=True,
)
