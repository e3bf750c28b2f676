"""Prints a plan for people: the changes of each device, and a summary line.

click.echo removes the colours if the output is not a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import click
from attrs import evolve

from agent.report.printable import printable
from agent.report.records import WHOLE_KIND, Change, Disruption, Value, say_value
from agent.report.target import is_vf, vf_index, vf_target
from agent.spec.ranges import format_ranges

NOTHING = (None, "absent")
"""Values that mean "not there"."""

WIDEST = 40
"""Columns: the names of fields are padded to this width at most."""

NAMED = 3
"""How many users the summary names at most."""


def lines(changes: Iterable[Change], names: Mapping[str, str]) -> Iterator[str]:
    """Lines for each device and its changes, in the plan's order. Equal changes of several VFs are one line.

    :param names: the NICs' names in the spec, by PCI address.
    """
    labelled = _labelled(changes)
    for device in dict.fromkeys(change.device for change, _ in labelled):
        name = names.get(device, "")
        yield click.style(printable(f"{device}{f' {name}' if name else ''}"), bold=True)
        own = [(change, label) for change, label in labelled if change.device == device]
        width = min(WIDEST, max(len(label) for _, label in own))
        for change, label in own:
            yield from _lines(change, label, width)


def summary(changes: Sequence[Change]) -> str:
    """The plan in one line: how many changes, how they disrupt, and whom they disturb."""
    made = [change for change in changes if change.field != WHOLE_KIND]
    levels = Counter(change.disruption for change in made if change.disruption > Disruption.NONE)
    level = ", ".join(f"{levels[level]} {level}" for level in sorted(levels, reverse=True))
    parts = [f"{len(made)} to change{f' ({level})' if level else ''}"] if changes else ["nothing to change"]
    if disturbing := [change for change in made if change.affected]:
        users = list(dict.fromkeys(user for change in disturbing for user in change.affected))
        more = f" and {len(users) - NAMED} more" if len(users) > NAMED else ""
        verb = "disturbs" if len(disturbing) == 1 else "disturb"
        parts.append(f"{len(disturbing)} {verb} {', '.join(users[:NAMED])}{more}")
    if impossible := sum(1 for change in made if change.blocker):
        parts.append(f"{impossible} cannot be made")
    if later := list(dict.fromkeys(change.kind for change in changes if change.field == WHOLE_KIND)):
        parts.append(f"{', '.join(later)} known later")
    return printable(", ".join(parts))


def _labelled(changes: Iterable[Change]) -> list[tuple[Change, str]]:
    """The changes with their labels. Equal changes of several VFs of one PF become one, whose label names these VFs."""
    vfs_of: dict[Change, list[int]] = {}
    for change in changes:
        if is_vf(change.target):
            # As if all were of one VF: then equal changes are one key.
            vfs_of.setdefault(evolve(change, target=vf_target(change.device, 0)), []).append(vf_index(change.target))
        else:
            vfs_of[change] = []
    return [(change, _label(change, vfs)) for change, vfs in vfs_of.items()]


def _label(change: Change, vfs: Sequence[int]) -> str:
    which = f"VF {format_ranges(vfs)} " if vfs else ""
    return printable(f"{which}{change.kind}{'' if change.field == WHOLE_KIND else f' {change.field}'}")


def _lines(change: Change, label: str, width: int) -> Iterator[str]:
    mark, colour = _mark(change)
    notes = ["(as it was before)"] if change.original else []
    notes += [printable(f"({change.note})")] if change.note else []
    notes += [] if change.disruption is Disruption.NONE else [click.style(f"[{change.disruption}]", fg="yellow")]
    notes += [click.style(printable(f"disturbs {', '.join(change.affected)}"), fg="red")] if change.affected else []
    parts = [f"  {click.style(mark, fg=colour)} {label:<{width}}", _values(change, mark), *notes]
    yield "  ".join(part for part in parts if part).rstrip()
    if change.blocker:
        yield click.style(printable(f"      cannot: {change.blocker}; {change.remedy}"), fg="red")


def _mark(change: Change) -> tuple[str, str]:
    if change.field == WHOLE_KIND:
        return "?", "cyan"
    if change.before in NOTHING:
        return "+", "green"
    return ("-", "red") if change.after in NOTHING else ("~", "yellow")


def _values(change: Change, mark: str) -> str:
    """The values before and after, without those that the mark implies."""
    before, after = _value(change.before, "red"), _value(change.after, "green")
    if mark == "~":
        return f"{before} -> {after}"
    value = change.before if mark == "-" else change.after
    return "" if value == "present" else before if mark == "-" else after


def _value(value: Value, colour: str) -> str:
    return click.style(printable(say_value(value)) or "(empty)", fg=colour)
