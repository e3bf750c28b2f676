"""`trackbed wait`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from agent import runtime
from agent.report import names, published, publisher
from agent.report.options import seconds
from agent.report.printable import printable
from agent.report.verdict import judge
from cli import node_files, terminal
from cli.commands import Failed, as_json


@click.command()
@click.option("--hash", "wanted_hash", default=None, help="Wait until the node is ready with this spec.")
@click.option("--first-pass", is_flag=True, help="Wait for the first verified pass since the boot instead.")
@click.option(
    "--joined",
    type=click.Path(path_type=Path),
    default=None,
    help="Do not wait while this file is missing: the node has not joined a cluster yet.",
)
@click.option(
    "--let-go",
    type=seconds,
    default=None,
    help="With --first-pass: after this time, also end once the node is published as not ready in this boot.",
)
@click.option("--timeout", type=seconds, default=0.0, help="Give up after this number of seconds; 0: never.")
@as_json
def wait(
    wanted_hash: str | None,
    first_pass: bool,
    joined: Path | None,
    let_go: float | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Wait until the node is ready. The command does not wait for deferred changes, which `trackbed status` names.

    --json prints ``ready`` and the ``reasons`` why it is not; ``ready`` is null if the command does not wait, due to --joined.

    Exit code: 0 the node is ready, or need not be (--joined, --let-go), 1 it is not ready in time (the reasons are printed).

    Example: trackbed wait --first-pass --timeout 300
    """
    if first_pass and wanted_hash is not None:
        raise click.UsageError("--hash does not belong to --first-pass, which is of any spec; give one of them")
    if let_go is not None and not first_pass:
        raise click.UsageError("--let-go belongs to --first-pass; give that, too")
    if joined is not None and not joined.exists():
        _say(None, [f"does not wait: there is no {joined}, so the node has not joined a cluster"], as_json)
        return
    began = time.monotonic()
    line = terminal.WaitingLine(timeout)
    while True:
        reasons = _first_pass_missing() if first_pass else judge(node_files.RUN / names.REPORT, wanted_hash).reasons
        waited = time.monotonic() - began
        lets_go = first_pass and let_go is not None and waited >= let_go and _published()
        if not reasons or lets_go or 0 < timeout <= waited:
            break
        line.show(reasons)
        # Reading the report, which is small, costs less than a watch that must survive restarts of the agent.
        time.sleep(0.1)
    line.clear()
    if reasons and lets_go:
        reasons = ["let go unverified: the node is published as not ready", *reasons]
    elif reasons and not as_json:
        raise Failed("\n".join([f"not ready after {timeout:g} s", *reasons]))
    _say(not reasons, reasons, as_json)
    sys.exit(1 if reasons and not lets_go else 0)


def _say(ready: bool | None, reasons: Sequence[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"ready": ready, "reasons": reasons}))
    elif reasons:
        click.echo("\n".join(map(printable, reasons)), err=True)


def _first_pass_missing() -> list[str]:
    try:
        if (node_files.RUN / publisher.FIRST_PASS).read_text().strip() == runtime.boot_id():
            return []
    except FileNotFoundError:
        pass
    return ["no pass of this boot has verified the node yet", *judge(node_files.RUN / names.REPORT).reasons]


def _published() -> bool:
    publication = published.read(published.PATH)
    return publication is not None and publication.not_ready(runtime.boot_id(), 0)
