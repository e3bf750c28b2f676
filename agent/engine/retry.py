"""What failed lately, and when it may be tried again."""

from __future__ import annotations

import math

from attrs import define, evolve, field, frozen

from agent.engine.contention import Contention
from agent.report.records import SETTLING, Change, Disruption, Outcome, Value
from agent.state.scope import Scope, devices

FIRST_RETRY = 0.25
HASTENED_RETRY = 1.0
LAST_RETRY = 300.0
# Where each try costs every VF of the device.
FIRST_COSTLY_RETRY = 60.0
LAST_COSTLY_RETRY = 3600.0


Identity = tuple[str, str, str, Value]


@frozen
class _Failure:
    outcome: Outcome
    count: int
    tried: float
    not_before: float


@define
class Failures:
    """What failed lately, and when (seconds of a monotonic clock) it may be tried again; and what others put back."""

    contention: Contention = field(factory=Contention)
    _found: dict[Identity, _Failure] = field(factory=dict)

    def held_back(self, change: Change, now: float) -> Outcome | None:
        """The last outcome of a change that it is too early to try again."""
        failure = self._found.get(identity(change))
        return failure.outcome if failure is not None and now < failure.not_before else None

    def wait(self, change: Change, now: float) -> None:
        """Hold a change back for its grace_period, counted from the first time that it was planned."""
        if change.grace_period and identity(change) not in self._found:
            outcome = Outcome(change, "blocked", SETTLING, f"wait {change.grace_period:.0f} s")
            self._found[identity(change)] = _Failure(outcome, 0, math.inf, now + change.grace_period)

    def add(self, outcome: Outcome, now: float) -> None:
        """Remember a failure; each one doubles the wait."""
        key = identity(outcome.change)
        count = self._found[key].count + 1 if key in self._found else 0
        wait = LAST_RETRY if outcome.result == "unsupported" else min(FIRST_RETRY * 2 ** min(count, 16), LAST_RETRY)
        if _is_costly(outcome.change):
            wait = min(FIRST_COSTLY_RETRY * 2 ** min(count, 16), LAST_COSTLY_RETRY)
        self._found[key] = _Failure(outcome, count, now, now + wait)

    def hasten(self, scope: Scope) -> None:
        """Something happened to the devices in ``scope``: try again soon, but not at once.

        A failing write may be what caused the event; without a pause the two would chase each other.
        """
        for key, failure in self._found.items():
            concerned = scope is None or failure.outcome.change.device in devices(scope)
            if concerned and not _is_costly(failure.outcome.change):
                soon = min(failure.not_before, failure.tried + HASTENED_RETRY)
                self._found[key] = evolve(failure, not_before=soon)

    def forget(self) -> None:
        """Another spec: nothing of it has failed yet."""
        self._found.clear()
        self.contention.forget()

    def next_try(self) -> float | None:
        """When the first of them may be tried again."""
        return min((failure.not_before for failure in self._found.values()), default=None)

    def keep(self, identities: set[Identity]) -> None:
        """Drop what is no longer wanted."""
        for key in self._found.keys() - identities:
            del self._found[key]


def _is_costly(change: Change) -> bool:
    return change.disruption >= Disruption.VF_RESET


def identity(change: Change) -> Identity:
    """What makes two changes the same one, whatever was there before."""
    return change.kind, change.target, change.field, change.after
