"""The running lab's nodes, for benchmarks that need real SR-IOV or systemd."""

from __future__ import annotations

import click

import lab


def nodes() -> tuple[lab.Node, ...]:
    """The nodes of the running lab.

    :raises click.ClickException: the lab is down.
    """
    try:
        return lab.nodes()
    except lab.LabError as error:
        raise click.ClickException(str(error)) from None
