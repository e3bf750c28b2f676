"""NVIDIA (Mellanox) ConnectX-4 and later. From the driver's source and vendor documents: not run on such a NIC."""

import re

from agent.vendors import Vendor

VENDOR = Vendor(
    name="mlx5",
    drivers=("mlx5_core",),
    # drivers/net/ethernet/mellanox/mlx5/core/pci_irq.c names them mlx5_comp<q>@pci:<BDF> and mlx5_async<n>@pci:<BDF>.
    queue_irqs=re.compile(r"mlx5_(?P<role>comp)(?P<queue>\d+)@"),
    # A new set of channels is opened before the old one is closed (mlx5e_safe_switch_params).
    mtu_flaps=False,
    vf_count_flaps=False,
)
