"""`trackbed wait`."""

from __future__ import annotations

import json
import sys
import time

import click

from agent import boot, cli, supervise, verdict


@click.command()
@click.option("--hash", "wanted_hash", default=None, help="Wait for this spec to be the one that is ready.")
@click.option("--first-pass", is_flag=True, help="Wait for the first verified pass since the boot instead.")
@click.option("--timeout", default=0.0, help="Give up after so many seconds; 0 never does.")
@cli.as_json
def wait(wanted_hash: str | None, first_pass: bool, timeout: float, as_json: bool) -> None:
    """Wait until the node is ready.

    Exit code: 0 it is, 1 not within the time (the reasons are printed).

    Example: trackbed wait --first-pass --timeout 300
    """
    deadline = time.monotonic() + timeout if timeout else None
    while True:
        reasons = _first_pass_missing() if first_pass else _not_ready(wanted_hash)
        over = deadline is not None and time.monotonic() >= deadline
        if as_json and (over or not reasons):
            click.echo(json.dumps({"ready": not reasons, "reasons": reasons}))
            sys.exit(1 if reasons else 0)
        if not reasons:
            return
        if over:
            raise cli.Failed("\n".join([f"not ready after {timeout:.0f} s", *reasons]))
        # The report is a file that is replaced: looking at it costs less than a watch that must survive restarts.
        time.sleep(0.1)


def _first_pass_missing() -> list[str]:
    try:
        if (cli.RUN / supervise.FIRST_PASS).read_text().strip() == boot.boot_id():
            return []
    except FileNotFoundError:
        pass
    return ["no pass of this boot has verified the node yet", *_not_ready(None)]


def _not_ready(wanted_hash: str | None) -> list[str]:
    try:
        return verdict.why_not(verdict.read_report(cli.RUN), wanted_hash)
    except verdict.NoReport as error:
        return [str(error)]
