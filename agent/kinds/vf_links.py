"""The netdevs of VFs: there, up, with their MTU."""

from __future__ import annotations

from collections.abc import Mapping

from agent.change import Change
from agent.kinds import in_scope, links
from agent.machine import Machine
from agent.nics import Wanted, vf_addresses
from agent.snapshot import Scope, Snapshot

NAME = "vf_links"
AFTER = ("bindings",)
UNKNOWN_UNTIL: tuple[str, ...] = ()

apply = links.apply


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
            changes += links.plan_link(NAME, target, found.get(target), wanted.mtu, wanted.state, have)
    return changes
