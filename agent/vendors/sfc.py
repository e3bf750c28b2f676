"""AMD (Solarflare) NICs. From the driver's source (drivers/net/ethernet/sfc): not run on such a NIC."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="sfc",
    drivers=("sfc", "sfc_ef100", "sfc_siena", "sfc_falcon"),
    # <netdev>-<n>, with channels of their own for each direction <netdev>-rx-<n> and <netdev>-tx-<n>; <netdev>-xdp-<n> is for
    # what XDP sends (efx_get_channel_name in efx_channels.c). <netdev>-ptp and <netdev>-mae serve no queue.
    queue_irqs=re.compile(r"-(?:(?P<role>rx|tx|xdp)-)?(?P<queue>\d+)$"),
)
