"""`trackbed bundle`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import click

from cli import node_files
from cli.commands import Failed, as_json


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="The archive to write; the file must not exist yet.  [default: /var/tmp/trackbed-HOST-TIME.tar.gz]",
)
@as_json
def bundle(output: Path | None, as_json: bool) -> None:
    """Collect the facts that support needs in one archive, and print its path.

    Report, spec, history, plan, inspection, kernel log, the units' journal, PCI, links, RDMA, interrupts. Files of
    /etc/kubernetes, environments, and text that looks like a token, password or key are left out. Check the archive before you
    send it. Its not-collected.json names the parts that could not be collected.

    Exit code: 0 the archive was written, also if parts could not be collected; 1 it was not written.

    Example: trackbed bundle
    """
    from cli.support_bundle import collectors, write

    if os.geteuid() != 0:
        raise Failed("most of this is for root only; run as root")
    made = output or Path(f"/var/tmp/trackbed-{socket.gethostname()}-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz")  # noqa: S108
    own = (sys.executable, "-I", str(Path(sys.argv[0]).resolve()))
    try:
        failed = write(made, collectors(own, (node_files.SPEC.parent, node_files.RUN, node_files.STATE)))
    except FileExistsError:
        raise Failed(f"{made} is there already; give another path with --output") from None
    except OSError as error:
        raise Failed(f"{made} cannot be written: {error.strerror}; give another path with --output") from None
    if as_json:
        click.echo(json.dumps({"path": str(made), "not_collected": failed}))
        return
    click.echo(str(made))
    if failed:
        click.echo(f"trackbed: {len(failed)} parts could not be collected; not-collected.json in it says why", err=True)
