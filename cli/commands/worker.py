"""`trackbed worker`: the other half of `run`."""

from __future__ import annotations

from functools import partial

import click

from cli import node_files


@click.command(hidden=True)
@click.option("--activity", "activity_fd", type=int, default=None)
@click.option("--avoid", "hung", multiple=True)
def worker(activity_fd: int | None, hung: tuple[str, ...]) -> None:
    """Do the kernel I/O for `run`, which starts this command."""
    from agent import linux
    from agent.report import names, published
    from agent.service import worker as process

    wait_until_published = partial(published.wait_until_not_ready, node_files.RUN / names.REPORT)
    machine = linux.machine(each_alone=bool(hung))
    process.main(machine, node_files.SPEC, node_files.RUN, node_files.STATE, hung, activity_fd, wait_until_published)
