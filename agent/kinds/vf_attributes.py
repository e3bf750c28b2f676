"""The VF attributes that are set through the PF: MAC, VLAN, trust, rates, link state, GUIDs.

Linux reports GUIDs (InfiniBand) since 5.5. They were written from vendor documents, not run on an InfiniBand NIC.
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
OTHER_WRITERS = ("sriov-network-config-daemon", "libvirtd", "virtqemud", "NetworkManager")
# For its driver to take another MAC, a VF is bound again.
REMAKES_NETDEV = ("mac",)

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
# The kernel has one attribute for each of these groups, so its fields are written together.
TOGETHER = (frozenset({"vlan", "qos", "vlan_protocol"}), frozenset({"min_tx_rate", "max_tx_rate"}))


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[int, VfInfo]]:
    """Each PF's VFs by index, as the PF reports them. A PF without a netdev reports nothing and is left out."""
    reported = {}
    for address in pfs_in_scope(want, scope):
        name = netdev(machine.files, address)
        link = machine.netlink.link(name) if name else None
        if link is not None:
            reported[address] = {vf.index: vf for vf in link.vfs}
    return reported


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Every attribute that differs from what the PF reports, also for VFs that do not exist yet."""
    changes = []
    for address, nic in links.usable(want, have):
        reported: Mapping[int, VfInfo] = have[NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            wanted = nic.vf(index)
            for name in _in_order(wanted, reported.get(index)):
                after: Value = getattr(wanted, name)
                before: Value = getattr(reported[index], name) if index in reported else None
                if after is not None and before != after:
                    skip_if_owned = wanted.owner != "trackbed"
                    change = Change(NAME, f"{address}#{index}", name, before, after, skip_if_owned=skip_if_owned)
                    changes.append(change if index in reported else vfs.absent(change))
    return changes


def readings(want: Wanted, have: Snapshot) -> list[Reading]:
    """Each VF's attributes except its MAC, which is not restored."""
    values = []
    for address, nic in sorted(want.nics.items()):
        reported: Mapping[int, VfInfo] = have[NAME].get(address, {})
        for index, vf in reported.items():
            wanted = nic.vf_wanted(index)
            for name in FIELDS:
                value: Value = getattr(vf, name)
                if name != "mac" and value is not None:
                    given = getattr(wanted, name) is not None
                    values.append(Reading(f"{address}#{index}", name, value, given, skip_if_owned=True))
    return values


def _in_order(wanted: VfAttributes, reported: VfInfo | None) -> tuple[str, ...]:
    """The fields in the order of the writes. min_tx_rate may never exceed max_tx_rate on the way (EINVAL)."""
    if reported is None or not wanted.max_tx_rate or wanted.max_tx_rate >= reported.min_tx_rate:
        return FIELDS
    return tuple(sorted(FIELDS, key=lambda name: name == "max_tx_rate"))


def lifted_by(change: Change) -> str:
    """A VF that is not there comes with the number of VFs."""
    return vfs.NAME


def apply(machine: Machine, change: Change) -> None:
    """Set one attribute through the PF's netdev, with the present values of those that are written together with it."""
    index = int(change.target.partition("#")[2])
    given: dict[str, Any] = {}
    for names in TOGETHER:
        if change.field in names:
            reported = _reported(machine, change.device, index)
            given = {name: getattr(reported, name) for name in names}
    try:
        machine.netlink.set_vf(ifindex_of(machine.files, change.device), index, **{**given, change.field: change.after})
    except OSError as error:
        name = netdev_of(machine.files, change.device)
        raise OSError(*_explain(error, change, given.get("min_tx_rate", 0), name)) from error


def _reported(machine: Machine, address: str, index: int) -> VfInfo:
    link = link_of(machine, address)
    reported = next((vf for vf in link.vfs if vf.index == index), None)
    if reported is None:
        raise FileNotFoundError(errno.ENOENT, f"{link.name} reports no VF {index}; it is gone")
    return reported


def _explain(error: OSError, change: Change, min_tx_rate: int, name: str) -> tuple[int, str]:
    if error.errno == errno.EPROTONOSUPPORT:
        return errno.EOPNOTSUPP, f"the driver of {name} does not support this vlan_protocol"
    if error.errno == errno.EOPNOTSUPP:
        return errno.EOPNOTSUPP, f"the driver of {name} cannot set {change.field} of a VF"
    if error.errno == errno.EINVAL and change.field == "min_tx_rate" and change.after:
        # igb, ixgbe, qede and others return EINVAL for any value but 0.
        return (
            errno.EOPNOTSUPP,
            f"the driver of {name} does not support min_tx_rate, or not as much as {change.after} Mbit/s",
        )
    if error.errno == errno.EINVAL and change.field == "max_tx_rate":
        if 0 < change.number < min_tx_rate:
            return errno.EINVAL, f"EINVAL: its min_tx_rate is {min_tx_rate}; set that as well"
        return errno.EINVAL, f"EINVAL: {name} has no link yet, or is slower than {change.after} Mbit/s"
    return error.errno or errno.EIO, error.strerror or str(error)
