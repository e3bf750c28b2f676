"""Finds the functions that the entries of a spec select. An entry with ``each`` becomes one NIC for each function.

The code is pure: the same spec and functions always give the same names and numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from attrs import evolve, frozen

from agent.driver_families import family_of, is_passed_through
from agent.hardware.functions import Function
from agent.spec.nic import Nic
from agent.spec.node import NodeSpec
from agent.spec.selector import KEYS, Selector


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

    def members(self) -> Iterator[tuple[Nic, Function, int | None]]:
        """The entry's NICs, one for each function in the order of their PCI addresses, with its number if there is ``each``."""
        for index, function in enumerate(self.functions):
            if self.entry.select.each:
                yield self.entry.member(index, function.address), function, index
            else:
                yield self.entry, function, None


def selections(spec: NodeSpec, functions: Sequence[Function]) -> tuple[Selection, ...]:
    """What each entry of the spec selects, in the spec's order."""
    entries = {nic.name: nic for nic in spec.nics}
    chosen = []
    for nic in spec.nics:
        others = [entries[name].select for name in nic.select.without]
        free = [function for function in functions if not any(_matches(other, function) for other in others)]
        lost = [other for other in others if not any(_matches(other, function) for function in functions)]
        # A domain above ffff has more digits (agent/spec/selector.py), and comes last.
        matching = sorted((f for f in free if _matches(nic.select, f)), key=lambda f: (len(f.address), f.address))
        undecided = [function for function in free if _undecided(nic.select, function, lost)]
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
    return {
        "netdev",
        "driver",
        *(["mac"] if function.link is None else []),
        *(["serial"] if not function.serials else []),
    }


def _matches(selector: Selector, function: Function, unread: Collection[str] = ()) -> bool:
    """Whether all keys match; those in ``unread`` are not compared. ``each`` means NICs, so no NVLink bridge matches it."""
    link = function.link
    if selector.each and function.nvlink_bridge:
        return False
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


def with_other_port(selector: Selector, functions: Sequence[Function]) -> Function | None:
    """The function of which a selector matches another port than the first; None if there is none."""
    ports = ((function, link) for function in functions for link in function.other_ports)
    return next((function for function, link in ports if _matches(selector, evolve(function, link=link))), None)


def _undecided(selector: Selector, function: Function, lost: Sequence[Selector]) -> bool:
    """Whether it is not known now if an entry means a function, since not everything of it could be read.

    With ``each`` this includes one that may match, or may be the NIC of an entry in ``lost``: those that are named in
    ``without`` and match no function now. If it were left out or taken in, the functions after it would get other numbers until
    more of it can be read.
    """
    unread = unknown(function)
    if not selector.each:
        unsure = function.hung or function.unreadable
        return bool(unsure) and _matches(selector, function, unread)
    if not _matches(selector, function, unread):
        return False
    # While it is passed through, it has not the driver by which the other entry knows it.
    hidden = {*unread, *(["driver"] if is_passed_through(function.driver) else [])}
    return not _matches(selector, function) or any(_matches(other, function, hidden) for other in lost)


def unknown(function: Function) -> dict[str, str]:
    """The keys of a selector whose values are not known for a function now, each with the reason."""
    if function.unreadable and not function.vendor:
        return {key: function.unreadable for key in KEYS if key != "pci"}
    hangs = function.unreadable or ("it hangs" if function.hung else "")
    keys: dict[str, str] = {}
    if function.driver is None:
        keys["driver"] = "no driver"
    if hangs or function.serials_unread:
        keys["serial"] = hangs or "its Vital Product Data cannot be read"
    creates_netdev = family_of(function.driver).creates_netdev(function.total_vfs)
    if function.link is None and (creates_netdev or is_passed_through(function.driver)):
        keys["mac"] = keys["netdev"] = "no driver" if function.driver is None else "no netdev here"
    elif hangs and function.link is not None:
        # Its alternative names are not read, and its hardware's address only from a file (_unasked_link in functions.py).
        keys |= dict.fromkeys(("netdev",) if function.link.permanent_mac else ("netdev", "mac"), hangs)
    elif function.renaming:
        keys["netdev"] = "udev has not named its netdev yet"
    return keys
