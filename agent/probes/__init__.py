"""Readiness checks: one module a check, found by being in this folder.

A probe has the ``TYPE`` of its condition, the ``STAGE`` that it belongs to, and its default ``SEVERITY``, which the spec can
override. It either judges what the pass has read, with ``check(want, have)``, or reads something that no kind reads:
``read(machine, want)`` returns facts, and ``judge(want, have, facts)`` returns conditions. ``check`` and ``judge`` are pure.

``read`` may depend on the wanted NICs, but on nothing else of the spec, since its facts may be judged by the next spec. It runs
in a thread, because a driver call may never return. It may use the machine's files, processes and system, but not its netlink:
netlink sockets belong to the thread that opened them.

A probe that judges over time has ``remember(before, now, have, facts)``, whose result ``judge`` gets in place of the facts.
``before`` is its result of the last time (None at first), ``now`` the time in seconds of a monotonic clock, ``have`` the
snapshot, and ``facts`` what ``read`` returned (None for a probe without ``read``).

Optional: ``PERIOD`` and ``DEADLINE`` of ``read`` in seconds, and ``RECHECK``, the period while the condition is False;
``FAIL_AFTER`` and ``OF``: the condition becomes False after ``FAIL_AFTER`` failures within the last ``OF`` checks.
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
"""Seconds between two calls of ``read``: the same as between two full passes."""

DEADLINE = 10.0
"""Seconds after which the condition is Unknown if ``read`` has not returned."""


@frozen
class Probe:
    """One check, as its module declares it. ``read`` is None if it judges the snapshot alone."""

    name: str
    type: str
    stage: Stage
    severity: Severity
    period: float
    recheck: float
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
        recheck=getattr(module, "RECHECK", getattr(module, "PERIOD", PERIOD)),
        deadline=getattr(module, "DEADLINE", DEADLINE),
        fail_after=getattr(module, "FAIL_AFTER", 1),
        of=getattr(module, "OF", 1),
        read=getattr(module, "read", None),
        remember=getattr(module, "remember", None),
        judge=judge,
    )
