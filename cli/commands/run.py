"""`trackbed run`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click

from agent import runtime
from agent.report.names import REPORT
from agent.report.publisher import Publisher
from agent.service import lock, supervisor
from cli import node_files
from cli.commands import Failed


@click.command()
def run() -> None:
    """Keep the spec true until stopped. The unit trackbed runs this command.

    SIGHUP reads the spec again.

    Exit code: 0 after SIGTERM, 1 its lock cannot be made.

    Example: systemctl start trackbed
    """
    try:
        lock.take(node_files.RUN)
    except lock.Held:
        click.echo("`trackbed apply` is at work; this starts as soon as it ends", err=True)
        lock.take(node_files.RUN, wait=True)
    except PermissionError:
        raise
    except OSError as error:
        # No service keeps the node true now, so an earlier report must not say that it is ready. Its removal also frees space.
        with suppress(OSError):
            (node_files.RUN / REPORT).unlink()
        raise Failed(f"{error}; make room: df {node_files.RUN}; df -i {node_files.RUN}") from None
    with suppress(OSError):  # if nothing can be kept there, the first write reports it
        node_files.STATE.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(Path(sys.argv[0]).resolve()), "worker"]
    supervisor.supervise(command, Publisher(node_files.RUN, runtime.boot_id(), runtime.version()))
