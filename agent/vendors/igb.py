"""Intel 82576, I350 and their VFs (drivers/net/ethernet/intel/igb, igbvf); QEMU's igb is the 82576."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="igb",
    drivers=("igb", "igbvf"),
    queue_irqs=re.compile(r"-(?P<role>TxRx|rx|tx)-(?P<queue>\d+)$"),
    # igb_change_mtu and igb_enable_sriov both take the adapter down and up.
    mtu_flaps=True,
    # igb_msix_other reads what VFs send, and igb_close frees that interrupt.
    vfs_need_pf_up=True,
    # Seen in the lab.
    vfs_miss_carrier=True,
    vf_count_flaps=True,
    # igb_ndo_set_vf_mac, igb_ndo_set_vf_vlan and igb_ndo_set_vf_trust (igb_main.c) set registers or a flag, and tell no VF.
    vf_resets=(),
    # igb_set_channels closes and opens the netdev; igb_set_ringparam and igbvf_set_ringparam take it down and up.
    channels_flap=True,
    rings_flap=True,
    # REQ_RX_DESCRIPTOR_MULTIPLE and REQ_TX_DESCRIPTOR_MULTIPLE, in igbvf as well. The minimum is 80, in later kernels 64.
    ring_size=lambda size: (size + 7) // 8 * 8,
    # igb_set_features resets the adapter for these two only.
    offloads_flap=("rx-all", "rx-ntuple-filter"),
)
