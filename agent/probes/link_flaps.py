"""No PF loses its carrier so often that it is quarantined: ``readiness.flaps`` says how often that is, and for how long.

A loss makes a good link suspect, and too many within a window quarantine it. Once the link has been up long enough, it is on
probation, where one more loss quarantines it for twice as long. Otherwise it is good again, and the losses are forgotten.

The kernel counts the losses, so short ones count, and those while the agent does not run. Losses by the agent's own changes and
while a netdev is set down do not count. A netdev that its driver makes anew before it has been up for long is a loss, too: a
driver, a firmware or a cloud may take it away again and again. A boot starts over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from agent.kinds import links
from agent.machine import Link
from agent.probes import Probe
from agent.report.age import say_age
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault, LinkState
from agent.spec.node import Flaps
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "LinkFlaps"

DAY = 86400.0
LONGEST = DAY
"""Seconds that the link must be up until any quarantine ends."""

TRAINING = 60.0
"""Seconds that a link may take to come up. Losses count once a netdev has been up and unchanged for so long."""

MOST = 64
"""How many losses of a link are kept."""


@frozen
class Loss:
    """A loss of carrier: when it began and ended, in seconds of a monotonic clock. None: it lasts."""

    began: float
    ended: float | None


@frozen
class Carrier:
    """What was last read of a PF's netdev, and its losses.

    ``downs``: how many losses the kernel has counted. ``trained``: when losses begin to count.
    """

    ifindex: int
    up: bool
    downs: int
    trained: float
    losses: tuple[Loss, ...] = ()

    @property
    def dark(self) -> bool:
        """Whether the last loss still lasts."""
        return bool(self.losses) and self.losses[-1].ended is None


@frozen
class Carriers:
    """``kept``: by the PF's address. ``now``: when that was read."""

    kept: Mapping[str, Carrier] = field(factory=dict)
    now: float = 0.0


def remember(before: Carriers | None, now: float, have: Snapshot, facts: None) -> Carriers:
    """The carrier of each PF, with the snapshot's state added. A NIC that is gone for a moment keeps its losses."""
    kept = dict(before.kept) if before is not None else {}
    for address, statuses in have[links.NAME].items():
        status: links.LinkStatus | None = statuses.get(address)
        if status is not None and status.link is not None:
            kept[address] = _read(kept.get(address), status.link, now, address in have.flapped)
    return Carriers(kept, now)


def _read(before: Carrier | None, link: Link, now: float, flapped: bool) -> Carrier:
    """The carrier after a reading of its netdev. ``flapped``: the agent has just made a change that flaps the link."""
    trained = now + TRAINING if link.up else 0.0
    read = Carrier(link.ifindex, link.up, link.carrier_downs, trained, before.losses if before else ())
    dark = link.up and not link.carrier
    if read.dark and not dark:
        read = evolve(read, losses=(*read.losses[:-1], evolve(read.losses[-1], ended=now)))
    if before is not None and before.up and link.ifindex != before.ifindex and now < before.trained:
        read = evolve(read, losses=(*read.losses, Loss(now, now))[-MOST:])
    if before is None or flapped or not (before.up and link.up) or link.ifindex != before.ifindex:
        return read
    read = evolve(read, trained=before.trained)
    if now < before.trained:
        return read
    counted = min(MOST, max(0, link.carrier_downs - before.downs))
    if dark and read.dark and not counted:
        return read
    losses = read.losses
    if read.dark:
        losses = (*losses[:-1], evolve(losses[-1], ended=now))
    short = (Loss(now, now),) * max(0, counted - dark)
    lasting = (Loss(now, None),) if dark else ()
    return evolve(read, losses=(*losses, *short, *lasting)[-MOST:])


@frozen
class Health:
    """The state of a link, and since when. ``recent``: when losses began that still count.

    ``free``: when a quarantine ends. ``hold``: seconds that the link must be up until then.
    """

    state: LinkState = "good"
    since: float = 0.0
    recent: tuple[float, ...] = ()
    free: float = 0.0
    hold: float = 0.0

    def at(self, now: float, flaps: Flaps) -> Health:
        """The state if nothing has happened until ``now``."""
        if self.state == "suspect" and now >= self.recent[-1] + DAY:
            return Health(since=self.recent[-1] + DAY)
        if self.state == "quarantined" and now >= self.free:
            return evolve(self, state="probation", since=self.free).at(now, flaps)
        if self.state == "probation" and now >= self.since + flaps.probation:
            return Health(since=self.since + flaps.probation)
        return self

    def after(self, loss: Loss, flaps: Flaps) -> Health:
        """The state after a loss."""
        now = self.at(loss.began, flaps)
        ended = math.inf if loss.ended is None else loss.ended
        if now.state == "quarantined":
            return evolve(now, free=ended + now.hold)
        if now.state == "probation":
            hold = min(2 * now.hold, LONGEST)
            return evolve(now, state="quarantined", since=loss.began, free=ended + hold, hold=hold)
        recent = (*(began for began in now.recent if loss.began - began < DAY), loss.began)
        within = sum(loss.began - began < flaps.within for began in recent)
        if within >= flaps.losses or len(recent) >= flaps.daily:
            return Health("quarantined", loss.began, recent, ended + flaps.quiet, flaps.quiet)
        return Health("suspect", now.since if now.state == "suspect" else loss.began, recent)


def health(losses: Iterable[Loss], now: float, flaps: Flaps) -> Health:
    """The state of a link with these losses."""
    current = Health()
    for loss in losses:
        current = current.after(loss, flaps)
    return current.at(now, flaps)


def judge(want: Wanted, have: Snapshot, facts: Carriers) -> list[Condition]:
    """False if the link of a required NIC is quarantined; the message names its netdev."""
    flaps = want.spec.readiness.flaps
    faults = []
    for address in sorted(want.nics):
        if (known := facts.kept.get(address)) is not None:
            found = health(known.losses, facts.now, flaps)
            if found.state != "good":
                faults.append(_fault(address, found))
    quarantined = [f for f in faults if f.severity == "required" and want.nics[f.target].nic.required]
    if not quarantined:
        return [condition(TYPE, "Steady", faults=faults)]
    message = "; ".join(f"{want.nics[each.target].nic.name} ({each.target}): {each.message}" for each in quarantined)
    return [condition(TYPE, "LinkFlapped", message, faults=faults)]


def _fault(address: str, found: Health) -> FunctionFault:
    """A NIC whose link is not good. Only a quarantined one is not ready.

    The message has no times that pass: each would be a change of the report.
    """
    number = len(found.recent)
    message = f"{found.state} after {number} {'loss' if number == 1 else 'losses'} of carrier"
    if found.state != "quarantined":
        return FunctionFault(address, found.state.capitalize(), message, "warn", "likely")
    message += f"; on probation once it has been up for {say_age(found.hold)}"
    return FunctionFault(address, "Quarantined", message, certainty="likely")


PROBES = (
    Probe(
        name="link_flaps",
        type=TYPE,
        stage="network",
        severity="warn",  # replacing one switch would make every node behind it unready
        severity_of_function="required",
        remember=remember,
        kept=Carriers,
        judge=judge,
    ),
)
