"""`trackbed run`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click

from agent import runtime
from agent.report.names import REPORT
from agent.report.publisher import Publisher
from agent.runtime import version
from agent.service import lock, supervisor
from cli.commands import _common


@click.command()
def run() -> None:
    """Keep the spec true until stopped. The unit trackbed runs this command.

    SIGHUP reads the spec again.

    Exit code: 0 after SIGTERM, 1 its lock cannot be made.

    Example: systemctl start trackbed
    """
    try:
        lock.take(_common.RUN)
    except lock.Held:
        click.echo("`trackbed apply` is at work; this starts as soon as it ends", err=True)
        lock.take(_common.RUN, wait=True)
    except PermissionError:
        raise
    except OSError as error:
        # No service keeps the node true now, so an earlier report must not say that it is ready. Its removal also frees space.
        with suppress(OSError):
            (_common.RUN / REPORT).unlink()
        raise _common.Failed(f"{error}; make room: df {_common.RUN}; df -i {_common.RUN}") from None
    with suppress(OSError):  # if nothing can be kept there, the first write reports it
        _common.STATE.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(Path(sys.argv[0]).resolve()), "worker"]
    supervisor.supervise(command, Publisher(_common.RUN, runtime.boot_id(), version()))
