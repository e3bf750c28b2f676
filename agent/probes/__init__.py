"""Readiness checks: one module a check, found by being in this folder.

A probe names its condition's ``TYPE``, the ``STAGE`` that it belongs to, and its ``SEVERITY`` unless the spec gives another. It
either judges what the pass has read, with ``check(want, have)``, or looks at what no kind reads: ``read(machine, want)`` gives
facts and ``judge(want, have, facts)`` says what they mean. Both judge purely.

``read`` looks at the wanted NICs, and at no more of the spec: its facts are judged by the next spec, too. It runs in a
thread, since a driver may never return from it; it may use the machine's files, processes and system, but not its netlink,
whose sockets belong to the thread that made them.

What is judged over time has ``remember(before, now, have, facts)``, which makes what ``judge`` is given instead of the facts:
out of what it made the last time (None at first), the time ``now`` (seconds of a monotonic clock), the snapshot, and the new
facts (None for a probe without ``read``).

Optional: ``PERIOD`` and ``DEADLINE`` of a reading in seconds; ``FAIL_AFTER`` and ``OF``: so many failures within so many checks
make the condition False.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from attrs import frozen

from agent.machine import Machine
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

PERIOD = 60.0
"""Seconds between two readings: the worker's resync, which reads everything else again."""

DEADLINE = 10.0
"""Seconds after which a reading that has not returned is Unknown."""


@frozen
class Probe:
    """One check, as its module declares it. ``read`` is None if it judges the snapshot alone."""

    name: str
    type: str
    stage: Stage
    severity: Severity
    period: float
    deadline: float
    fail_after: int
    of: int
    read: Callable[[Machine, Wanted], Any] | None
    remember: Callable[[Any, float, Snapshot, Any], Any] | None
    judge: Callable[[Wanted, Snapshot, Any], list[Condition]]


@cache
def probes() -> tuple[Probe, ...]:
    """Every probe, by its module's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(_probe(name, importlib.import_module(f"{__name__}.{name}")) for name in names)


def _probe(name: str, module: ModuleType) -> Probe:
    judge = module.judge if hasattr(module, "judge") else lambda want, have, _: module.check(want, have)
    return Probe(
        name=name,
        type=module.TYPE,
        stage=module.STAGE,
        severity=module.SEVERITY,
        period=getattr(module, "PERIOD", PERIOD),
        deadline=getattr(module, "DEADLINE", DEADLINE),
        fail_after=getattr(module, "FAIL_AFTER", 1),
        of=getattr(module, "OF", 1),
        read=getattr(module, "read", None),
        remember=getattr(module, "remember", None),
        judge=judge,
    )
