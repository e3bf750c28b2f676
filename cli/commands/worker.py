"""`trackbed worker`: the other half of `run`."""

from __future__ import annotations

import click

from cli.commands import _common


@click.command(hidden=True)
@click.option("--activity", "activity_fd", type=int, default=None)
@click.option("--avoid", "hung", multiple=True)
def worker(activity_fd: int | None, hung: tuple[str, ...]) -> None:
    """Do the kernel I/O for `run`, which starts this command."""
    from agent import linux
    from agent.report import names, published
    from agent.service import worker as process

    def wait_until_published(announcement: str) -> str:
        return published.wait_until_not_ready(_common.RUN / names.REPORT, announcement)

    machine = linux.machine(each_alone=bool(hung))
    process.main(machine, _common.SPEC, _common.RUN, _common.STATE, hung, activity_fd, wait_until_published)
