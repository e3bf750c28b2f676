"""Huawei's NICs. From the drivers' source (drivers/net/ethernet/huawei/hinic, hinic3): not run on such a NIC."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="hinic",
    drivers=("hinic", "hinic3"),
    # <netdev>_rxq<n> and <netdev>_txq<n> (hinic_init_rxq in hinic_rx.c, hinic_init_txq in hinic_tx.c), of hinic3 <netdev>_qp<n>
    # (hinic3_irq.c). hinic_aeq<n>@pci:<BDF> and hinic_ceq<n>@pci:<BDF> are those of events.
    queue_irqs=re.compile(r"_(?P<role>rxq|txq|qp)(?P<queue>\d+)$"),
)
