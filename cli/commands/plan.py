"""`trackbed plan`."""

from __future__ import annotations

import json
import sys

import click

from agent.report import diff
from agent.report.printable import printable
from agent.report.records import to_plain
from agent.spec.node import spec_hash
from cli import node_files
from cli.commands import Failed, as_json


@click.command()
@node_files.spec_option
@as_json
def plan(spec_file: str | None, as_json: bool) -> None:
    """Show the changes that the agent would make, with their disruption and the affected users. Nothing is changed.

    The marks: ~ changes a value, + adds something, - removes something, and ? is known only after another kind's changes. Equal
    changes of several VFs are one line.

    Exit code: 0 no changes, 2 changes, 1 an error (also if this node cannot match the spec).

    Example: trackbed plan --spec candidate.json
    """
    from agent import linux
    from agent.engine.dry_run import dry_run
    from agent.engine.originals import ORIGINALS, Originals

    try:
        spec = node_files.read_spec(spec_file)
        planned = dry_run(linux.machine(), spec, Originals.load(node_files.RUN / ORIGINALS, keep=False))
    except (Failed, OSError) as error:
        if as_json:
            click.echo(json.dumps({"spec_hash": "", "changes": [], "errors": str(error).splitlines()}))
            sys.exit(1)
        raise
    if as_json:
        document = {"spec_hash": spec_hash(spec), "changes": to_plain(planned.changes), "errors": list(planned.errors)}
        click.echo(json.dumps(document))
    else:
        for line in diff.lines(planned.changes, planned.names):
            click.echo(line)
        if len(planned.changes) > 1:
            click.echo()
        for error_text in planned.errors:
            click.echo(printable(f"trackbed: {error_text}"), err=True)
        if planned.changes or not planned.errors:
            click.echo(click.style(diff.summary(planned.changes), bold=True))
    sys.exit(1 if planned.errors else 2 if planned.changes else 0)
