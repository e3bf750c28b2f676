"""Readiness checks: one module a check, found by being in this folder.

A probe has the ``TYPE`` of its condition, the ``STAGE`` that it belongs to, and its default ``SEVERITY``, which the spec can
override. ``judge(want, have, facts)`` returns its conditions. It is pure: ``have`` is what the pass has read, and ``facts`` is
None, unless the probe has one of these functions:

- ``read(machine, want)`` returns facts that no kind reads. It may depend on the wanted NICs, but on nothing else of the spec,
  since the next spec may judge the same facts. It runs in a thread, because a driver call may never return. It may use the
  machine's files, processes and system, but not its netlink: a netlink socket belongs to the thread that opened it.
- ``remember(before, now, have, facts)`` is for a probe that judges over time: ``judge`` gets its result in place of the facts.
  ``before`` is its previous result (None at first), and ``now`` the time in seconds of a monotonic clock. If there is ``KEPT``,
  the result is a record of this class, which a restart of the agent keeps; it is written when its field ``kept`` changes.

A condition names the functions for which it does not hold as its ``faults``, also those of NICs that are not required. Without
faults it is about the node as a whole. ``SEVERITY_OF_FUNCTION``: that of its faults, if not ``SEVERITY``. ``OF_NICS``: while
the probe has no answer, none is known of any NIC.

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
    """One check, as its module declares it. ``read`` is None if it judges only what the kinds have read."""

    name: str
    type: str
    stage: Stage
    severity: Severity
    severity_of_function: Severity
    period: float
    recheck: float
    deadline: float
    fail_after: int
    of: int
    of_nics: bool
    read: Callable[[Machine, Wanted], Any] | None
    remember: Callable[[Any, float, Snapshot, Any], Any] | None
    kept: Any
    judge: Callable[[Wanted, Snapshot, Any], list[Condition]]


@cache
def probes() -> tuple[Probe, ...]:
    """Every probe, by its module's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(_probe(name, importlib.import_module(f"{__name__}.{name}")) for name in names)


def _probe(name: str, module: ModuleType) -> Probe:
    period = getattr(module, "PERIOD", PERIOD)
    return Probe(
        name=name,
        type=module.TYPE,
        stage=module.STAGE,
        severity=module.SEVERITY,
        severity_of_function=getattr(module, "SEVERITY_OF_FUNCTION", module.SEVERITY),
        period=period,
        recheck=getattr(module, "RECHECK", period),
        deadline=getattr(module, "DEADLINE", DEADLINE),
        fail_after=getattr(module, "FAIL_AFTER", 1),
        of=getattr(module, "OF", 1),
        of_nics=getattr(module, "OF_NICS", False),
        read=getattr(module, "read", None),
        remember=getattr(module, "remember", None),
        kept=getattr(module, "KEPT", None),
        judge=module.judge,
    )
