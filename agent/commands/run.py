"""`trackbed run`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent import boot, cli, lock, supervise
from agent.version import version


@click.command()
def run() -> None:
    """Keep the spec true until stopped; what the systemd unit runs.

    SIGHUP reads the spec again. Exit code: 0 after SIGTERM.

    Example: systemctl start trackbed
    """
    try:
        lock.take(cli.RUN)
    except lock.Held:
        click.echo("`trackbed apply` is at work; this starts as soon as it ends", err=True)
        lock.take(cli.RUN, wait=True)
    cli.STATE.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(Path(sys.argv[0]).resolve()), "worker"]
    supervise.supervise(command, supervise.Publisher(cli.RUN, boot.boot_id(), version()))
