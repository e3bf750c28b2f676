"""NIC families: one frozen record a file, found by the driver's name."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from functools import cache

from attrs import frozen


def _exact(size: int) -> int:
    return size


def _as_named(role: str, number: int, named: int) -> tuple[str, int] | None:
    return role, number


# ice and i40e reset the VF to set each of these (ice_set_vf_mac, ice_set_vf_trust, ice_set_vf_port_vlan in ice_sriov.c;
# i40e_ndo_set_vf_mac, i40e_ndo_set_vf_trust, i40e_ndo_set_vf_port_vlan in i40e_virtchnl_pf.c). The VF's RDMA device goes, too.
VF_RESETS = ("mac", "vlan", "qos", "vlan_protocol", "trust")


@frozen
class Vendor:
    """How the drivers of one NIC family behave. The defaults are the worst case.

    ``queue_irqs``: matches the name of a queue's interrupt, with the groups ``role`` and ``queue``; any other interrupt is a
    management interrupt. Without the group ``queue``, or where it matches nothing, the interrupts of a role are numbered in
    their order. ``queue``: the role and the queue of an interrupt with this role and number, among so many of them; None if it
    serves none. ``mtu_flaps``, ``vf_count_flaps``: the driver takes the PF's link down to change its MTU or its number of VFs.
    ``first_vfs_end_lag``: it gives up RoCE LAG for the first VFs of a port, and with it the RDMA device of the bond.
    ``channels_flap``, ``rings_flap``: it takes a netdev's link down to change its channels or rings. ``ring_size``: the ring
    size that the driver sets for a requested one. ``offloads_flap``: the features for which it takes the link down; None:
    possibly for any. ``trust_flaps``: it takes the link down to change the trust mode (DSCP or PCP). ``vf_resets``: the
    attributes of a VF for which the PF's driver resets the VF, or the VF's driver resets itself. ``vfs_need_pf_up``: a VF's
    driver takes its address from the PF only while the PF is up (known only for igb). ``vfs_miss_carrier``: a VF that comes up
    while its PF is being reset has no carrier until it is set down and up (known only for igb). ``has_netdev``: its functions
    have netdevs of their own. ``pfs_only_for_vfs``: those with SR-IOV have one only while they have VFs, to configure these.
    ``invents_rate``: the rate that its RDMA ports report is not real. ``unclassified``: the PCI IDs of functions whose PCI
    class does not say that they are network controllers.
    """

    name: str
    drivers: tuple[str, ...]
    queue_irqs: re.Pattern[str]
    queue: Callable[[str, int, int], tuple[str, int] | None] = _as_named
    mtu_flaps: bool = True
    vf_count_flaps: bool = True
    first_vfs_end_lag: bool = False
    channels_flap: bool = True
    rings_flap: bool = True
    ring_size: Callable[[int], int] = _exact
    offloads_flap: tuple[str, ...] | None = None
    vf_resets: tuple[str, ...] = VF_RESETS
    vfs_need_pf_up: bool = False
    vfs_miss_carrier: bool = False
    has_netdev: bool = True
    pfs_only_for_vfs: bool = False
    trust_flaps: bool = True
    invents_rate: bool = False
    unclassified: tuple[str, ...] = ()

    def creates_netdev(self, total_vfs: int) -> bool:
        """Whether a function has a netdev that passes packets. ``total_vfs``: how many VFs it can have."""
        return self.has_netdev and not (self.pfs_only_for_vfs and total_vfs)


# `<netdev>-TxRx-3`, `<netdev>-rx-0`, `virtio3-input.0`: the names that most drivers give to the interrupts of queues. vmxnet3
# and nfp have rxtx, tg3 has txrx, bnx2x and qede fp. `i40e-<address>:fdir-TxRx-0` and `ice-<address>:ctrl-TxRx-0` serve no
# queue of the netdev (i40e_vsi_open in i40e_main.c, ice_vsi_open_ctrl in ice_main.c).
UNKNOWN = Vendor(
    name="unknown",
    drivers=(),
    queue_irqs=re.compile(
        r"(?<!:fdir)(?<!:ctrl)[-.](?P<role>TxRx|Tx-Rx|rxtx|txrx|rx|tx|fp|input|output)[-.](?P<queue>\d+)$"
    ),
)


VFIO = "vfio-pci"


def is_vfio(driver: str | None) -> bool:
    """Whether it is vfio-pci, or one of its variants for a family (mlx5_vfio_pci, hisi_acc_vfio_pci; drivers/vfio/pci)."""
    return driver is not None and "vfio" in driver


@cache
def _records() -> tuple[Vendor, ...]:
    return tuple(importlib.import_module(f"{__name__}.{each.name}").VENDOR for each in pkgutil.iter_modules(__path__))


@cache
def _by_driver() -> dict[str, Vendor]:
    return {driver: record for record in _records() for driver in record.drivers}


@cache
def unclassified() -> frozenset[str]:
    """The PCI IDs (``1ded:107f``) of all network controllers whose PCI class does not say what they are."""
    return frozenset(pci_id for record in _records() for pci_id in record.unclassified)


def vendor(driver: str | None) -> Vendor:
    """The record of the family that ``driver`` belongs to, or the worst case for an unknown driver."""
    return _by_driver().get(VFIO if is_vfio(driver) else driver or "", UNKNOWN)


def is_passed_through(driver: str | None) -> bool:
    """Whether a driver passes a function through to a process or a virtual machine, or keeps other drivers from it."""
    return vendor(driver) is vendor(VFIO)
