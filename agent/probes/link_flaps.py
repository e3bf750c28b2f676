"""No PF loses its carrier repeatedly: at most two losses of 25 s or more within 12 hours, and none of four minutes.

The agent counts the losses that it sees; each one wakes it. Setting a netdev down is no loss. Losses while the agent does not
run are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from agent.kinds import links
from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "LinkFlaps"
STAGE: Stage = "network"
# Replacing one switch would make every node behind it unready for the whole window.
SEVERITY: Severity = "warn"

WINDOW = 12 * 3600.0
SHORTEST = 25.0
"""Seconds: shorter losses do not count."""

TOO_MANY = 3
TOO_LONG = 240.0
"""So many losses within the window, or one of so many seconds, make the condition False."""


@frozen
class Carrier:
    """A netdev's losses of carrier that were long enough to count: when each began, and how many seconds it lasted.

    ``lost``: when the present loss began; ``seen``: when the netdev was last read.
    """

    name: str
    seen: float
    lost: float | None = None
    losses: tuple[tuple[float, float], ...] = ()

    def counted(self) -> tuple[float, ...]:
        """The seconds of each loss in the window, the present one included."""
        present = [] if self.lost is None else [self.seen - self.lost]
        return tuple(seconds for seconds in (*(seconds for _, seconds in self.losses), *present) if seconds >= SHORTEST)


History = Mapping[str, Carrier]


def remember(before: History | None, now: float, have: Snapshot, facts: None) -> History:
    """The history of each PF's carrier, with the snapshot's state added."""
    current = {}
    for address, statuses in have[links.NAME].items():
        status: links.LinkStatus | None = statuses.get(address)
        if status is None or status.link is None:
            continue
        known = (before or {}).get(address, Carrier(status.link.name, now))
        losses = tuple((began, seconds) for began, seconds in known.losses if now - began < WINDOW)
        dark = status.link.up and not status.link.carrier
        lost = (now if known.lost is None else known.lost) if dark else None
        if known.lost is not None and status.link.up and not dark and now - known.lost >= SHORTEST:
            losses = (*losses, (known.lost, now - known.lost))
        current[address] = evolve(known, name=status.link.name, seen=now, lost=lost, losses=losses)
    # A NIC that is gone for a moment keeps its history.
    kept = {address: known for address, known in (before or {}).items() if now - known.seen < WINDOW}
    return {**kept, **current}


def judge(want: Wanted, have: Snapshot, facts: History) -> list[Condition]:
    """False if the link of a required NIC flapped or was lost for long; the message names its netdev."""
    faults = []
    for address, nic in sorted(want.nics.items()):
        known = facts.get(address)
        if known is None or not nic.nic.required:
            continue
        counted = known.counted()
        if counted and (len(counted) >= TOO_MANY or max(counted) >= TOO_LONG):
            faults.append(
                f"{known.name} ({address}) lost its carrier {len(counted)} times, for {max(counted):.0f} s at most"
            )
    if not faults:
        return [condition(TYPE, "Steady")]
    return [condition(TYPE, "LinkFlapped", f"{'; '.join(faults)}, within 12 hours")]
