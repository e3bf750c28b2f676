"""Kinds of state: one module a kind, found by being in this folder.

A kind is three functions, the names of the kinds it comes ``AFTER``, and ``UNKNOWN_UNTIL``: the kinds without whose
pending changes it cannot be planned in full, because what it plans for does not exist yet. ``REACH`` is what one of its
changes may touch: the function alone, or the whole device.

A kind of plain values may also have ``readings(want, have) -> Iterable[Reading]``: then a value that leaves the spec gets
its original back (agent/engine/originals.py). Of values that are observed only as far as the spec gives them it has
``reading(machine, want, kept) -> Reading | None``: a value that was changed (from ``kept.before`` to ``kept.after``) as it is
now, read only if the spec does not give it any more; None while it cannot be told.

A kind whose change takes another value away on its way has ``transients(change) -> list[Change]``: those, so that a crash
half way makes no originals of what it left.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from typing import Any, Literal, Protocol, cast

from attrs import frozen

from agent.machine import Machine
from agent.report.records import Change, Disruption, Value
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted


class Kind(Protocol):
    """What a module of this folder has."""

    NAME: str
    AFTER: tuple[str, ...]
    UNKNOWN_UNTIL: tuple[str, ...]
    REACH: Literal["function", "device"]

    def observe(self, machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Any]:
        """Read the state of the wanted devices in ``scope``, canonicalised, by device. A device that is gone is left out."""
        ...

    def plan(self, want: Wanted, have: Snapshot) -> list[Change]:
        """What would make the state as wanted. Pure, and the same for the same input, to the byte."""
        ...

    def apply(self, machine: Machine, change: Change) -> None:
        """Carry out one change of :meth:`plan`; OSError as the kernel gave it."""
        ...


@frozen
class Reading:
    """A value as it was read.

    ``target`` and ``field`` are those of the changes that the kind plans for it, and so is the way ``value`` is written.
    ``wanted``: the spec gives it one; ``disruption``: what changing it costs; ``skip_if_owned``: as in a change.
    """

    target: str
    field: str
    value: Value
    wanted: bool
    disruption: Disruption = Disruption.NONE
    skip_if_owned: bool = False


@cache
def by_name() -> dict[str, Kind]:
    """Every kind by its name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {kind.NAME: kind for kind in (cast(Kind, module) for module in modules)}


@cache
def ordered() -> tuple[Kind, ...]:
    """Every kind, those that come first first; names decide between equals."""
    found = by_name()
    sorter = TopologicalSorter({name: sorted(found[name].AFTER) for name in sorted(found)})
    return tuple(found[name] for name in sorter.static_order())
