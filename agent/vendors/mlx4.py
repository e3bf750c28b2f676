"""Mellanox ConnectX-3 and earlier, and their VFs. From the driver's source (drivers/net/ethernet/mellanox/mlx4): not run.

A card's ports are netdevs of one PCI function.
"""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="mlx4",
    drivers=("mlx4_core",),
    # mlx4-<vector>@<BDF> (mlx4_assign_eq in eq.c), before Linux 4.2 mlx4-comp-<vector>@pci:<BDF>; mlx4-async@pci:<BDF> is the
    # management one. A vector counts no queues: ring i has the vector with the number of its CPU, so the first may be 17
    # (mlx4_en_activate_cq in en_cq.c). So they are numbered in their order, the second port's after those of the first.
    queue_irqs=re.compile(r"^mlx4-(?:(?P<role>comp)-)?\d+@"),
)
