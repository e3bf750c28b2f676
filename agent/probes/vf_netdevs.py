"""The driver of each VF has created a netdev, and the agent can see in which network namespace that is.

A driver may be bound without one: iavf creates it only when the PF has answered. While a network namespace ends, its netdevs
are in none for a moment. So a netdev may be away for :data:`GRACE`. Where no other namespace can be searched (before Linux
5.2), a netdev that the host does not see counts as being in one.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from agent.kinds import links, vf_links
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault, Severity, Stage
from agent.report.target import device_of
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "VfNetdevs"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # it may be in a network namespace that the agent cannot enter, and serve a container there

MISSING = "NetdevMissing"
GRACE = 30.0
"""Seconds within which a driver creates its netdev, and a netdev comes back from a network namespace that ends."""


@frozen
class Presence:
    """When a VF was last read, and when it last had a netdev, or no driver that should create one (or was first read)."""

    read: float
    whole: float

    @property
    def lacks(self) -> bool:
        """Whether it lacks its netdev, and that will not come by itself."""
        return self.read - self.whole >= GRACE


def remember(before: Mapping[str, Presence] | None, now: float, have: Snapshot, facts: None) -> dict[str, Presence]:
    """The presence of each VF's netdev, by target."""
    known = before or {}
    statuses: Mapping[str, Mapping[str, links.LinkStatus]] = have[vf_links.NAME]
    return {
        target: evolve(known.get(target, Presence(now, now)), read=now) if status.missing else Presence(now, now)
        for of_pf in statuses.values()
        for target, status in of_pf.items()
    }


def judge(want: Wanted, have: Snapshot, facts: Mapping[str, Presence]) -> list[Condition]:
    """False if VFs of required NICs lack their netdevs; the message names them. No condition on a node without VFs."""
    faults = [
        FunctionFault(target, MISSING, f"{target} ({status.driver})")
        for address in sorted(want.nics)
        for target, status in have[vf_links.NAME].get(address, {}).items()
        if status.missing and (known := facts.get(target)) is not None and known.lacks
    ]
    if not any(have[vf_links.NAME].values()):
        return []
    lacking = [fault.message for fault in faults if want.nics[device_of(fault.target)].nic.required]
    if not lacking:
        return [condition(TYPE, "AllCreated", faults=faults)]
    message = f"no network namespace that the agent can enter has the netdevs of {', '.join(lacking)}"
    return [condition(TYPE, MISSING, message, faults=faults)]
