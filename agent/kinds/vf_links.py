"""The netdevs of VFs: there, up, with their MTU."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from agent.change import Change, Disruption
from agent.kinds import functions_in_scope, links
from agent.machine import Machine
from agent.nics import Wanted, link_of
from agent.snapshot import Scope, Snapshot

NAME = "vf_links"
AFTER = ("bindings",)
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "function"

SETTLING = 5.0
"""Seconds that a VF's link may take to come up once its PF's is; the drivers' watchdogs look every two."""


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, links.LinkStatus]]:
    """The netdevs of each PF's VFs, by target."""
    return {
        address: {target: links.status(machine, vf) for target, vf in functions.items() if target != address}
        for address, functions in functions_in_scope(machine.files, want, scope).items()
    }


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The VFs' netdevs that differ."""
    changes: list[Change] = []
    for address, nic in links.usable(want, have):
        found: Mapping[str, links.LinkStatus] = have[NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            target, wanted = f"{address}#{index}", nic.vf(index)
            status = found.get(target)
            differing = links.plan_link(NAME, target, status, wanted.mtu, wanted.state)
            if status and not differing and _is_stuck(status, have[links.NAME][address][address]):
                flap = Change(NAME, target, "carrier", "lost", "up", Disruption.LINK_FLAP, patience=SETTLING)
                differing.append(flap)
            changes += [evolve(change, yields=wanted.owner != "trackbed") for change in differing]
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
