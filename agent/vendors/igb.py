"""Intel 82576, I350 and their VFs (drivers/net/ethernet/intel/igb, igbvf); QEMU's igb is the 82576."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="igb",
    drivers=("igb", "igbvf"),
    queue_irqs=re.compile(r"-(?P<role>TxRx|rx|tx)-(?P<queue>\d+)$"),
    # igb_change_mtu and igb_enable_sriov both take the adapter down and up.
    mtu_flaps=True,
    vf_count_flaps=True,
)
