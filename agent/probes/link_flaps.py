"""A link that comes and goes is no link: three losses of 25 s or more, or one of four minutes, within the last 12 hours.

Counted is what the agent has seen itself (each loss of carrier wakes it), of PFs that should be up; a netdev that
somebody set down is no loss. What happened while the agent was not running is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from agent.kinds import links
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "LinkFlaps"
STAGE: Stage = "network"
# One switch that is replaced would take every node behind it away for the whole window.
SEVERITY: Severity = "warn"

WINDOW = 12 * 3600.0
FLAP = 25.0
FLAPS = 3
DROP = 240.0


@frozen
class Carrier:
    """A netdev's losses of carrier that were long enough to count: when each began, and its seconds.

    ``lost``: when the present one began; ``seen``: when it was last looked at.
    """

    name: str
    seen: float
    lost: float | None = None
    losses: tuple[tuple[float, float], ...] = ()

    def counted(self) -> tuple[float, ...]:
        """The seconds of each loss in the window, the present one included."""
        present = [] if self.lost is None else [self.seen - self.lost]
        return tuple(seconds for seconds in (*(seconds for _, seconds in self.losses), *present) if seconds >= FLAP)


History = Mapping[str, Carrier]


def remember(before: History | None, now: float, have: Snapshot, facts: None) -> History:
    """What is known of each PF's carrier with what the snapshot has of it."""
    found = {}
    for address, statuses in have[links.NAME].items():
        status: links.LinkStatus | None = statuses.get(address)
        if status is None or status.link is None:
            continue
        known = (before or {}).get(address, Carrier(status.link.name, now))
        losses = tuple((began, seconds) for began, seconds in known.losses if now - began < WINDOW)
        dark = status.link.up and not status.link.carrier
        lost = (now if known.lost is None else known.lost) if dark else None
        if known.lost is not None and status.link.up and not dark and now - known.lost >= FLAP:
            losses = (*losses, (known.lost, now - known.lost))
        found[address] = evolve(known, name=status.link.name, seen=now, lost=lost, losses=losses)
    # A NIC that is away for a moment keeps its history.
    kept = {address: known for address, known in (before or {}).items() if now - known.seen < WINDOW}
    return {**kept, **found}


def judge(want: Wanted, have: Snapshot, facts: History) -> list[Condition]:
    """False names the netdevs of required NICs whose link flapped or was long away."""
    faults = []
    for address, nic in sorted(want.nics.items()):
        known = facts.get(address)
        if known is None or not nic.nic.required:
            continue
        counted = known.counted()
        if counted and (len(counted) >= FLAPS or max(counted) >= DROP):
            faults.append(
                f"{known.name} ({address}) lost its carrier {len(counted)} times, for {max(counted):.0f} s at most"
            )
    if not faults:
        return [Condition(TYPE, "True", "Steady")]
    remedy = "check cable, transceiver and switch port; it is forgotten after 12 hours, or when the agent is restarted"
    return [Condition(TYPE, "False", "LinkFlapped", f"{'; '.join(faults)}, within 12 hours; {remedy}")]
