"""Driver families: how the drivers of one NIC family behave. Each family is a row of FAMILIES."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from attrs import frozen

VFIO = "vfio-pci"
XEN = "pciback"

# `<netdev>-TxRx-3`, `<netdev>-rx-0`, `virtio3-input.0`: the names that most drivers give to the interrupts of queues. vmxnet3
# and nfp have rxtx, tg3 has txrx, bnx2x and qede fp; idpf, hns3 and fbnic have Rx and Tx if there are more queues of one kind.
# `i40e-<address>:fdir-TxRx-0` and `ice-<address>:ctrl-TxRx-0` serve no queue of the netdev (i40e_vsi_open in i40e_main.c,
# ice_vsi_open_ctrl in ice_main.c). Intel's own ice has `ice-<netdev>-TxRx-2-3` if two queues share an interrupt.
# RDMA's completion vectors are irdma-<address>-CEQ-<n>, in older kernels all CEQ (irdma_cfg_ceq_vector in irdma/hw.c), and
# hns-<address>-ceq-<n> or hns-ceq-<n> (__hns_roce_request_irq in hns_roce_hw_v2.c).
USUAL = re.compile(
    r"(?:^|(?<!:fdir)(?<!:ctrl)[-.])(?P<role>txrx|tx-rx|rxtx|rx|tx|fp|input|output|ceq)"
    r"(?:[-.](?P<queue>\d+)(?:-\d+)?$|(?<=^ceq)$)",
    re.IGNORECASE,
)

# ice and i40e reset the VF to set each of these (ice_set_vf_mac, ice_set_vf_trust, ice_set_vf_port_vlan in ice_sriov.c;
# i40e_ndo_set_vf_mac, i40e_ndo_set_vf_trust, i40e_ndo_set_vf_port_vlan in i40e_virtchnl_pf.c). The VF's RDMA device goes, too.
VF_RESETS = ("mac", "vlan", "qos", "vlan_protocol", "trust")

# A NIC's aggregation of packets, and the features that it depends on: with these the kernel or the driver turns it off and on
# (netdev_fix_features in net/core/dev.c, bnxt_fix_features, qede_fix_features, ixgbe_fix_features).
AGGREGATION = ("rx-checksum", "rx-fcs", "rx-gro", "rx-gro-hw", "rx-lro")


@frozen
class DriverFamily:
    """How the drivers of one NIC family behave. The defaults are the worst case.

    ``queue_irqs``: matches the name of a queue's interrupt, with the groups ``role`` and ``queue``; any other interrupt is
    a management interrupt. Without the group ``queue``, or where it matches nothing, the interrupts of a role are numbered
    in their order. ``queue``: the role and the queue of an interrupt with this role and number, among so many of them; None
    if it serves none. ``mtu_flaps``, ``vf_count_flaps``: the driver takes the PF's link down to change its MTU or its
    number of VFs. ``first_vfs_end_lag``: it gives up RoCE LAG for the first VFs of a port, and with it the RDMA device of
    the bond. ``channels_flap``, ``rings_flap``: it takes a netdev's link down to change its channels or rings.
    ``coalescing_flaps``: it does so for some changes of coalescing. ``ring_size``: the ring size that the driver sets, or takes
    instead of a requested one. ``offloads_flap``: the features for which it takes the link down; None: possibly for any.
    ``trust_flaps``, ``pfc_flaps``: it takes the link down, or closes the netdev's queues, to change the trust mode (DSCP or
    PCP), or the priorities with PFC; ice does for both (ice_pf_dcb_cfg).
    ``vf_resets``: the attributes of a VF for which the PF's driver resets the VF, or the VF's driver resets itself.
    ``vfs_need_pf_up``: a VF's driver takes its address from the PF only while the PF is up (known only for igb).
    ``vfs_miss_carrier``: a VF that comes up while its PF is being reset has no carrier until it is set down and up (known
    only for igb). ``has_netdev``: its functions have netdevs of their own. ``pfs_only_for_vfs``: those with SR-IOV have one
    only while they have VFs, to configure these. ``invents_rate``: the rate that its RDMA ports report is not real.
    ``paired_queues``: there may be twice as many receive queues as channels; the second half get no packets by themselves.
    ``unclassified``: the PCI IDs of functions whose PCI class does not say that they are network controllers.
    """

    drivers: tuple[str, ...]
    queue_irqs: re.Pattern[str] = USUAL
    queue: Callable[[str, int, int], tuple[str, int] | None] = lambda role, number, named: (role, number)
    mtu_flaps: bool = True
    vf_count_flaps: bool = True
    first_vfs_end_lag: bool = False
    channels_flap: bool = True
    rings_flap: bool = True
    coalescing_flaps: bool = False
    ring_size: Callable[[int], int] = lambda size: size
    offloads_flap: tuple[str, ...] | None = None
    vf_resets: tuple[str, ...] = VF_RESETS
    vfs_need_pf_up: bool = False
    vfs_miss_carrier: bool = False
    has_netdev: bool = True
    pfs_only_for_vfs: bool = False
    trust_flaps: bool = True
    pfc_flaps: bool = True
    invents_rate: bool = False
    paired_queues: bool = False
    unclassified: tuple[str, ...] = ()

    def creates_netdev(self, total_vfs: int) -> bool:
        """Whether a function has a netdev that passes packets. ``total_vfs``: how many VFs it can have."""
        return self.has_netdev and not (self.pfs_only_for_vfs and total_vfs)


UNKNOWN = DriverFamily(drivers=())


@cache
def _by_driver() -> dict[str, DriverFamily]:
    return {driver: family for family in FAMILIES for driver in family.drivers}


@cache
def unclassified() -> frozenset[str]:
    """The PCI IDs (``1ded:107f``) of all network controllers whose PCI class does not say what they are."""
    return frozenset(pci_id for family in FAMILIES for pci_id in family.unclassified)


def family_of(driver: str | None) -> DriverFamily:
    """The family that ``driver`` belongs to, or the worst case for an unknown driver."""
    return _by_driver().get(VFIO if is_vfio(driver) else driver or "", UNKNOWN)


def is_vfio(driver: str | None) -> bool:
    """Whether it is vfio-pci, or one of its variants for a family (mlx5_vfio_pci, hisi_acc_vfio_pci; drivers/vfio/pci)."""
    return driver is not None and "vfio" in driver


def is_passed_through(driver: str | None) -> bool:
    """Whether a driver passes a function through to a process or a virtual machine, or keeps other drivers from it."""
    return family_of(driver) is family_of(VFIO)


def _multiple_of(step: int) -> Callable[[int], int]:
    return lambda size: (size + step - 1) // step * step


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _power_of_2_below(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _gve_queue(role: str, number: int, named: int) -> tuple[str, int]:
    # The first half of the blocks are for transmit queues, the second for receive queues (gve_tx_idx_to_ntfy,
    # gve_rx_idx_to_ntfy in gve.h). All are requested, whatever the number of channels is (gve_alloc_notify_blocks).
    half = named // 2
    return ("tx", number) if number < half else ("rx", number - half)


def _mana_queue(role: str, number: int, named: int) -> tuple[str, int] | None:
    # mana_gd_get_gic counts vectors. Vector 0 is that of the management channel, and queue i has vector i + 1 (mana_create_eq).
    if role == "q":
        return role, number
    return (role.replace("msi", "q"), number - 1) if number else None


FAMILIES: tuple[DriverFamily, ...] = (
    # Marvell (Aquantia) AQtion. From the driver's source (drivers/net/ethernet/aquantia/atlantic): not run on such a NIC.
    DriverFamily(
        drivers=("atlantic",),
        # All are named after the netdev (aq_nic_start in aq_nic.c). Those of the queues come first; those of PTP and of the
        # link's state cannot be told from them, and are numbered like queues.
        queue_irqs=re.compile(r"^(?P<role>)"),
        # AQ_HW_RXD_MULTIPLE, AQ_HW_TXD_MULTIPLE.
        ring_size=_multiple_of(8),
    ),
    # Emulex OneConnect, and Marvell's Octeon as an end point, with its VFs. From the drivers' source (drivers/net/ethernet:
    # emulex/benet, marvell/octeon_ep, marvell/octeon_ep_vf): not run on such NICs.
    DriverFamily(
        drivers=("be2net", "octeon_ep", "octeon_ep_vf"),
        # <netdev>-q<n> (be_msix_register in be_main.c, octep_request_irqs in octep_main.c). Those of RDMA are ocrdma<n>-<n>
        # (ocrdma_create_eqs in ocrdma_hw.c).
        queue_irqs=re.compile(r"-(?P<role>q)(?P<queue>\d+)$"),
    ),
    # Broadcom NetXtreme-C and -E. From the driver's source (drivers/net/ethernet/broadcom/bnxt): not run on such a NIC.
    DriverFamily(
        drivers=("bnxt_en",),
        # <netdev>-TxRx-3, or <netdev>-rx-3 and <netdev>-tx-9 (bnxt_setup_msix). In Linux 6.10 and earlier a name has at most 17
        # characters (struct bnxt_irq): with a netdev such as enp65s0f0np0 the number is cut off, and perhaps a part of TxRx.
        # The driver takes the interrupts in the order of the queues.
        # RDMA's completion vectors are bnxt_re-nq-<n>@pci:<BDF> (bnxt_qplib_nq_start_irq in bnxt_re/qplib_fp.c).
        queue_irqs=re.compile(r"-(?P<role>T(?:x(?:Rx?)?)?|[rt]x?|nq)(?:-\d*)?(?:$|(?<=\d)@)"),
        # For a DSCP only the firmware is told (bnxt_hwrm_queue_dscp2pri_cfg in bnxt_dcb.c). For PFC the driver may close and
        # open the netdev's queues (bnxt_queue_remap).
        trust_flaps=False,
        # bnxt_set_features in bnxt.c.
        offloads_flap=(*AGGREGATION, "rx-ntuple-filter", "rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"),
    ),
    # Cisco VIC. From the driver's source (drivers/net/ethernet/cisco/enic): not run on such a NIC. enic_set_ringparam;
    # ENIC_MIN_RQ_DESCS.
    DriverFamily(drivers=("enic",), ring_size=lambda size: max(64, size // 32 * 32)),
    # Chelsio T4 and later, and their VFs. From the driver's source (drivers/net/ethernet/chelsio): not run on such a NIC.
    # A card's ports are netdevs of one PCI function, and each port's names count from 0. The driver takes the interrupts in
    # the order of the ports (setup_sge_queues in cxgb4_main.c, name_msix_vecs in cxgb4vf_main.c), so they are numbered in
    # their order: first the queues of the first port, then those of the next.
    DriverFamily(
        drivers=("cxgb4", "cxgb4vf"),
        # <netdev>-Rx<n>, of VFs <netdev>-<n>.
        # <netdev>-FWeventq, <netdev>-eorxq<n> and <netdev>-<driver><n> of RDMA, iSCSI and crypto serve no queue of the netdev.
        queue_irqs=re.compile(r"-(?P<role>Rx)?\d+$"),
        # PF 4 has the ports' netdevs and no SR-IOV. A netdev of PF 0 to 3 (mgmtpf<n>,<n>) comes with the first VF and goes with
        # the last one (cxgb4_iov_configure). It passes no packets, and the ports' netdevs stay up meanwhile.
        pfs_only_for_vfs=True,
        vf_count_flaps=False,
        # The firmware is told (cxgb_change_mtu, cxgb_set_features, cxgb4vf_change_mtu). Once a port was up, rings cannot be
        # changed (EBUSY from set_sge_param in cxgb4_ethtool.c), and the number of channels never can.
        mtu_flaps=False,
        channels_flap=False,
        rings_flap=False,
        offloads_flap=(),
    ),
    # AWS's Elastic Network Adapter. From the driver's source (drivers/net/ethernet/amazon/ena): not run on such an instance.
    DriverFamily(
        drivers=("ena",),
        # The device is told (ena_change_mtu in ena_netdev.c). It has no ndo_set_features.
        mtu_flaps=False,
        offloads_flap=(),
        # ENA_MIN_RING_SIZE, and a power of two that is not larger (ena_set_ringparam in ena_ethtool.c).
        ring_size=lambda size: max(256, _power_of_2_below(size)),
    ),
    # AWS's Elastic Fabric Adapter. From the driver's source (drivers/infiniband/hw/efa), not run on such an instance.
    DriverFamily(
        drivers=("efa",),
        # efa-comp<n>@pci:<BDF> are the completion queues' interrupts (efa_setup_comp_irq in efa_main.c); efa-mgmnt@pci:<BDF> is
        # the management one.
        queue_irqs=re.compile(r"^efa-(?P<role>comp)(?P<queue>\d+)@"),
        # The instance's network is ENA's, a PCI function of its own.
        has_netdev=False,
        invents_rate=True,  # 4X EDR (efa_query_port)
    ),
    # Alibaba Cloud eRDMA. From the source of the in-tree driver (drivers/infiniband/hw/erdma), not run on such an instance.
    DriverFamily(
        drivers=("erdma",),
        # erdma-ceq<n>@pci:<BDF> are the completion queues' interrupts, erdma-common@pci:<BDF> is the management one.
        queue_irqs=re.compile(r"erdma-(?P<role>ceq)(?P<queue>\d+)@"),
        # Instances are seen with the class of a network controller and with class 00ff
        # (https://github.com/kubernetes-sigs/dranet/issues/228).
        unclassified=("1ded:107f",),
        # It uses the netdev of the elastic network interface with the same permanent address.
        has_netdev=False,
        # The out-of-tree driver reports a constant, the in-tree one the netdev's rate. Neither is the rate of eRDMA.
        invents_rate=True,
    ),
    # Google Virtual NIC. From the driver's source (drivers/net/ethernet/google/gve): not run on such an instance.
    DriverFamily(
        # gvnic is its name in older kernels.
        drivers=("gve", "gvnic"),
        # gve-ntfy-blk<n>@pci:<BDF>, in older kernels <netdev>-ntfy-block.<n> (gve_alloc_notify_blocks in gve_main.c);
        # gve-mgmnt@pci:<BDF> is the management one.
        queue_irqs=re.compile(r"-ntfy-(?P<role>blk|block\.)(?P<queue>\d+)(?:@|$)"),
        queue=_gve_queue,
        # It has no ndo_change_mtu; gve_set_features in gve_main.c.
        mtu_flaps=False,
        offloads_flap=AGGREGATION,
        # It refuses others (gve_validate_req_ring_size in gve_ethtool.c).
        ring_size=_power_of_2,
    ),
    # Omni-Path. From the driver's source (drivers/infiniband/hw/hfi1): not run on such a NIC.
    DriverFamily(
        drivers=("hfi1", "hfi2"),
        # hfi1_0 sdma3, hfi1_0 kctxt5, and hfi1_0 nd kctxt160 of the netdev (msix.c); hfi1_0 is the management one.
        queue_irqs=re.compile(r"^hfi\d_\d+ (?:nd )?(?P<role>sdma|kctxt)(?P<queue>\d+)$"),
    ),
    # Huawei's NICs. From the drivers' source (drivers/net/ethernet/huawei/hinic, hinic3): not run on such a NIC.
    DriverFamily(
        drivers=("hinic", "hinic3"),
        # <netdev>_rxq<n> and <netdev>_txq<n> (hinic_init_rxq in hinic_rx.c, hinic_init_txq in hinic_tx.c), of hinic3
        # <netdev>_qp<n> (hinic3_irq.c). hinic_aeq<n>@pci:<BDF> and hinic_ceq<n>@pci:<BDF> are those of events.
        queue_irqs=re.compile(r"_(?P<role>rxq|txq|qp)(?P<queue>\d+)$"),
        mtu_flaps=False,  # the firmware is told (hinic_change_mtu in hinic_main.c)
        # hinic_set_ringparam in hinic_ethtool.c, hinic3_set_ringparam in hinic3_ethtool.c.
        ring_size=_power_of_2_below,
    ),
    # Intel 82576, I350 and their VFs (drivers/net/ethernet/intel/igb, igbvf); QEMU's igb is the 82576.
    DriverFamily(
        drivers=("igb", "igbvf"),
        queue_irqs=re.compile(r"-(?P<role>TxRx|rx|tx)-(?P<queue>\d+)$"),
        # As by default, igb_change_mtu, igb_enable_sriov, igb_set_channels, igb_set_ringparam and igbvf_set_ringparam take the
        # netdev down and up.
        # igb_msix_other reads what VFs send, and igb_close frees that interrupt.
        vfs_need_pf_up=True,
        # Seen in the lab.
        vfs_miss_carrier=True,
        # igb_ndo_set_vf_mac, igb_ndo_set_vf_vlan and igb_ndo_set_vf_trust (igb_main.c) set registers or a flag, and tell no VF.
        vf_resets=(),
        # REQ_RX_DESCRIPTOR_MULTIPLE and REQ_TX_DESCRIPTOR_MULTIPLE, in igbvf as well. The minimum is 80, in later kernels 64.
        ring_size=_multiple_of(8),
        # igb_set_features resets the adapter for these two only.
        offloads_flap=("rx-all", "rx-ntuple-filter"),
    ),
    # Intel E810, X710 and their VFs. From the drivers' source (drivers/net/ethernet/intel: ice, i40e, iavf): not run on them.
    # ICE_REQ_DESC_MULTIPLE and its like; ice_set_features, i40e_set_features, iavf_set_features. i40e resets the PF for VFs.
    DriverFamily(
        drivers=("ice",), vf_count_flaps=False, ring_size=_multiple_of(32), offloads_flap=("loopback", "rx-fcs")
    ),
    DriverFamily(
        drivers=("i40e", "iavf"),
        ring_size=_multiple_of(32),
        offloads_flap=("l2-fwd-offload", "loopback", "rx-fcs", "rx-ntuple-filter"),
    ),
    # Intel 82599, X540, X550 and their VFs. From the drivers' source (drivers/net/ethernet/intel: ixgbe, ixgbevf): not run.
    DriverFamily(
        drivers=("ixgbe",),
        # IXGBE_REQ_TX_DESCRIPTOR_MULTIPLE, in ixgbevf as well.
        ring_size=_multiple_of(8),
        # ixgbe_set_coalesce resets the NIC if LRO or the write-back of descriptors has to change with the usecs.
        coalescing_flaps=True,
        vf_resets=("trust",),  # ixgbe_ndo_set_vf_trust
        # ixgbe_set_features; ixgbevf has no ndo_set_features.
        offloads_flap=(*AGGREGATION, "hw-tc-offload", "l2-fwd-offload", "rx-all", "rx-ntuple-filter"),
    ),
    DriverFamily(drivers=("ixgbevf",), ring_size=_multiple_of(8), offloads_flap=()),
    # HiSilicon's NICs. From the driver's source (drivers/net/ethernet/hisilicon/hns3): not run. HNS3_RING_BD_MULTIPLE;
    # hns3_pci_sriov_configure tells only the kernel, and hns3_nic_set_features sets registers. A VF resets itself for an
    # address, and takes its netdev down for a VLAN (hclge_set_vf_mac, hclge_set_vf_vlan_filter).
    DriverFamily(
        drivers=("hns3",),
        vf_count_flaps=False,
        ring_size=_multiple_of(8),
        offloads_flap=(),
        vf_resets=("mac", "vlan", "qos", "vlan_protocol"),
    ),
    # Intel IPU. From the driver's source (drivers/net/ethernet/intel/idpf): not run. IDPF_REQ_RXQ_DESC_MULTIPLE, of which half
    # would do for transmit rings; idpf_set_features.
    DriverFamily(drivers=("idpf",), ring_size=_multiple_of(64), offloads_flap=AGGREGATION),
    # Marvell FastLinQ. From the drivers' source (drivers/net/ethernet/qlogic: qede, qed): not run. qed_sriov_configure leaves
    # the PF's link alone; qede_set_features.
    DriverFamily(drivers=("qede",), vf_count_flaps=False, offloads_flap=AGGREGATION),
    # AMD Pensando. From the driver's source (drivers/net/ethernet/pensando/ionic): not run on such a NIC.
    DriverFamily(
        drivers=("ionic",),
        # ionic-<netdev>-L0-rx3 (ionic_request_irq, ionic_q_init). The transmit queue of the same number shares it, unless it
        # has an interrupt of its own. Queues of the driver itself are called L0-adminq0 or L0-hwstamp_tx4.
        queue_irqs=re.compile(r"-L\d+-(?P<role>rx|tx)(?P<queue>\d+)$"),
        # ionic_sriov_configure leaves the PF alone, and ionic_set_features tells the firmware.
        vf_count_flaps=False,
        offloads_flap=(),
        # It refuses others (ionic_set_ringparam in ionic_ethtool.c).
        ring_size=_power_of_2,
    ),
    # Netronome. From the driver's source (drivers/net/ethernet/netronome/nfp): not run on such a NIC. nfp_net_set_ringparam.
    DriverFamily(drivers=("nfp",), ring_size=_power_of_2),
    # Microsoft Azure Network Adapter. From the driver's source (drivers/net/ethernet/microsoft/mana): not run there.
    DriverFamily(
        drivers=("mana",),
        # mana_q<n>@pci:<BDF> (mana_gd_setup_irqs), in later kernels mana_msi<n>@pci:<BDF> (mana_gd_get_gic, gdma_main.c);
        # mana_hwc@pci:<BDF> is the management one. Older kernels call all of them mana_intr, in the order of the vectors.
        queue_irqs=re.compile(r"^mana_(?:(?P<role>q|msi)(?P<queue>\d+)@|intr$)"),
        queue=_mana_queue,
        offloads_flap=(),  # it has no ndo_set_features
        invents_rate=True,  # 4X EDR (mana_ib_query_port)
        ring_size=_power_of_2,  # mana_set_ringparam
    ),
    # Mellanox ConnectX-3 and earlier, and their VFs. From the driver's source (drivers/net/ethernet/mellanox/mlx4): not run.
    # A card's ports are netdevs of one PCI function.
    DriverFamily(
        drivers=("mlx4_core",),
        # mlx4-<vector>@<BDF> (mlx4_assign_eq in eq.c), before Linux 4.2 mlx4-comp-<vector>@pci:<BDF>; mlx4-async@pci:<BDF> is
        # the management one. A vector counts no queues: ring i has the vector with the number of its CPU, so the first may be
        # 17 (mlx4_en_activate_cq in en_cq.c). So they are numbered in their order, the second port's after those of the first.
        queue_irqs=re.compile(r"^mlx4-(?:(?P<role>comp)-)?\d+@"),
        # Only the firmware is told (mlx4_en_dcbnl_ieee_setpfc in en_dcb_nl.c). The driver trusts no DSCPs.
        pfc_flaps=False,
        ring_size=_power_of_2,  # mlx4_en_set_ringparam
        # mlx4_en_set_features in en_netdev.c.
        offloads_flap=("rx-fcs", "rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"),
    ),
    # NVIDIA (Mellanox) ConnectX-4 and later. From the driver's source and vendor documents: not run on such a NIC.
    DriverFamily(
        drivers=("mlx5_core",),
        # mlx5_comp<q>@pci:<BDF> and mlx5_async<n>@pci:<BDF>; mlx5_combined0@pci:<BDF> is the only one of a function with one
        # vector (irq_set_name in pci_irq.c, since Linux 5.16).
        queue_irqs=re.compile(r"mlx5_(?P<role>comp|combined)(?P<queue>\d+)@"),
        # Before Linux 6.1 there are as many receive queues again, for AF_XDP only (rq_groups in mlx5e_update_netdev_queues,
        # en_main.c).
        paired_queues=True,
        # A new set of channels is opened before the old one is closed (mlx5e_safe_switch_params).
        mtu_flaps=False,
        vf_count_flaps=False,
        # The first VFs of a port end RoCE LAG (mlx5_eswitch_enable in eswitch.c; mlx5_lag_check_prereq, mlx5_disable_lag in
        # lag/lag.c): instead of mlx5_bond_0 each port gets a device of its own. Without VFs the ports have LAG again: in older
        # kernels at once (mlx5_eswitch_disable), in later ones with the next event of the bond. In switchdev mode VFs leave LAG
        # as it is, but the agent does not read the mode.
        first_vfs_end_lag=True,
        # The E-Switch is told, and no VF (mlx5_eswitch_set_vport_mac, mlx5_eswitch_set_vport_vlan,
        # mlx5_eswitch_set_vport_trust).
        vf_resets=(),
        channels_flap=False,
        rings_flap=False,
        # The driver keeps both sizes as a power of two (order_base_2 in mlx5e_ethtool_set_ringparam).
        ring_size=_power_of_2,
        offloads_flap=(),
        # The trust mode is changed without closing channels, too (mlx5e_set_trust_state). PFC takes the port down for a moment
        # (mlx5_toggle_port_link in mlx5e_dcbnl_ieee_setpfc, en_dcbnl.c).
        trust_flaps=False,
    ),
    # Drivers that pass a function through to a process or a virtual machine, or keep other drivers from it.
    # Documentation/driver-api/vfio.rst, drivers/pci/pci-stub.c, drivers/xen/xen-pciback (its driver is called pciback).
    DriverFamily(drivers=(VFIO, "uio_pci_generic", "igb_uio", "pci-stub", XEN), has_netdev=False),
    # AMD (Solarflare) NICs. From the driver's source (drivers/net/ethernet/sfc): not run on such a NIC.
    DriverFamily(
        drivers=("sfc", "sfc_ef100", "sfc_siena", "sfc_falcon"),
        # <netdev>-<n>, with channels of their own for each direction <netdev>-rx-<n> and <netdev>-tx-<n>; <netdev>-xdp-<n> is
        # for what XDP sends (efx_get_channel_name in efx_channels.c). <netdev>-ptp and <netdev>-mae serve no queue.
        queue_irqs=re.compile(r"-(?:(?P<role>rx|tx|xdp)-)?(?P<queue>\d+)$"),
        # efx_set_features in efx_common.c changes filters only.
        offloads_flap=(),
    ),
    # PCI drivers that create a vDPA device for a function instead of a netdev. From the kernel's source (drivers/vdpa): not
    # run. pds_core is the PCI driver of the VFs that pds_vdpa uses (drivers/net/ethernet/amd/pds_core).
    DriverFamily(
        drivers=("ifcvf", "vp-vdpa", "octep_vdpa", "alibaba-eni-vdpa", "snet-vdpa-driver", "pds_core"),
        has_netdev=False,
    ),
    # virtio-net (drivers/net/virtio_net.c). Its netdev's parent is a device on the virtio bus, below the PCI function.
    DriverFamily(drivers=("virtio-pci",), has_netdev=False),
)
