"""`trackbed worker`: the other half of `run`."""

from __future__ import annotations

import click

from agent import cli
from agent.change import Change


@click.command(hidden=True)
@click.option("--activity", "activity_fd", type=int, default=None)
@click.option("--avoid", "hung", multiple=True)
def worker(activity_fd: int | None, hung: tuple[str, ...]) -> None:
    """Do the kernel I/O for `run`."""
    from agent import linux, published, supervise
    from agent import worker as process

    def acknowledged(change: Change) -> str:
        return published.wait_until_not_ready(cli.RUN / supervise.REPORT, change)

    process.main(linux.machine(), cli.SPEC, cli.RUN, cli.STATE, hung, activity_fd, acknowledged)
