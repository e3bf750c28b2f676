"""The arguments of a pass (a goal, a memory, callbacks), and its state while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone

from attrs import define, field, frozen

from agent.engine.cached_machine import CachedMachine
from agent.engine.originals import Originals
from agent.engine.readiness import Judge
from agent.engine.recent_users import RecentUsers
from agent.engine.retry import Failures
from agent.machine import Machine
from agent.report.records import Change, Disruption, Key, Mode, Outcome
from agent.spec.node import NodeSpec
from agent.state.scope import Scope


@frozen
class Goal:
    """The spec that a pass makes true, and how disruptive its changes may be.

    ``verified``: the last spec that the node was seen to match. A change that only a newer spec asks for does not make the
    node unready while it is deferred or blocked. ``asked``: returns the most disruptive level that an administrator allows now
    (None leaves it to the spec's policy), and the NIC for which alone it is allowed (empty: for all devices). ``time_of_day``
    (UTC): for maintenance windows. Both are asked right before each disruptive change, since a pass may take minutes.
    """

    spec: NodeSpec
    verified: NodeSpec | None = None
    asked: Callable[[], tuple[Disruption | None, str]] = lambda: (None, "")
    time_of_day: Callable[[], datetime] = lambda: datetime.now(timezone.utc)


@frozen
class Memory:
    """What a pass knows from the passes before it.

    ``clock``: a monotonic clock, by which failures are timed. ``failures``: which changes failed, and when they may be tried
    again. ``originals``: the values that the agent's first changes replaced.
    """

    clock: Callable[[], float]
    failures: Failures = field(factory=Failures)
    originals: Originals = field(factory=Originals)


def _ignore(*arguments: object) -> None:
    pass


@frozen
class Callbacks:
    """The functions that a pass calls while it runs.

    ``announce``: called with the first required change, before it is made: the node is not ready from then on.
    ``wait_until_published``: called with that change before the first change that disturbs users. It returns when the node is
    published as not ready, or cannot be. If users appear meanwhile, their device is not changed.
    ``new_events``: returns the scope of the events since its last call, also of those that the pass's own writes caused; None
    if events were lost.
    ``judge``: asks the probes. None: ask each of them now, and wait for the answer.
    ``doing``: called with the name of the kind that is read or written next.
    """

    announce: Callable[[Change], None] = _ignore
    wait_until_published: Callable[[Change], None] = _ignore
    new_events: Callable[[], Scope] = frozenset
    judge: Judge | None = None
    doing: Callable[[str, Mode], None] = _ignore


SILENT = Callbacks()
"""Callbacks that do nothing, and probes that are judged at once."""


@define
class PassContext:
    """One pass while it runs. Writes go to ``machine``; kinds read through ``cache``.

    ``announced``: the change that was announced. ``published``: the wait for its publication is over. ``writes``: how often
    this pass has written each change.
    """

    machine: Machine
    cache: CachedMachine
    goal: Goal
    memory: Memory
    callbacks: Callbacks
    users: RecentUsers
    announced: Change | None = None
    published: bool = False
    writes: Counter[Key] = field(factory=Counter)

    @classmethod
    def begin(cls, machine: Machine, goal: Goal, memory: Memory, callbacks: Callbacks) -> PassContext:
        """The context of a pass that has not read anything yet."""
        users = RecentUsers(machine, memory.clock, callbacks.doing)
        return cls(machine, CachedMachine(machine), goal, memory, callbacks, users)

    def remember_failure(self, outcome: Outcome) -> None:
        """Note a failure: the change is tried again later."""
        self.memory.failures.add(outcome, self.memory.clock())
