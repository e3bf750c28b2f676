"""How long to wait after a request has failed."""

from __future__ import annotations

import random

from attrs import define, field

FIRST_WAIT = 1.0

LAST_WAIT = 60.0
"""Seconds between two tries of a request that can wait."""

LAST_URGENT_WAIT = 15.0
"""Seconds between two tries to publish that a node is not ready."""


@define
class Backoff:
    """How long to wait after a failure: a random time, from a range that doubles with each failure up to ``last``.

    At the limit every wait is the whole limit, so that each node keeps its random offset. With new random times, twice as many
    nodes would come in the first second after an outage.
    """

    last: float = LAST_WAIT
    failures: int = field(default=0, init=False)

    def failed(self, at_least: float = 0.0) -> float:
        """Seconds until the next try."""
        longest = FIRST_WAIT * 2**self.failures
        self.failures = min(self.failures + 1, 16)
        drawn = random.uniform(0.1, min(longest, self.last))  # noqa: S311  no secret
        return at_least + (self.last if longest >= 2 * self.last else drawn)

    def succeeded(self) -> None:
        """Start again with the shortest wait."""
        self.failures = 0
