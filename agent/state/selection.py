"""Finds the functions that the entries of a spec select. An entry with ``each`` becomes one NIC for each function.

The code is pure: the same spec and functions always give the same names and numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from agent.hardware.functions import Function
from agent.spec.nic import Nic
from agent.spec.node import NodeSpec
from agent.spec.selector import Selector


@frozen
class Member:
    """A NIC with its own name and one function. ``index``: its number in an entry with ``each``; None for an entry of one."""

    nic: Nic
    function: Function
    index: int | None = None


@frozen
class Selection:
    """The functions of an entry: those that match it, and those in ``undecided`` that may match it and cannot be read now."""

    entry: Nic
    functions: tuple[Function, ...]
    undecided: tuple[Function, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether as many functions match as the entry allows."""
        return self.entry.select.least <= len(self.functions) <= self.entry.select.most

    def members(self) -> tuple[Member, ...]:
        """The entry's NICs: one for each function, in the order of their PCI addresses."""
        if not self.entry.select.each:
            return tuple(Member(self.entry, function) for function in self.functions)
        return tuple(
            Member(self.entry.member(index, function.address), function, index)
            for index, function in enumerate(self.functions)
        )


def selections(spec: NodeSpec, functions: Sequence[Function]) -> tuple[Selection, ...]:
    """What each entry of the spec selects, in the spec's order."""
    entries = {nic.name: nic for nic in spec.nics}
    chosen = []
    for nic in spec.nics:
        others = [entries[name].select for name in nic.select.without]
        free = [function for function in functions if not any(_matches(other, function) for other in others)]
        matching = sorted((f for f in free if _matches(nic.select, f)), key=lambda f: f.address)
        undecided = [function for function in free if _undecided(nic.select, function)]
        chosen.append(Selection(nic, tuple(matching), tuple(undecided)))
    return tuple(chosen)


def unfilled(spec: NodeSpec, functions: Sequence[Function]) -> tuple[Selection, ...]:
    """What those entries select that do not have as many functions as they allow."""
    return tuple(selection for selection in selections(spec, functions) if not selection.fits)


def may_be(spec: NodeSpec, functions: Sequence[Function], function: Function) -> tuple[Nic, ...]:
    """Those entries of the spec that may mean a function, although it is none of the spec's NICs now.

    Such an entry matches the function but cannot be resolved, or it lacks functions, and what tells this one from those can
    change: its netdev's name, its driver, or what cannot be read now.
    """
    return tuple(
        selection.entry
        for selection in selections(spec, functions)
        if function in (*selection.functions, *selection.undecided)
        or (not selection.fits and _matches(selection.entry.select, function, _may_change(function)))
    )


def _may_change(function: Function) -> Collection[str]:
    """The keys of a selector whose values may be others later."""
    return {
        "netdev",
        "driver",
        *(["mac"] if function.link is None else []),
        *(["serial"] if not function.serials else []),
    }


def _matches(selector: Selector, function: Function, unread: Collection[str] = ()) -> bool:
    """Whether all keys match; those in ``unread`` are not compared."""
    link = function.link
    have: dict[str, Collection[str | None]] = {
        "pci": [function.address],
        "mac": [link.permanent_mac] if link else [],
        "netdev": [link.name, *link.altnames] if link else [],
        "vendor": [function.vendor],
        "device": [function.device],
        "driver": [function.driver],
        "serial": function.serials,
    }
    return all(value in have[name] for name, value in selector.keys().items() if name not in unread)


def _undecided(selector: Selector, function: Function) -> bool:
    """Whether a function that does not match now may be a selected one, since not everything of it could be read.

    With ``each`` this includes one without a driver, or whose serial number cannot be read while it hangs: if it did not
    count, the functions after it would get other numbers until it is back.
    """
    if function.unreadable and not function.vendor:
        return selector.pci in (None, function.address)
    unread = {
        *(["driver"] if function.driver is None else []),
        *(["serial"] if function.hung or function.unreadable else []),
    }
    return selector.each and not _matches(selector, function) and _matches(selector, function, unread)
