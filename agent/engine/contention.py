"""Contention: another program undoes a change again and again. The agent stops writing it, and
names the programs that run and are known to set it.

A pass that creates a part of a device again (VFs, driver, link) also writes the values that depend on that part, although no
other program undid them. So of each device a pass counts only the first kind that it wrote, in the order of kinds. The count
of a netdev that was away, deleted or in a pod, starts at zero, unless the agent created it again to set the value (a VF's
driver or MAC).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from attrs import define, evolve, field, frozen

from agent.kinds import by_name
from agent.report.records import HOST, Change, Condition, FunctionFault, Outcome, Place, Value

LIMIT = 5
"""How often a value may be undone within :data:`WINDOW` before the agent leaves it."""

WINDOW = 600.0
"""Seconds."""

PAUSE = 3600.0
"""Seconds for which the agent does not write the value. Then it writes it once more."""

COMM = 15
"""How many characters of a process's name the kernel keeps (TASK_COMM_LEN, include/linux/sched.h)."""

Write = tuple[Change, int]
"""A change, and the index of its target's netdev: 0 if there is none in the host's network namespace."""

REMADE = -1
"""The index for a change with which the netdev is created again, under another index."""


Where = tuple[Place, int]
"""What a change sets, and in which netdev, as in :data:`Write`."""


def suspects(kind: str, processes: frozenset[str]) -> tuple[str, ...]:
    """The running programs that are known to set such state."""
    return tuple(name for name in by_name()[kind].OTHER_WRITERS if name[:COMM] in processes)


def say_running(kind: str, processes: frozenset[str]) -> str:
    """Which of the programs run that are known to set such state. That is no evidence: the kernel does not say who set it."""
    running = suspects(kind, processes)
    if not running:
        return "none of the programs that are known to set it runs, so it may be a driver, a script or a person"
    return f"{' and '.join(running)} {'run' if len(running) > 1 else 'runs'}, known to set such values"


@frozen
class _Contended:
    outcome: Outcome
    until: float


@define
class Contention:
    """When each change was written (seconds of a monotonic clock), and which changes are left alone for now.

    Only repeated writes of the same value count. If the agent wrote another value in between, no other program undid the first.
    ``limit`` 0 never stops: for measurements that undo the same change over and over.
    """

    limit: int = LIMIT
    _written: dict[Where, tuple[Value, list[float]]] = field(factory=dict)
    _contended: dict[tuple[Where, Value], _Contended] = field(factory=dict)

    def wrote(self, writes: Iterable[Write], now: float) -> None:
        """Note the writes of a pass, in their order."""
        first: dict[str, str] = {}
        last = {_where(write): write[0] for write in writes}
        for place, change in last.items():
            times = self._times(place, change.after)
            if first.setdefault(change.device, change.kind) == change.kind:
                times = [*times, now]
            self._written[place] = change.after, times
        # Forget values that nobody has undone for that long.
        self._written = {
            place: (value, recent)
            for place, (value, times) in self._written.items()
            if (recent := [when for when in times if now - when <= WINDOW])
        }

    def left(self, index: Callable[[str], int]) -> None:
        """Forget the writes to a netdev that was deleted since, or has moved to a pod or back.

        With each pod the kernel resets such values, and no program undoes them: the netdev goes down, and new interrupts are
        not pinned.

        :param index: the index of a target's netdev now, 0 if there is none in the host's network namespace.
        """
        # A target may have many values, and each pass comes here.
        now = cache(index)
        self._written = {
            (place, index): written
            for (place, index), written in self._written.items()
            if place.target == HOST or index in (REMADE, now(place.target))
        }

    def recent(self, write: Write, now: float) -> int:
        """How often the agent wrote a change within :data:`WINDOW`."""
        return sum(now - when <= WINDOW for when in self._times(*_identity(write)))

    def _times(self, where: Where, value: Value) -> list[float]:
        """When this value was written; empty if the agent's last write was of another one."""
        written, times = self._written.get(where, (value, []))
        return times if written == value else []

    def held_back(
        self, write: Write, processes: frozenset[str], now: float, driver: Callable[[], str]
    ) -> Outcome | None:
        """The outcome of a change that is left alone, because it was undone too often; None if it may be written.

        :param driver: the driver that undoes it; empty if none is known to. The node is ready without such a change.
        """
        change, identity = write[0], _identity(write)
        contended = self._contended.get(identity)
        if contended is not None and now < contended.until:
            return contended.outcome
        if contended is not None:
            # The pause is over. If this write is undone too, the next pause begins.
            del self._contended[identity]
            self._written[_where(write)] = change.after, [now] * (self.limit - 1)
            return None
        recent = self.recent(write, now)
        # A change with a grace period is never left alone: it waits longer each time (Failures.wait).
        if not self.limit or change.grace_period or recent < self.limit:
            return None
        error = f"put back {recent} times within {WINDOW / 60:.0f} minutes"
        again = f"it is tried again after {PAUSE / 60:.0f} minutes"
        # A program that is known to set it may have chosen the driver's value.
        if not suspects(change.kind, processes) and (name := driver()):
            change, error, remedy = evolve(change, required=False), f"{error}; the driver {name} sets it itself", again
        else:
            error = f"{error}; {say_running(change.kind, processes)}"
            remedy = f"stop what sets it, then: trackbed apply; else {again}"
        outcome = Outcome(change, "blocked", error, remedy)
        self._contended[identity] = _Contended(outcome, now + PAUSE)
        return outcome

    def forget(self) -> None:
        """Start at zero: another spec is in force, or an administrator requested a new try."""
        self._written.clear()
        self._contended.clear()

    def keep(self, remaining: Iterable[Write]) -> None:
        """Forget the contended changes that are no longer needed: the value is as it should be, or no longer in the spec."""
        for identity in self._contended.keys() - {_identity(write) for write in remaining}:
            del self._contended[identity]
            place, _ = identity
            self._written.pop(place, None)

    def condition(self, required: Iterable[Write]) -> Condition:
        """``Uncontended``: if False, the message names the first change that is left alone, and programs that may undo it."""
        outcomes = [entry.outcome for write in required if (entry := self._contended.get(_identity(write)))]
        if not outcomes:
            return Condition("Uncontended", "True", "NobodyInterferes")
        more = f" (and {len(outcomes) - 1} more)" if len(outcomes) > 1 else ""
        message = f"{outcomes[0].change}: {outcomes[0].error}{more}"
        faults = tuple(
            FunctionFault(each.change.target, "Contended", f"{each.change}: {each.error}") for each in outcomes
        )
        return Condition("Uncontended", "False", "Contended", message, remedy=outcomes[0].remedy, faults=faults)


def _where(write: Write) -> Where:
    return write[0].place, write[1]


def _identity(write: Write) -> tuple[Where, Value]:
    return _where(write), write[0].after
