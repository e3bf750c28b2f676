"""The netdevs of VFs: there, up, with their MTU."""

from __future__ import annotations

from collections.abc import Mapping

from agent.change import Change, Disruption
from agent.kinds import in_scope, links, users
from agent.machine import Machine
from agent.nics import Wanted, link_of, vf_addresses
from agent.snapshot import Scope, Snapshot

NAME = "vf_links"
AFTER = ("bindings",)
UNKNOWN_UNTIL: tuple[str, ...] = ()

SETTLING = 5.0
"""Seconds that a VF's link may take to come up once its PF's is; the drivers' watchdogs look every two."""


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, links.LinkStatus]]:
    """The netdevs of each PF's VFs, by target."""
    return {
        address: {
            f"{address}#{index}": links.status(machine, vf)
            for index, vf in sorted(vf_addresses(machine.files, address).items())
        }
        for address in in_scope(want, scope)
    }


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The VFs' netdevs that differ."""
    changes: list[Change] = []
    for address, nic in links.usable(want, have):
        found: Mapping[str, links.LinkStatus] = have[NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            target, wanted = f"{address}#{index}", nic.vf(index)
            status = found.get(target)
            differing = links.plan_link(NAME, target, status, wanted.mtu, wanted.state, have)
            if status and not differing and _is_stuck(status, have[links.NAME][address][address]):
                victims = users.of(have, target)
                flap = Change(NAME, target, "carrier", "lost", "up", Disruption.LINK_FLAP, victims, patience=SETTLING)
                differing.append(flap)
            changes += differing
    return changes


def _is_stuck(vf: links.LinkStatus, pf: links.LinkStatus) -> bool:
    """A VF that came up while its PF was being reset stays without carrier until it is brought up again (igbvf)."""
    if vf.link is None or pf.link is None:
        return False
    return pf.link.carrier and vf.link.up and not vf.link.carrier


def apply(machine: Machine, change: Change) -> None:
    """Set a VF's netdev as :func:`links.apply` does; for its carrier, take it down and up."""
    if change.field != "carrier":
        links.apply(machine, change)
        return
    ifindex = link_of(machine, change.target).ifindex
    machine.netlink.set_link(ifindex, up=False)
    machine.netlink.set_link(ifindex, up=True)
