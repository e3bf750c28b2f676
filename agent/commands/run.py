"""`trackbed run`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent import runtime
from agent.commands import _common
from agent.runtime import version
from agent.service import lock, supervisor


@click.command()
def run() -> None:
    """Keep the spec true until stopped; what the systemd unit runs.

    SIGHUP reads the spec again. Exit code: 0 after SIGTERM.

    Example: systemctl start trackbed
    """
    try:
        lock.take(_common.RUN)
    except lock.Held:
        click.echo("`trackbed apply` is at work; this starts as soon as it ends", err=True)
        lock.take(_common.RUN, wait=True)
    _common.STATE.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(Path(sys.argv[0]).resolve()), "worker"]
    supervisor.supervise(command, supervisor.Publisher(_common.RUN, runtime.boot_id(), version()))
