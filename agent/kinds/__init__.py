"""Kinds of state: one module a kind, found by being in this folder.

A kind is three functions, the names of the kinds it comes ``AFTER``, and ``UNKNOWN_UNTIL``: the kinds without whose
pending changes it cannot be planned in full, because what it plans for does not exist yet.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from typing import Any, Protocol, cast

from agent.change import HOST, Change
from agent.machine import Machine
from agent.nics import Wanted
from agent.snapshot import Scope, Snapshot


class Kind(Protocol):
    """What a module of this folder has."""

    NAME: str
    AFTER: tuple[str, ...]
    UNKNOWN_UNTIL: tuple[str, ...]

    def observe(self, machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
        """Read the state of the wanted devices in ``scope``, canonicalised, by device. A device that is gone is left out."""
        ...

    def plan(self, want: Wanted, have: Snapshot) -> list[Change]:
        """What would make the state as wanted. Pure, and the same for the same input, to the byte."""
        ...

    def apply(self, machine: Machine, change: Change) -> None:
        """Carry out one change of :meth:`plan`; OSError as the kernel gave it."""
        ...


@cache
def ordered() -> tuple[Kind, ...]:
    """Every kind, those that come first first; names decide between equals."""
    found = {
        kind.NAME: kind
        for module in pkgutil.iter_modules(__path__)
        for kind in [cast(Kind, importlib.import_module(f"{__name__}.{module.name}"))]
    }
    sorter = TopologicalSorter({name: sorted(found[name].AFTER) for name in sorted(found)})
    return tuple(found[name] for name in sorter.static_order())


def host_in_scope(scope: Scope) -> bool:
    """Whether ``scope`` includes what belongs to no device."""
    return scope is None or HOST in scope


def in_scope(want: Wanted, scope: Scope) -> list[str]:
    """The PCI addresses of the wanted functions that ``scope`` names, sorted."""
    return sorted(address for address in want.nics if scope is None or address in scope)
