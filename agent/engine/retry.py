"""Failed changes, and when each may be tried again."""

from __future__ import annotations

import math
from collections.abc import Collection, Container

from attrs import define, evolve, field, frozen

from agent.engine.contention import WINDOW, Contention
from agent.report.records import SETTLING, Change, Disruption, Key, Outcome
from agent.runtime import doubling
from agent.state.scope import Scope, devices

FIRST_RETRY = 0.25
HASTENED_RETRY = 1.0
LAST_RETRY = 300.0
# For links that are taken down and up. A VF's driver checks its link every two seconds (igbvf_watchdog_task).
QUICK_RETRY = 2.0
QUICK_TRIES = 20
LAST_FLAP = 3600.0
# For changes that reset all VFs of the device at each try.
FIRST_COSTLY_RETRY = 60.0
LAST_COSTLY_RETRY = 3600.0


@frozen
class _Failure:
    """``over``: a pass has seen that the change may be tried again. If it was not tried then, it waits for something else."""

    outcome: Outcome
    count: int
    tried: float
    not_before: float
    over: bool = False


@define
class Failures:
    """Failed changes, and when (seconds of a monotonic clock) each may be tried again.

    ``contention``: the changes that others undo.
    """

    contention: Contention = field(factory=Contention)
    _failures: dict[Key, _Failure] = field(factory=dict)
    _made: dict[Key, tuple[int, float]] = field(factory=dict)
    """Of the changes with a grace period: how often each was made in a row, and when it was made last."""
    _uncounted: set[Key] = field(factory=set)
    """Those that the present pass has made: what it reads then may still be from before."""

    def held_back(self, change: Change, now: float) -> Outcome | None:
        """The last outcome of a change that nothing blocks now, if it is too early to try it again."""
        failure = self._failures.get(change.key)
        if failure is None:
            return None
        if _is_costly(change) and not _is_costly(failure.outcome.change):
            # The try that failed has made some VFs, and the next one would reset them.
            outcome = evolve(failure.outcome, change=change)
            failure = evolve(failure, outcome=outcome, not_before=failure.tried + FIRST_COSTLY_RETRY)
        # A change that was blocked was not tried, and what was not there is there now: it may be tried at once.
        failed = failure.outcome.change
        over = (
            now >= failure.not_before or bool(failed.blocker) or (failed.before is None and change.before is not None)
        )
        self._failures[change.key] = evolve(failure, over=over)
        return None if over else failure.outcome

    def wait(self, change: Change, now: float) -> None:
        """Hold a change back for its grace period, which begins with the first pass that plans the change.

        A change that was made, and is soon planned again, waits twice as long each time. If it takes a link down, the first
        :data:`QUICK_TRIES` tries come after :data:`QUICK_RETRY` seconds: a VF may need several.
        """
        key = change.key
        if change.grace_period and key not in self._failures:
            count, made = self._made.get(key, (0, 0.0))
            count = count if now - made <= WINDOW else 0
            flaps = change.disruption == Disruption.LINK_FLAP
            quick, last = (QUICK_TRIES, LAST_FLAP) if flaps else (0, LAST_RETRY)
            wait = QUICK_RETRY if 0 < count < quick else doubling(change.grace_period, max(0, count - quick) + 1, last)
            remedy = f"wait {wait:.0f} s" + (f", or {change.remedy}" if change.remedy else "")
            outcome = Outcome(change, "blocked", SETTLING, remedy)
            self._failures[key] = _Failure(outcome, count + (key in self._uncounted), math.inf, now + wait)

    def made(self, change: Change, now: float) -> None:
        """Note that a change with a grace period was made. It may take effect late: if it is planned again, it waits again."""
        key = change.key
        failure = self._failures.pop(key, None)
        self._made = {other: made for other, made in self._made.items() if now - made[1] <= WINDOW}
        self._made[key] = failure.count if failure else 0, now
        self._uncounted.add(key)

    def add(self, outcome: Outcome, now: float) -> None:
        """Note a failure. Each failure of a change doubles the wait before the next try."""
        key = outcome.change.key
        count = self._failures[key].count + 1 if key in self._failures else 0
        wait = LAST_RETRY if outcome.result == "unsupported" else doubling(FIRST_RETRY, count + 1, LAST_RETRY)
        if _is_costly(outcome.change):
            wait = doubling(FIRST_COSTLY_RETRY, count + 1, LAST_COSTLY_RETRY)
        self._failures[key] = _Failure(outcome, count, now, now + wait)

    def hasten(self, scope: Scope) -> None:
        """Try failed changes again soon, since an event named the devices in ``scope``. Only changes that disturb nobody.

        Not at once: a write that fails may cause an event. If each event caused a write at once, this would never end.
        """
        for key, failure in self._failures.items():
            concerned = scope is None or failure.outcome.change.device in devices(scope)
            if concerned and failure.outcome.change.disruption == Disruption.NONE:
                soon = min(failure.not_before, failure.tried + HASTENED_RETRY)
                self._failures[key] = evolve(failure, not_before=soon)

    def came_up(self, targets: Collection[str]) -> None:
        """The links of these targets came up: try again what was unsupported there while they were down."""
        for key, failure in list(self._failures.items()):
            change = failure.outcome.change
            if change.target in targets and failure.outcome.result == "unsupported" and not _is_costly(change):
                del self._failures[key]

    def forget(self) -> None:
        """Forget all failures, since another spec is in force or an administrator requested a new try."""
        self._failures.clear()
        self._made.clear()
        self._uncounted.clear()
        self.contention.forget()

    def next_try(self) -> float | None:
        """When the first failed change may be tried again. One whose users or whose policy defer it waits for these instead."""
        return min((failure.not_before for failure in self._failures.values() if not failure.over), default=None)

    def of_others(self, devices: Container[str]) -> set[Key]:
        """The failed changes of devices that are none of these."""
        return {key for key, failure in self._failures.items() if failure.outcome.change.device not in devices}

    def keep(self, keys: set[Key]) -> None:
        """At the end of a pass: forget the failures of changes that are not planned any more."""
        for key in self._failures.keys() - keys:
            del self._failures[key]
        for key in self._uncounted:
            count, when = self._made[key]
            self._made[key] = count + 1, when
        self._uncounted.clear()


def _is_costly(change: Change) -> bool:
    return change.disruption >= Disruption.VF_RESET
