"""A Ready that comes and goes: losing it is published each time, getting it back only once it lasts."""

from __future__ import annotations

from collections import deque

from attrs import define, field

LOSSES = 3
WITHIN = 600.0
"""Seconds: a node that has lost its Ready :data:`LOSSES` times within them is not calm."""

LASTING = 60.0
"""Seconds for which a node that is not calm must be ready before that is published."""

TO_AND_FRO = (
    f"Ready was lost {LOSSES} times within {WITHIN / 60:.0f} minutes; "
    f"it is published once it has lasted for {LASTING:.0f} s"
)


@define
class Calm:
    """What the reports said lately; seconds of a clock that is never set."""

    _losses: deque[float] = field(factory=lambda: deque(maxlen=LOSSES), init=False)
    _ready_since: float | None = field(default=None, init=False)

    def hold(self, ready: bool, now: float) -> float:
        """The seconds until what the report says now may be published; 0: at once, as whatever takes Ready back."""
        if not ready:
            if self._ready_since is not None:
                self._losses.append(now)
            self._ready_since = None
            return 0.0
        if self._ready_since is None:
            self._ready_since = now
        often = len(self._losses) == LOSSES and now - self._losses[0] <= WITHIN
        return max(0.0, self._ready_since + LASTING - now) if often else 0.0
