"""Marvell (Aquantia) AQtion. From the driver's source (drivers/net/ethernet/aquantia/atlantic): not run on such a NIC."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="atlantic",
    drivers=("atlantic",),
    # All are named after the netdev (aq_nic_start in aq_nic.c). Those of the queues come first; those of PTP and of the link's
    # state cannot be told from them, and are numbered like queues.
    queue_irqs=re.compile(r"^(?P<role>)"),
)
