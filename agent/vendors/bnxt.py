"""Broadcom NetXtreme-C and -E. From the driver's source (drivers/net/ethernet/broadcom/bnxt): not run on such a NIC."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="bnxt",
    drivers=("bnxt_en",),
    # <netdev>-TxRx-3, or <netdev>-rx-3 and <netdev>-tx-9 (bnxt_setup_msix). In Linux 6.10 and earlier a name has at most 17
    # characters (struct bnxt_irq): with a netdev such as enp65s0f0np0 the number is cut off, and perhaps a part of TxRx. The
    # driver takes the interrupts in the order of the queues.
    queue_irqs=re.compile(r"-(?P<role>T(?:x(?:Rx?)?)?|[rt]x?)(?:-\d*)?$"),
)
