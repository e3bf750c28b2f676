"""`trackbed plan`."""

from __future__ import annotations

import json
import sys

import click

from agent.commands import _common
from agent.report.records import to_plain
from agent.spec.node import spec_hash


@click.command()
@_common.spec_option
@_common.as_json
def plan(spec_file: str | None, as_json: bool) -> None:
    """Show what would be changed, each change with its disruption; touch nothing.

    Exit code: 0 nothing to change, 2 changes, 1 an error (also: the spec asks for what this node does not have).

    Example: trackbed plan --spec candidate.json
    """
    from agent import linux
    from agent.engine.dry_run import preview
    from agent.engine.originals import ORIGINALS, Originals

    try:
        spec = _common.read_spec(spec_file)
        found = preview(linux.machine(), spec, Originals.load(_common.RUN / ORIGINALS, keep=False))
    except (_common.Failed, OSError) as error:
        if as_json:
            click.echo(json.dumps({"spec_hash": "", "changes": [], "errors": str(error).splitlines()}))
            sys.exit(1)
        raise
    if as_json:
        document = {"spec_hash": spec_hash(spec), "changes": to_plain(found.changes), "errors": list(found.errors)}
        click.echo(json.dumps(document))
    else:
        for change in found.changes:
            click.echo(_common.say_change(change))
        for error_text in found.errors:
            click.echo(f"trackbed: {error_text}", err=True)
        if not found.changes and not found.errors:
            click.echo("nothing to change")
    sys.exit(1 if found.errors else 2 if found.changes else 0)
