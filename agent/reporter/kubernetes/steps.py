"""Takes the reporter's steps. A step that is refused is tried again after a back-off of its own, and stops no other step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field

from agent.reporter.kubernetes.api import TROUBLE, Refused, explain, takes_nothing
from agent.reporter.kubernetes.backoff import LAST_WAIT, Backoff
from agent.reporter.kubernetes.restorations import Contested

LONGEST_SLEEP = 3600.0
"""Seconds; what a step returns if it has nothing to do until something changes."""

Step = Callable[[float], float]
"""Gets the clock's time, and returns the seconds until there may be more to do."""


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

    def take(self, steps: Sequence[tuple[str, Step]], last: float = LAST_WAIT) -> list[float]:
        """Take steps in this order, except those that failed lately. They keep their order also when they are tried again:

        - What fails the first time may work a second later. The steps after it wait for that.
        - While the API server takes no request at all, the steps after the one that failed wait with it.
        - When one that failed is due, so are the others.

        :param steps: each with its name.
        :param last: the longest back-off, in seconds.
        :returns: the seconds until each is due again.
        """
        due, names = [], [name for name, _ in steps]
        if any(self._left(name) <= 0 for name in names if name in self.not_before):
            for name in names:
                self.not_before.pop(name, None)
        for index, (name, step) in enumerate(steps):
            left = self._left(name)
            due.append(left if left > 0 else self._take(name, step, names[index + 1 :], last))
        return due

    def _left(self, name: str) -> float:
        return self.not_before.get(name, 0.0) - self.clock()

    def _take(self, name: str, step: Step, later: Sequence[str], last: float) -> float:
        backoff = self._backoffs.setdefault(name, Backoff(last))
        try:
            wait = step(self.clock())
        except TROUBLE as error:
            self.trouble[name] = explain(error)
            self.failed(name, error)
            wait = backoff.failed(error.retry_after if isinstance(error, Refused) else 0.0)
            if backoff.failures == 1 or takes_nothing(error):
                self._put_off(later, self.clock() + wait, self.trouble[name])
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

    def _put_off(self, names: Sequence[str], until: float, why: str) -> None:
        for name in names:
            self.trouble[name] = why
            self.not_before[name] = max(self.not_before.get(name, 0.0), until)
