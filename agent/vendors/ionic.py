"""AMD Pensando. From the driver's source (drivers/net/ethernet/pensando/ionic): not run on such a NIC."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="ionic",
    drivers=("ionic",),
    # ionic-<netdev>-L0-rx3 (ionic_request_irq, ionic_q_init). The transmit queue of the same number shares it, unless it has an
    # interrupt of its own. Queues of the driver itself are called L0-adminq0 or L0-hwstamp_tx4.
    queue_irqs=re.compile(r"-L\d+-(?P<role>rx|tx)(?P<queue>\d+)$"),
)
