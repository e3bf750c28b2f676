"""NIC families: one frozen record a file, found by the driver's name."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from functools import cache

from attrs import frozen


def _as_asked(size: int) -> int:
    return size


@frozen
class Vendor:
    """What one family's drivers do that others do not.

    ``queue_irqs`` finds role and queue in the name of a queue's interrupt, by groups of these names; an interrupt whose
    name it does not find is a management one. ``mtu_flaps`` and ``vf_count_flaps``: the driver takes the PF's link down
    to change its MTU or its number of VFs, ``channels_flap`` and ``rings_flap``: a netdev's link for its channels or rings.
    ``ring_size``: the size that the driver makes of one that was asked for. ``offloads_flap``: the features for whose change it
    takes the link down; None: it may for any. ``trust_flaps``: it takes the link down to trust the DSCP or the PCP.
    ``has_netdev``: its functions bring netdevs of their own. ``invents_rate``: the rate of its RDMA ports means nothing.
    """

    name: str
    drivers: tuple[str, ...]
    queue_irqs: re.Pattern[str]
    mtu_flaps: bool = True
    vf_count_flaps: bool = True
    channels_flap: bool = True
    rings_flap: bool = True
    ring_size: Callable[[int], int] = _as_asked
    offloads_flap: tuple[str, ...] | None = None
    has_netdev: bool = True
    trust_flaps: bool = True
    invents_rate: bool = False


# `<netdev>-TxRx-3`, `<netdev>-rx-0`, `virtio3-input.0`: what most drivers call a queue's interrupt.
UNKNOWN = Vendor(
    name="unknown",
    drivers=(),
    queue_irqs=re.compile(r"[-.](?P<role>TxRx|Tx-Rx|rx|tx|input|output)[-.](?P<queue>\d+)$"),
)


@cache
def _by_driver() -> dict[str, Vendor]:
    records = (importlib.import_module(f"{__name__}.{module.name}").VENDOR for module in pkgutil.iter_modules(__path__))
    return {driver: record for record in records for driver in record.drivers}


def vendor(driver: str | None) -> Vendor:
    """The record of the family that ``driver`` belongs to, or one that assumes the worst."""
    return _by_driver().get(driver or "", UNKNOWN)
