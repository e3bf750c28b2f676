"""`trackbed history`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import click

from agent.report.history import Entry, read
from agent.report.options import number
from agent.report.printable import printable
from agent.report.records import HOST, Change, Disruption, Outcome, Result, to_plain
from agent.report.target import is_vf, vf_index
from agent.spec.ranges import format_ranges
from cli import node_files, terminal
from cli.commands import Failed, as_json

PASS = attrgetter("boot_id", "time", "trigger", "spec_hash")
"""The key by which entries belong to one pass."""
FEW = 3
"""If a pass made more writes than this to one device, they are shown as one line."""


@click.command()
@click.option("--all", "every", is_flag=True, help="Show each write by itself.")
@click.option(
    "--last", type=click.IntRange(1), default=None, help="Show only this number of the newest passes, or writes."
)
@click.option(
    "--since", type=number("hours", 0.0, 1e6), default=None, help="Show only those of this number of last hours."
)
@click.option("--device", default=None, help="Show only those of this PCI address, or of `host`.")
@as_json
def history(every: bool, last: int | None, since: float | None, device: str | None, as_json: bool) -> None:
    """Show the changes on this node: when each was made and why, and which ones another program undid again and again.

    The history lists passes. More than three writes of a pass to one device are one line; --all shows each write by itself. The
    reason of a pass is start, spec (another spec came into force), event (with the device), resync, retry, or apply. The file
    survives reboots, and has at most two megabytes. --json prints a document for each write.

    Exit code: 0, also if there are no changes, 1 the history cannot be read.

    Example: trackbed history --last 20
    """
    damaged: dict[Path, int] = {}
    try:
        entries = list(read(node_files.STATE, damaged.__setitem__))
    except OSError as error:
        remedy = "run as root" if isinstance(error, PermissionError) else "delete it, if no program needs it"
        raise Failed(f"{error.filename}: {error.strerror}; {remedy}") from None
    for path, lines in damaged.items():
        click.echo(f"{path}: {lines} lines cannot be read and are left out", err=True)
    kept = bool(entries)
    if since is not None:
        entries = [entry for entry in entries if entry.time >= time.time() - since * 3600]
    if device is not None:
        entries = [entry for entry in entries if entry.outcome.change.device == device]
    if as_json:
        for entry in entries[-last:] if last else entries:
            click.echo(json.dumps(to_plain(entry)))
        return
    passes = [[entry] for entry in entries] if every else [list(one_pass) for _, one_pass in groupby(entries, key=PASS)]
    boot = ""
    for one_pass in passes[-last:] if last else passes:
        if one_pass[0].boot_id != boot:
            boot = one_pass[0].boot_id
            click.echo(click.style(f"boot {printable(boot)}", bold=True))
        for line in _write(one_pass[0]) if every else lines_of_pass(one_pass):
            click.echo(line)
    if not entries and not damaged:
        click.echo("no change of this device or time is kept" if kept else "nothing was changed yet")


def _write(entry: Entry) -> Iterator[str]:
    """One write in one line."""
    running = f"; running: {', '.join(entry.suspects)}" if entry.suspects else ""
    why = printable(f"({entry.trigger}; spec {entry.spec_hash}{running})")
    yield f"{_when(entry)}  {terminal.say_outcome(entry.outcome)}  {why}"


def lines_of_pass(of_pass: Sequence[Entry]) -> Iterator[str]:
    """When and why a pass ran, and what it did to each device."""
    first = of_pass[0]
    yield printable(f"{_when(first)}  {_shortened(first.trigger)}  (spec {first.spec_hash})")
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in (entry.outcome for entry in of_pass):
        groups.setdefault((outcome.change.device, outcome.result, outcome.error), []).append(outcome)
    for outcomes in groups.values():
        for result, what in _of_device(outcomes):
            yield from terminal.wrapped(f"  {terminal.say_result(result)} ", printable(what))
    if running := sorted({name for entry in of_pass for name in entry.suspects}):
        what = f"{', '.join(running)}: known to set such values; who set these is not known"
        yield from terminal.wrapped(f"  {'running':<11} ", printable(what))


def _of_device(outcomes: Sequence[Outcome]) -> Iterator[tuple[Result, str]]:
    """The outcomes of one device in one pass that have the same result and error."""
    first = outcomes[0]
    if len(outcomes) <= FEW:
        yield from ((outcome.result, terminal.explained(outcome)) for outcome in outcomes)
    elif first.result == "applied":
        yield "applied", _made([outcome.change for outcome in outcomes])
    else:
        yield first.result, f"{terminal.explained(first)} (and {len(outcomes) - 1} more like this)"


def _when(entry: Entry) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))


def _shortened(trigger: str) -> str:
    """A trigger; an event of many devices with the first of them."""
    word, *devices = trigger.split(" ")
    return trigger if len(devices) <= FEW else f"{word} {devices[0]} and {len(devices) - 1} more"


def _made(changes: list[Change]) -> str:
    """A short summary of the changes to one device, with their number."""
    counts = [change for change in changes if change.kind == "vfs" and change.field == "count"]
    vfs = {vf_index(change.target) for change in changes if is_vf(change.target)}
    parts = []
    if counts:
        had, has = counts[0].before or 0, counts[-1].number
        parts.append(f"made {has} VFs{f' in place of {had}' if had else ''}" if has else f"removed {had} VFs")
    if vfs and counts and counts[-1].number:
        parts[-1] += " and configured them"
    elif vfs:
        parts.append(f"configured VF {format_ranges(vfs)}")
    kinds = Counter(change.kind for change in changes if not is_vf(change.target) and change not in counts)
    if kinds:
        parts.append(f"set {', '.join(kinds)}{'' if changes[0].device == HOST else ' of the PF'}")
    worst = max(change.disruption for change in changes)
    level = f" [{worst}]" if worst > Disruption.NONE else ""
    notes = Counter(change.note for change in changes if change.note)
    why = "".join(f"; {count} of them: {note}" for note, count in notes.items())
    return f"{changes[0].device}: {'; '.join(parts)}: {len(changes)} writes{level}{why}"
