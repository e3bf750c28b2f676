"""Chelsio T4 and later, and their VFs. From the driver's source (drivers/net/ethernet/chelsio): not run on such a NIC.

A card's ports are netdevs of one PCI function. Only the first port's queues are recognised: the interrupts of another port have
the same numbers, and count as management interrupts.
"""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="cxgb4",
    drivers=("cxgb4", "cxgb4vf"),
    # <netdev>-Rx<n> (setup_sge_queues in cxgb4_main.c), of VFs <netdev>-<n> (name_msix_vecs in cxgb4vf_main.c).
    # <netdev>-FWeventq, <netdev>-eorxq<n> and <netdev>-<driver><n> of RDMA, iSCSI and crypto serve no queue of the netdev.
    queue_irqs=re.compile(r"-(?P<role>Rx)?(?P<queue>\d+)$"),
)
