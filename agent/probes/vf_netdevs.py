"""The driver of each VF has created a netdev that stays, and the agent can see in which network namespace that is.

A driver may be bound without one: iavf creates it only when the PF has answered. While a network namespace ends, its netdevs
are in none for a moment. So a netdev may be away for :data:`GRACE`. Where no other namespace can be searched (before Linux
5.2), a netdev that the host does not see counts as being in one. A driver may also remove its netdev and
create it again without end: iavf does so while its PF refuses a request (https://github.com/intel/ethernet-linux-ice/issues/57).
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from agent.kinds import links, vf_links
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault
from agent.report.target import device_of
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "VfNetdevs"

MISSING = "NetdevMissing"
UNSTABLE = "NetdevUnstable"
MANY = 5
"""So many netdevs in a row, each replaced within :data:`GRACE`, are more than what configures a VF replaces."""
GRACE = 30.0
"""Seconds within which a driver creates its netdev, and a netdev comes back from a network namespace that ends."""


@frozen
class Presence:
    """When a VF was last read, and when it last had a netdev, or no driver that should create one (or was first read).

    ``ifindex``: of the netdev that was seen last; ``since``: when it was first seen. ``replaced``: how many netdevs before it
    were there for less than :data:`GRACE`, one after the other.
    """

    read: float
    whole: float
    ifindex: int | None = None
    since: float = 0.0
    replaced: int = 0

    def after(self, now: float, status: links.LinkStatus) -> Presence:
        """The presence after a reading."""
        read = evolve(self, read=now, whole=self.whole if status.missing else now)
        if status.link is None:
            return read
        lasted = now - self.since >= GRACE or self.ifindex is None
        if status.link.ifindex == self.ifindex:
            return evolve(read, replaced=0) if lasted else read
        return evolve(read, ifindex=status.link.ifindex, since=now, replaced=0 if lasted else self.replaced + 1)

    @property
    def fault(self) -> str | None:
        """Its netdev is missing and will not come by itself, or is ever another one; None: neither."""
        if self.read - self.whole >= GRACE:
            return MISSING
        return UNSTABLE if self.replaced >= MANY else None


def remember(before: Mapping[str, Presence] | None, now: float, have: Snapshot, facts: None) -> dict[str, Presence]:
    """The presence of each VF's netdev, by target."""
    known = before or {}
    statuses: Mapping[str, Mapping[str, links.LinkStatus]] = have[vf_links.NAME]
    return {
        target: known.get(target, Presence(now, now)).after(now, status)
        for of_pf in statuses.values()
        for target, status in of_pf.items()
    }


def judge(want: Wanted, have: Snapshot, facts: Mapping[str, Presence]) -> list[Condition]:
    """False if VFs of required NICs lack their netdevs or get ever new ones; the message names them. None without VFs."""
    if not any(have[vf_links.NAME].values()):
        return []
    faults = [
        FunctionFault(target, known.fault, f"{target} ({status.driver})")
        for address in sorted(want.nics)
        for target, status in have[vf_links.NAME].get(address, {}).items()
        if (known := facts.get(target)) is not None and known.fault is not None
    ]
    for reason, says in (
        (MISSING, "no network namespace that the agent can enter has the netdevs of"),
        (UNSTABLE, "the driver removes and creates again and again the netdevs of"),
    ):
        required = (each for each in faults if want.nics[device_of(each.target)].nic.required)
        named = [fault.message for fault in required if fault.reason == reason]
        if named:
            return [condition(TYPE, reason, f"{says} {', '.join(named)}", faults=faults)]
    return [condition(TYPE, "AllCreated", faults=faults)]


# Severity: it may be in a network namespace that the agent cannot enter, and serve a container there.
PROBES = (Probe(name="vf_netdevs", type=TYPE, stage="device", severity="warn", remember=remember, judge=judge),)
