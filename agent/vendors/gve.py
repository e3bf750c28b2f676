"""Google Virtual NIC. From the driver's source (drivers/net/ethernet/google/gve): not run on such an instance."""

import re

from agent.vendors import Vendor


def _queue(role: str, number: int, named: int) -> tuple[str, int]:
    # The first half of the blocks are for transmit queues, the second for receive queues (gve_tx_idx_to_ntfy,
    # gve_rx_idx_to_ntfy in gve.h). All are requested, whatever the number of channels is (gve_alloc_notify_blocks).
    half = named // 2
    return ("tx", number) if number < half else ("rx", number - half)


VENDOR = Vendor(
    name="gve",
    # gvnic is its name in older kernels.
    drivers=("gve", "gvnic"),
    # gve-ntfy-blk<n>@pci:<BDF>, in older kernels <netdev>-ntfy-block.<n> (gve_alloc_notify_blocks in gve_main.c);
    # gve-mgmnt@pci:<BDF> is the management one.
    queue_irqs=re.compile(r"-ntfy-(?P<role>blk|block\.)(?P<queue>\d+)(?:@|$)"),
    queue=_queue,
)
