"""Takes the reporter's steps. A step that fails is tried again after a back-off of its own, and stops no other step."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from agent.reporter.kubernetes.api import LAST_WAIT, TROUBLE, Backoff, Refused, explain
from agent.reporter.kubernetes.restorations import Contested

LONGEST_SLEEP = 3600.0
"""Seconds; what a step returns if it has nothing to do until something changes."""


@define
class Steps:
    """Why each step fails, and when a step that failed may be tried again.

    ``clock``: seconds since the boot. ``failed`` is called with the name and the error of each step that failed at the API
    server or on the way to it. ``trouble``: why, by the step's name. ``not_before``: by ``clock``.
    """

    clock: Callable[[], float]
    failed: Callable[[str, Exception], None]
    trouble: dict[str, str] = field(factory=dict, init=False)
    not_before: dict[str, float] = field(factory=dict, init=False)
    _backoffs: dict[str, Backoff] = field(factory=dict, init=False)

    def take(self, name: str, step: Callable[[float], float]) -> float:
        """Take a step unless it failed lately.

        :param step: gets the clock's time; returns the seconds until there may be more to do.
        :returns: the seconds until the step is due again.
        """
        now = self.clock()
        if (left := self.not_before.get(name, 0.0) - now) > 0:
            return left
        backoff = self._backoffs.setdefault(name, Backoff())
        try:
            wait = step(now)
        except TROUBLE as error:
            self.trouble[name] = explain(error)
            self.failed(name, error)
            wait = backoff.failed(error.retry_after if isinstance(error, Refused) else 0.0)
        except Contested as error:
            # Not put off: other content may be written at once.
            self.trouble[name] = str(error)
            return error.wait
        except ValueError as error:
            # A file that the deploy writes cannot be read.
            self.trouble[name], wait = str(error), LAST_WAIT
        else:
            backoff.succeeded()
            self.trouble.pop(name, None)
            return wait
        self.not_before[name] = self.clock() + wait
        return wait

    def retry_now(self) -> None:
        """Try steps that failed again at once."""
        self.not_before.clear()
