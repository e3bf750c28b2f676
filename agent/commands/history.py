"""`trackbed history`."""

from __future__ import annotations

import json
import time

import click

from agent.commands import _common
from agent.report.history import Entry, read
from agent.report.options import number
from agent.report.printable import printable
from agent.report.records import to_plain


@click.command()
@click.option("--last", type=click.IntRange(1), default=None, help="Only so many of the newest entries.")
@click.option("--since", type=number("hours", 0.0, 1e6), default=None, help="Only those of the last so many hours.")
@click.option("--device", default=None, help="Only those about this PCI address, or `host`.")
@_common.as_json
def history(last: int | None, since: float | None, device: str | None, as_json: bool) -> None:
    """Show what was changed on this node, when, why, and what somebody else kept putting back.

    Why: start, spec (another one was adopted), event (of which device), resync, retry, or apply. It goes back over
    reboots, for at most two megabytes. --json prints a document a line.

    Exit code: 0, also if there is nothing.

    Example: trackbed history --last 20
    """
    try:
        entries = list(read(_common.STATE))
    except OSError as error:
        raise _common.Failed(f"{error.filename}: {error.strerror}; run as root") from None
    if since is not None:
        entries = [entry for entry in entries if entry.time >= time.time() - since * 3600]
    if device is not None:
        entries = [entry for entry in entries if entry.outcome.change.device == device]
    boot = ""
    for entry in entries[-last:] if last else entries:
        if as_json:
            click.echo(json.dumps(to_plain(entry)))
            continue
        if entry.boot_id != boot:
            boot = entry.boot_id
            click.echo(click.style(f"boot {printable(boot)}", bold=True))
        click.echo(_line(entry))
    if not entries and not as_json:
        click.echo("nothing was changed yet")


def _line(entry: Entry) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    why = printable(f"({entry.trigger}; spec {entry.spec_hash})")
    return f"{when}  {_common.say_outcome(entry.outcome)}  {why}"
