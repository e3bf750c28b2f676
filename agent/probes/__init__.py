"""Readiness checks, each a row in the ``PROBES`` of a module of this folder, which Trackbed finds by being here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from attrs import Factory, frozen

from agent.machine import Machine
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

PERIOD = 60.0
"""Seconds between two calls of ``read``: the same as between two full passes."""

DEADLINE = 10.0
"""Seconds after which the condition is Unknown if ``read`` has not returned."""


@frozen(kw_only=True)
class Probe:
    """One check. ``name``: its key in the spec, one of ``PROBES`` in agent/spec/node.py. ``type``: that of its condition.

    ``stage``: where it belongs. ``severity``: the default, which the spec can override. ``holds``: what must hold, for the
    documentation; empty: its module's docstring begins with it.

    ``judge(want, have, facts)`` returns its conditions. It is pure: ``have`` is what the pass has read, and ``facts`` is None,
    unless the probe has one of these functions:

    - ``read(machine, want)`` returns facts that no kind reads. It may depend on the wanted NICs, but on nothing else of the
      spec, since the next spec may judge the same facts. It runs in a thread, because a driver call may never return. It may
      use the machine's files, processes and system, but not its netlink: a netlink socket belongs to the thread that opened it.
    - ``remember(before, now, have, facts)`` is for a probe that judges over time: ``judge`` gets its result in place of the
      facts. ``before`` is its previous result (None at first), and ``now`` the time in seconds of a monotonic clock. If
      ``kept`` is given, the result is a record of this class, which a restart of the agent keeps; it is written when its field
      ``kept`` changes.

    A condition names the functions for which it does not hold as its ``faults``, also those of NICs that are not required.
    Without faults it is about the node as a whole. ``severity_of_function``: that of its faults, if not ``severity``.
    ``of_nics``: it reads each wanted NIC, so while it has no answer, none is known of any NIC.

    ``period`` and ``deadline`` of ``read`` are in seconds; ``recheck`` is the period while the condition is False. It becomes
    False after ``fail_after`` failures within the last ``of`` checks.
    """

    name: str
    type: str
    stage: Stage
    judge: Callable[[Wanted, Snapshot, Any], list[Condition]]
    severity: Severity = "required"
    severity_of_function: Severity = Factory(lambda self: self.severity, takes_self=True)
    holds: str = ""
    read: Callable[[Machine, Wanted], Any] | None = None
    period: float = PERIOD
    recheck: float = Factory(lambda self: self.period, takes_self=True)
    deadline: float = DEADLINE
    fail_after: int = 1
    of: int = 1
    of_nics: bool = False
    remember: Callable[[Any, float, Snapshot, Any], Any] | None = None
    kept: Any = None


@cache
def probes() -> tuple[Probe, ...]:
    """Every probe, by its name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return tuple(sorted((probe for module in modules for probe in module.PROBES), key=lambda probe: probe.name))
