"""`trackbed schema`."""

from __future__ import annotations

import json

import click

from cli.commands import as_json


@click.command()
@as_json
def schema(as_json: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of a node's spec, for editors and checks; --json prints it in one line.

    Exit code: 0.

    Example: trackbed schema > node.schema.json
    """
    from cli.schema import schema

    click.echo(json.dumps(schema(), indent=None if as_json else 2))
