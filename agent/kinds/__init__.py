"""The kinds of kernel state that the agent reads and sets, found by being in this folder or one below it.

A module is one kind, or has several in ``KINDS``, such as the rows of one table (:mod:`agent.kinds.settings`).

A kind is three functions: ``observe`` reads the state, ``plan`` lists the changes that make it as the spec says, ``apply``
makes one of them. A module without ``plan`` and ``apply`` is an observer: it reads what other kinds and the probes need.
The fields of :class:`Observer` and :class:`Kind` name all parts that a module may have. Parts without a default are required.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from functools import cache
from graphlib import TopologicalSorter
from types import ModuleType
from typing import Any, Literal

from attrs import fields, frozen

from agent.machine import Machine
from agent.report.records import Change, Disruption, Value
from agent.state.scope import Scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted


@frozen
class Reading:
    """One value as it was read, for a kind whose values are restored when they leave the spec.

    ``value`` has the form of the kind's changes. ``wanted``: the spec gives the value, so it is not restored while its device
    is in the spec. ``disruption``: what changing it costs; ``skip_if_owned`` and ``blocker``: as in a change. ``instead``: the
    value that it gets for now, since the kernel sets it along with another value of the spec.
    """

    value: Value
    wanted: bool = False
    disruption: Disruption = Disruption.NONE
    skip_if_owned: bool = False
    blocker: str = ""
    instead: Value = None


ANY_VALUE = "*"
"""Stands for the value that a write leaves, as long as only the kernel knows it: how it divides huge pages between nodes."""


@frozen(kw_only=True)
class Observer:
    """A kind of state that is read.

    ``AFTER``: the kinds that come before it in a pass; none by default.

    ``observe(machine, want, scope)`` returns the state of the wanted devices in ``scope``, by device, in canonical form. A
    device that is gone is left out.

    ``read_for(want)``: the part of the spec that decides how much ``observe`` reads, if probes judge the result. The probes may
    judge by another spec than the pass; if this part differs between the two, the engine reads again.
    """

    NAME: str
    observe: Callable[[Machine, Wanted, Scope], Mapping[str, Any]]
    AFTER: tuple[str, ...] = ()
    read_for: Callable[[Wanted], object] = lambda want: None


@frozen(kw_only=True)
class Kind(Observer):
    """A kind of state that is read and set.

    ``plan(want, have)`` returns the changes that make the state as wanted. It is pure: the same input gives the same bytes.

    ``apply(machine, change)`` makes one change of ``plan``, and raises the kernel's OSError if that fails.

    ``UNKNOWN_UNTIL``: kinds whose pending changes create what this kind plans for. Until they are made, a dry run cannot know
    its changes.

    ``REACH``: what a change may affect, and so what is read again after it: the function alone, or the whole device.

    ``reading(machine, want, have, kept)``: one value that the agent has changed, from ``kept.before`` to ``kept.after``, as the
    pass or this function has read it; None while the spec gives it, or it cannot be read. It may raise OSError instead. A kind
    that has it has its values restored when they leave the spec (agent/engine/originals.py).

    ``originals_of(machine, change, known)``: the originals that a change replaces, as changes; for a kind whose states have
    several names or parts. ``before`` is the value that is there now, and ``after`` may be :data:`ANY_VALUE`. ``known``: the
    kind, target and field of each original that is noted. A state that is noted under another name keeps that name.

    ``in_steps(change)``: the change takes several writes, so one that fails or is interrupted may leave any value.

    ``arranged(changes)``: the changes of a plan and of originals, in the order in which they are made, or joined to those that
    take one request.

    ``transients(machine, want, change)``: other values that a change sets on its way, as changes. They are kept before the
    change is made, so that what it sets does not become an original.

    ``set_along(machine, want, change)``: other values that the kernel sets along with a change's, as changes. They are kept
    before the first change of that value.

    ``lifted_by(change)``: the kind whose pending change to the same device removes the change's blocker; empty if none does.

    ``BEFORE_UP``: the kind's changes of a netdev are made before its link is brought up in the same round, where that is
    possible: a driver may take a link that is up down for them.

    ``REMAKES_NETDEV``: the fields whose change makes the driver create the netdev anew.

    ``TARGETS_VANISH``: the kind sets values of netdevs that others make and delete. A change whose target is gone when it is
    written (ENOENT, ENODEV) is no failure.

    ``netdev_index(have, change)``: the index of the netdev that a change of the host concerns, 0 if it concerns none.

    ``undone_by_driver(machine, change)``: the driver, if it sets the value that is there by itself; else empty.

    ``remember(machine, want, have)``: keeps what later plans come back to, after a pass that left everything as the spec
    wants. It may raise the kernel's OSError, and is then called again after the next such pass.

    ``OTHER_WRITERS``: programs known to set the same state, by the names of their processes.

    ``OFF``: what the spec gives so that the agent leaves such state alone, for a kind whose fields are not keys of the spec.
    """

    plan: Callable[[Wanted, Snapshot], list[Change]]
    apply: Callable[[Machine, Change], None]
    UNKNOWN_UNTIL: tuple[str, ...] = ()
    REACH: Literal["function", "device"] = "function"
    reading: Callable[[Machine, Wanted, Snapshot, Change], Reading | None] | None = None
    originals_of: Callable[[Machine, Change, Collection[tuple[str, str, str]]], list[Change]] = (
        lambda machine, change, known: [change]
    )
    in_steps: Callable[[Change], bool] = lambda change: False
    arranged: Callable[[list[Change]], list[Change]] = lambda changes: changes
    transients: Callable[[Machine, Wanted, Change], list[Change]] = lambda machine, want, change: []
    set_along: Callable[[Machine, Wanted, Change], list[Change]] = lambda machine, want, change: []
    lifted_by: Callable[[Change], str] = lambda change: ""
    BEFORE_UP: bool = False
    REMAKES_NETDEV: tuple[str, ...] = ()
    TARGETS_VANISH: bool = False
    netdev_index: Callable[[Snapshot, Change], int] = lambda have, change: 0
    undone_by_driver: Callable[[Machine, Change], str] = lambda machine, change: ""
    remember: Callable[[Machine, Wanted, Snapshot], None] = lambda machine, want, have: None
    OTHER_WRITERS: tuple[str, ...] = ()
    OFF: str = ""


def declared(module: ModuleType) -> Observer:
    """The record of a module: its parts by the names of the record's fields, and defaults for those that it lacks.

    :raises TypeError: the module lacks a part that has no default.
    """
    record = Kind if hasattr(module, "plan") else Observer
    names = (field.name for field in fields(record))
    return record(**{name: getattr(module, name) for name in names if hasattr(module, name)})


def observers_of(module: ModuleType) -> tuple[Observer, ...]:
    """The kinds of a module: the module itself if it has a ``NAME``, and those in its ``KINDS``."""
    rows: tuple[Observer, ...] = getattr(module, "KINDS", ())
    return (declared(module), *rows) if hasattr(module, "NAME") else rows


@cache
def ordered() -> tuple[Observer, ...]:
    """Every observer and kind in the order of a pass; names decide between equals."""
    module_infos = pkgutil.walk_packages(__path__, f"{__name__}.")
    modules = (importlib.import_module(module.name) for module in module_infos if not module.ispkg)
    observers = {observer.NAME: observer for module in modules for observer in observers_of(module)}
    sorter = TopologicalSorter({name: sorted(observers[name].AFTER) for name in sorted(observers)})
    return tuple(observers[name] for name in sorter.static_order())


@cache
def by_name() -> dict[str, Kind]:
    """Every kind that makes changes, by its name, in the order of a pass."""
    return {kind.NAME: kind for kind in ordered() if isinstance(kind, Kind)}


def other_writers() -> dict[str, tuple[str, ...]]:
    """By each kind that makes changes, the programs that are known to set the same state."""
    return {name: kind.OTHER_WRITERS for name, kind in by_name().items()}
