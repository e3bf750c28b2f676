"""The running lab's nodes, for benchmarks that look at what only they have."""

from __future__ import annotations

import click

import lab


def nodes() -> tuple[lab.Node, ...]:
    """All of them.

    :raises click.ClickException: the lab is down.
    """
    try:
        return lab.nodes()
    except lab.LabError as error:
        raise click.ClickException(str(error)) from None
