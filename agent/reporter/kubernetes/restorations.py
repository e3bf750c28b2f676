"""Limits how often the reporter writes again what somebody else has changed.

Two machines of one name, a controller that removes the taint, or a webhook that changes each write would else make it write as
often as the API server answers. Each such write is a whole Node in etcd.
"""

from __future__ import annotations

import math

from attrs import define, field

from agent.reporter.kubernetes.backoff import Backoff

AT_ONCE = 5
"""So many restorations are made at once; before each further one the reporter waits, up to a minute."""

FORGOTTEN = 600.0
"""Seconds after the last restoration after which the next one counts as the first."""


class Contested(Exception):
    """Somebody else changes again and again what the reporter writes. ``wait``: seconds until it may be written again."""

    def __init__(self, what: str, node: str, wait: float) -> None:
        super().__init__(
            f"somebody else changes {what} again and again (another machine of this name, a controller or a webhook; "
            f"see: kubectl get node {node} -o yaml --show-managed-fields); written again at most once a minute"
        )
        self.wait = wait


@define
class Restorations:
    """Counts how often content was written once more, although the reporter wants the same as before.

    ``what``: what is written, and ``node``: the Node's name, for the message. Times are seconds since the boot.
    """

    what: str
    node: str
    _wanted: object = field(default=None, init=False)
    _is_new: bool = field(default=True, init=False)
    _count: int = field(default=0, init=False)
    _last: float = field(default=-math.inf, init=False)
    _not_before: float = field(default=0.0, init=False)
    _backoff: Backoff = field(factory=Backoff, init=False)

    def wants(self, content: object) -> None:
        """Note what the reporter wants now, whether it must be written or not. New content is never delayed."""
        if content != self._wanted:
            self._wanted, self._is_new = content, True

    def check(self, clock: float) -> None:
        """Check whether it may be written now.

        :raises Contested: it must wait.
        """
        if not self._is_new and clock < self._not_before:
            raise Contested(self.what, self.node, self._not_before - clock)

    def wrote(self, clock: float) -> None:
        """Note that it was written."""
        if self._is_new:
            self._is_new = False
            return
        if clock > self._last + FORGOTTEN:
            self._count = 0
            self._backoff.succeeded()
        self._count, self._last = self._count + 1, clock
        if self._count >= AT_ONCE:
            self._not_before = clock + self._backoff.failed()
