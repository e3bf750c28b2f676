"""What a PF grants each of its VFs: address, VLAN, trust, spoof check."""

from __future__ import annotations

from collections.abc import Mapping

from agent.change import Change, Value
from agent.kinds import Reading, links, pfs_in_scope, vfs
from agent.machine import Machine, VfInfo
from agent.nics import Wanted, link_of, netdev
from agent.snapshot import Scope, Snapshot

NAME = "vf_attributes"
AFTER = ("vfs",)
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "function"

FIELDS = ("mac", "vlan", "trust", "spoofchk")


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
            for name in FIELDS:
                after: Value = getattr(wanted, name)
                before: Value = getattr(told[index], name) if index in told else None
                if after is not None and before != after:
                    yields = wanted.owner != "trackbed"
                    change = Change(NAME, f"{address}#{index}", name, before, after, yields=yields)
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
                    found.append(Reading(f"{address}#{index}", name, value, given, yields=True))
    return found


def apply(machine: Machine, change: Change) -> None:
    """Set one attribute through the PF's netdev."""
    link = link_of(machine, change.device)
    index = change.target.partition("#")[2]
    machine.netlink.set_vf(link.ifindex, int(index), **{change.field: change.after})  # type: ignore[arg-type]
