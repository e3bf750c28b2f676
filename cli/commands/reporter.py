"""`trackbed reporter`."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import click

from agent.report import names, published
from agent.runtime import notify_ready
from cli import node_files
from cli.commands import Failed

FILE = click.Path(path_type=Path)


@click.command()
@click.option("--listen", default="127.0.0.1:9809", show_default=True, help="A loopback address and a port.")
@click.option("--socket", "unix", type=FILE, default=None, help="Also serve on this unix socket.")
@click.option(
    "--kubernetes", "settings", type=FILE, default=None, help="Publish to Kubernetes, with this settings file."
)
@click.option("--kubernetes-secret", "secret", type=FILE, default=None, help="File with the token for Kubernetes.")
def reporter(listen: str, unix: Path | None, settings: Path | None, secret: Path | None) -> None:
    """Serve the report over HTTP: /readyz, /livez, /status and /metrics. The unit trackbed-reporter runs this command.

    With --kubernetes the reporter also keeps the conditions, labels and taint of this node's Node, and a Lease. It does so even
    while another process has the port, and tries to bind the port every 5 s.

    Exit code: 0 after SIGTERM, 1 an option or a file that it names is wrong, or the reporter cannot serve.

    Example: trackbed reporter --listen 127.0.0.1:9809
    """
    from agent.reporter.http.address import Address, CannotServe
    from agent.reporter.http.server import serve

    def started(port: int) -> None:
        if port:
            click.echo(f"serving {node_files.RUN / names.REPORT} on port {port}", err=True)
        notify_ready()

    # Its threads hold nothing that must be cleaned up.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if (secret is None) != (settings is None):
        raise Failed("--kubernetes and --kubernetes-secret belong together; give both: the deploy writes the files")
    try:
        if settings is not None and secret is not None:
            _publish(settings, secret)
        address = Address.parse(listen)
        # Any user of the node can take a free port. That must not stop the publishing.
        serve(node_files.RUN / names.REPORT, address, unix, started, keep_trying=settings is not None)
    except CannotServe as error:
        raise Failed(str(error)) from None


def _publish(file: Path, secret: Path) -> None:
    """Publish in one thread, watch the Node in another, and in a third one listen for changes of the report and the labels."""
    from agent.reporter import inotify
    from agent.reporter.kubernetes.identity import BoundToken
    from agent.reporter.kubernetes.publish import Files, Publication
    from agent.reporter.settings import LABELS, read_settings

    try:
        settings = read_settings(file)
    except ValueError as error:
        raise Failed(str(error)) from None
    folder = Path(os.environ.get("STATE_DIRECTORY", "."))  # systemd's name for StateDirectory=
    who = BoundToken(settings, folder, secret)
    files = Files(node_files.RUN / names.REPORT, LABELS, published.PATH, folder / "published.json")
    publication = Publication(settings, who, files)
    folders = (
        inotify.Folder(node_files.RUN, publication.report_written),
        inotify.Folder(LABELS.parent, publication.wake, written=True),
    )
    for work in (publication.run, publication.watch.follow, lambda: inotify.listen(*folders)):
        threading.Thread(target=_or_end, args=(work,), daemon=True).start()


def _or_end(work: Callable[[], None]) -> None:
    """If a publishing thread ends, end the process: it would go on answering, and publish nothing. systemd restarts it."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
