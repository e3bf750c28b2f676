"""`trackbed fleet report`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import cattrs
import click

from agent.report.options import number
from fleet.api import Failed
from fleet.last_deploy import LastDeploy, default_path, last_deploy
from fleet.report.history import read_history
from fleet.report.prometheus import connected


@click.command()
@click.option("--prometheus", "url", required=True, help="The Prometheus that scrapes the reporters: http://HOST:9090.")
@click.option(
    "--hours", type=number("hours", 1.0, 24.0 * 366), default=24.0, show_default=True, help="How many hours back."
)
@click.option(
    "--html",
    "page_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page to write.",
    default="fleet.html",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, and write no page.")
def report(url: str, hours: float, page_file: Path, as_json: bool) -> None:
    """Write a page on the whole fleet: readiness over time, drift that was repaired, versions, the last deploy's slowest steps.

    The data of the nodes come from Prometheus. The duration of the last deploy comes from a file that the deploy has written on
    this control host. The command connects neither to the nodes nor to the cluster.

    Exit code: 0 written, 1 Prometheus does not answer, or the page cannot be written.

    Example: trackbed fleet report --prometheus http://prometheus:9090 --hours 168 --html fleet.html
    """
    with connected(url, hours, time.time()) as prometheus:
        history = read_history(prometheus)
    deploy = _deploy()
    if as_json:
        click.echo(json.dumps(cattrs.unstructure({"history": history, "deploy": deploy})))
        return
    # Imported here, since importing matplotlib takes a second.
    from fleet.page import write
    from fleet.report.page import page

    write(page_file, page(history, deploy))
    ready = sum(history.is_ready.values())
    click.echo(f"{ready} of {len(history.is_ready)} nodes are ready; the page is {page_file}")


def _deploy() -> LastDeploy | None:
    path = default_path()
    try:
        return last_deploy(path)
    except (OSError, ValueError) as error:
        raise Failed(f"{path} cannot be read: {error}; remove it, the next deploy writes it again") from None
