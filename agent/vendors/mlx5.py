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
    # The first VFs of a port end RoCE LAG (mlx5_eswitch_enable in eswitch.c; mlx5_lag_check_prereq, mlx5_disable_lag in
    # lag/lag.c): instead of mlx5_bond_0 each port gets a device of its own. Without VFs the ports have LAG again: in older
    # kernels at once (mlx5_eswitch_disable), in later ones with the next event of the bond. In switchdev mode VFs leave LAG as
    # it is, but the agent does not read the mode.
    first_vfs_end_lag=True,
    # The E-Switch is told, and no VF (mlx5_eswitch_set_vport_mac, mlx5_eswitch_set_vport_vlan, mlx5_eswitch_set_vport_trust).
    vf_resets=(),
    channels_flap=False,
    rings_flap=False,
    # The driver keeps both sizes as a power of two (order_base_2 in mlx5e_ethtool_set_ringparam).
    ring_size=lambda size: 1 << (size - 1).bit_length(),
    offloads_flap=(),
    # The trust mode is changed without closing channels, too (mlx5e_set_trust_state). PFC takes the port down for a moment.
    trust_flaps=False,
)
