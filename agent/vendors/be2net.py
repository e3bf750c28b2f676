"""Emulex OneConnect. From the driver's source (drivers/net/ethernet/emulex/benet): not run on such a NIC."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="be2net",
    drivers=("be2net",),
    # <netdev>-q<n> (be_msix_register in be_main.c). Those of RDMA are ocrdma<n>-<n> (ocrdma_create_eqs in ocrdma_hw.c).
    queue_irqs=re.compile(r"-(?P<role>q)(?P<queue>\d+)$"),
)
