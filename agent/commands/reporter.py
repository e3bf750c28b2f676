"""`trackbed reporter`."""

from __future__ import annotations

from pathlib import Path

import click

from agent import cli, supervise
from agent.notify import notify

FILE = click.Path(path_type=Path)


@click.command()
@click.option("--listen", default="127.0.0.1:9809", show_default=True, help="An IP address and a port.")
@click.option("--tls-cert", "certificate", type=FILE, default=None, help="A PEM certificate, and those that sign it.")
@click.option("--tls-key", "key", type=FILE, default=None, help="The certificate's key.")
@click.option("--token-file", "token", type=FILE, default=None, help="Holds the token that each request must carry.")
@click.option("--socket", "unix", type=FILE, default=None, help="A unix socket to serve on, too.")
def reporter(listen: str, certificate: Path | None, key: Path | None, token: Path | None, unix: Path | None) -> None:
    """Serve the report over HTTP: /readyz, /livez, /status and /metrics; what the unit trackbed-reporter runs.

    Anywhere but on this machine's own address it asks for TLS and a token.

    Exit code: 0 after SIGTERM, 1 if it cannot serve.

    Example: trackbed reporter --listen 127.0.0.1:9809
    """
    from agent.reporter.server import Address, Guard, Refused, serve

    def started(port: int) -> None:
        click.echo(f"serving {cli.RUN / supervise.REPORT} on port {port}", err=True)
        notify("READY=1")

    try:
        address = Address.parse(listen)
        serve(cli.RUN / supervise.REPORT, address, Guard.load(address, certificate, key, token), unix, started)
    except Refused as error:
        raise cli.Failed(str(error)) from None
