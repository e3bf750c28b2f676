"""Readiness checks: one module a check, found by being in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Protocol, cast

from agent.change import Condition
from agent.machine import Machine
from agent.nics import Wanted
from agent.snapshot import Snapshot


class Probe(Protocol):
    """What a module of this folder has."""

    def check(self, machine: Machine, want: Wanted, have: Snapshot) -> list[Condition]:
        """The conditions that this check answers for; their ``type`` is this module's alone."""
        ...


@cache
def probes() -> tuple[Probe, ...]:
    """Every probe, by its module's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(cast(Probe, importlib.import_module(f"{__name__}.{name}")) for name in names)
