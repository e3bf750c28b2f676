"""Dampens a Ready that comes and goes: each loss is published at once, a return only after it has lasted."""

from __future__ import annotations

from collections import deque

from attrs import define, field

LOSSES = 3
WITHIN = 600.0
"""Seconds. A node that lost Ready :data:`LOSSES` times within them is not calm."""

LASTING = 60.0
"""Seconds for which a node that is not calm must be ready before that is published."""

NOT_CALM = (
    f"Ready was lost {LOSSES} times within {WITHIN / 60:.0f} minutes; "
    f"it is published once it has lasted for {LASTING:.0f} s"
)


@define
class Calm:
    """Remembers when Ready was lost lately, in seconds since the boot."""

    _losses: deque[float] = field(factory=lambda: deque(maxlen=LOSSES), init=False)
    _ready_since: float | None = field(default=None, init=False)

    def hold(self, ready: bool, now: float) -> float:
        """Seconds for which Ready must not be published yet; 0: publish it now. A NotReady is never held back."""
        if not ready:
            if self._ready_since is not None:
                self._losses.append(now)
            self._ready_since = None
            return 0.0
        if self._ready_since is None:
            self._ready_since = now
        often = len(self._losses) == LOSSES and now - self._losses[0] <= WITHIN
        return max(0.0, self._ready_since + LASTING - now) if often else 0.0
