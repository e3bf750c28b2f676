"""What a PF grants each of its VFs: address, VLAN, trust, rates, link state.

GUIDs (InfiniBand) are told by Linux 5.5 and later. From vendor documents: not run on an InfiniBand NIC.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from agent.hardware.functions import ifindex_of, link_of, netdev, netdev_of
from agent.kinds import Reading, links, vfs
from agent.machine import Machine, VfInfo
from agent.report.records import Change, Value
from agent.spec.nic import VfAttributes
from agent.state.scope import Scope, pfs_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "vf_attributes"
AFTER = ("vfs",)
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "function"

FIELDS = (
    "mac",
    "vlan",
    "qos",
    "vlan_protocol",
    "trust",
    "spoofchk",
    "link_state",
    "max_tx_rate",
    "min_tx_rate",
    "rss_query",
    "node_guid",
    "port_guid",
)
# One attribute of the kernel's: whoever writes one of them writes them all.
TOGETHER = (frozenset({"vlan", "qos", "vlan_protocol"}), frozenset({"min_tx_rate", "max_tx_rate"}))


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[int, VfInfo]]:
    """Each PF's VFs by index, as the PF tells them; a PF without a netdev tells nothing and is left out."""
    found = {}
    for address in pfs_in_scope(want, scope):
        name = netdev(machine.files, address)
        link = machine.netlink.link(name) if name else None
        if link is not None:
            found[address] = {vf.index: vf for vf in link.vfs}
    return found


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Every attribute that the spec gives and the PF tells otherwise, also of VFs that are still to come."""
    changes = []
    for address, nic in links.usable(want, have):
        told: Mapping[int, VfInfo] = have[NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            wanted = nic.vf(index)
            for name in _in_order(wanted, told.get(index)):
                after: Value = getattr(wanted, name)
                before: Value = getattr(told[index], name) if index in told else None
                if after is not None and before != after:
                    skip_if_owned = wanted.owner != "trackbed"
                    change = Change(NAME, f"{address}#{index}", name, before, after, skip_if_owned=skip_if_owned)
                    changes.append(change if index in told else vfs.absent(change))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """What each VF is granted, but for its address."""
    found = []
    for address, nic in sorted(want.nics.items()):
        told: Mapping[int, VfInfo] = have[NAME].get(address, {})
        for index, vf in told.items():
            wanted = nic.vf_wanted(index)
            for name in FIELDS:
                value: Value = getattr(vf, name)
                if name != "mac" and value is not None:
                    given = getattr(wanted, name) is not None
                    found.append(Reading(f"{address}#{index}", name, value, given, skip_if_owned=True))
    return found


def _in_order(wanted: VfAttributes, told: VfInfo | None) -> tuple[str, ...]:
    """The fields as they are to be written: at no time may the smallest rate be above the largest one (EINVAL)."""
    if told is None or not wanted.max_tx_rate or wanted.max_tx_rate >= told.min_tx_rate:
        return FIELDS
    return tuple(sorted(FIELDS, key=lambda name: name == "max_tx_rate"))


def apply(machine: Machine, change: Change) -> None:
    """Set one attribute through the PF's netdev, together with what the PF tells of those that the kernel takes with it."""
    index = int(change.target.partition("#")[2])
    given: dict[str, Any] = {}
    for names in TOGETHER:
        if change.field in names:
            told = _told(machine, change.device, index)
            given = {name: getattr(told, name) for name in names}
    try:
        machine.netlink.set_vf(ifindex_of(machine.files, change.device), index, **{**given, change.field: change.after})
    except OSError as error:
        name = netdev_of(machine.files, change.device)
        raise OSError(*_explain(error, change, given.get("min_tx_rate", 0), name)) from error


def _told(machine: Machine, address: str, index: int) -> VfInfo:
    link = link_of(machine, address)
    told = next((vf for vf in link.vfs if vf.index == index), None)
    if told is None:
        raise FileNotFoundError(errno.ENOENT, f"{link.name} tells nothing of VF {index}; it is gone")
    return told


def _explain(error: OSError, change: Change, min_tx_rate: int, name: str) -> tuple[int, str]:
    if error.errno == errno.EPROTONOSUPPORT:
        return errno.EOPNOTSUPP, f"the driver of {name} puts VFs in VLANs of another protocol only"
    if error.errno == errno.EOPNOTSUPP:
        return errno.EOPNOTSUPP, f"the driver of {name} cannot set {change.field} of a VF"
    if error.errno == errno.EINVAL and change.field == "min_tx_rate" and change.after:
        # igb, ixgbe, qede and others answer so to any value but 0.
        return errno.EOPNOTSUPP, f"the driver of {name} grants no min_tx_rate, or not so much"
    if error.errno == errno.EINVAL and change.field == "max_tx_rate":
        if 0 < int(change.after or 0) < min_tx_rate:
            return errno.EINVAL, f"EINVAL: its min_tx_rate is {min_tx_rate}; give that, too"
        return errno.EINVAL, f"EINVAL: {name} has no link yet, or is slower than {change.after} Mbit/s"
    return error.errno or errno.EIO, error.strerror or str(error)
