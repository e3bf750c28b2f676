"""Chelsio T4 and later, and their VFs. From the driver's source (drivers/net/ethernet/chelsio): not run on such a NIC.

A card's ports are netdevs of one PCI function, and each port's names count from 0. The driver takes the interrupts in the order
of the ports (setup_sge_queues in cxgb4_main.c, name_msix_vecs in cxgb4vf_main.c), so they are numbered in their order: first
the queues of the first port, then those of the next.
"""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="cxgb4",
    drivers=("cxgb4", "cxgb4vf"),
    # <netdev>-Rx<n>, of VFs <netdev>-<n>.
    # <netdev>-FWeventq, <netdev>-eorxq<n> and <netdev>-<driver><n> of RDMA, iSCSI and crypto serve no queue of the netdev.
    queue_irqs=re.compile(r"-(?P<role>Rx)?\d+$"),
    # PF 4 has the ports' netdevs and no SR-IOV. A netdev of PF 0 to 3 (mgmtpf<n>,<n>) comes with the first VF and goes with the
    # last one (cxgb4_iov_configure). It passes no packets, and the ports' netdevs stay up meanwhile.
    pfs_only_for_vfs=True,
    vf_count_flaps=False,
)
