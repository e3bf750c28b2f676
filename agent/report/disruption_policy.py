"""How disruptive a change may be now: the policy of the node or of the NIC, and its maintenance windows."""

from __future__ import annotations

from datetime import datetime, timedelta

from attrs import frozen

from agent.report.records import Disruption
from agent.spec.nic import DAYS, DisruptionPolicy, Window


@frozen
class Allowed:
    """The most disruptive level that is allowed now. ``force``: despite users. ``until``: when more is allowed."""

    level: Disruption
    force: bool = False
    until: str = ""


def allowed(node: DisruptionPolicy, nic: DisruptionPolicy | None, asked: Disruption | None, now: datetime) -> Allowed:
    """What a device's policy allows at ``now`` (UTC). ``asked``: the level of `trackbed apply`, which overrides it."""
    policy = nic or node
    if asked is not None:
        return Allowed(asked, policy.force)
    windows = [Disruption.parse(window.allow) for window in policy.windows if _open(window, now)]
    level = max([Disruption.parse(policy.allow), *windows])
    more = ", ".join(str(window) for window in policy.windows if Disruption.parse(window.allow) > level)
    return Allowed(level, policy.force, f"; more in the window {more}" if more else "")


def _open(window: Window, now: datetime) -> bool:
    """Whether ``now`` is in a window. A window that ends after midnight belongs to the day on which it starts."""
    clock = now.strftime("%H:%M")
    if window.start < window.end:
        return window.start <= clock < window.end and _on(window, now)
    if clock >= window.start:
        return _on(window, now)
    return clock < window.end and _on(window, now - timedelta(days=1))


def _on(window: Window, day: datetime) -> bool:
    return not window.days or DAYS[day.weekday()] in window.days
