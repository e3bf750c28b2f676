"""`trackbed status`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import click

from agent.commands import _common
from agent.report import names, published
from agent.report.printable import printable
from agent.report.published import Published
from agent.report.records import Report, to_plain
from agent.report.verdict import Verdict, judge

LOOK = 0.2
"""Seconds between two looks at the report file under --watch."""


@click.command()
@click.option("--watch", is_flag=True, help="Show every change of the report, until Ctrl-C.")
@_common.as_json
def status(watch: bool, as_json: bool) -> None:
    """Say whether the node is ready, and why not.

    With --watch, a live view on a terminal, else a line a change; with --json, a document a change.

    Exit code: 0 only when it is ready by a fresh report of this boot, else 1; with --watch, as it was at the end.

    Example: trackbed status --json
    """
    if watch:
        sys.exit(_watch(as_json))
    verdict = _judge()
    report = verdict.report
    if report is None:
        raise _common.Failed(verdict.reasons[0])
    told = published.read(published.PATH) if published.SETTINGS.exists() else None
    if as_json:
        click.echo(json.dumps({**to_plain(report), **({"kubernetes": to_plain(told)} if told else {})}))
    else:
        for line in _lines(report, verdict.ready):
            click.echo(line)
        if published.SETTINGS.exists():
            click.echo(printable(_kubernetes(report, told)))
        for reason in verdict.reasons:
            click.echo(printable(f"trackbed: {reason}"), err=True)
    sys.exit(0 if verdict.ready else 1)


def _judge() -> Verdict:
    return judge(_common.RUN / names.REPORT)


def _kubernetes(report: Report, told: Published | None) -> str:
    """What the Node says, beside what the report does."""
    if told is None:
        return "kubernetes nothing is published yet; see: systemctl status trackbed-reporter"
    mark = "ready" if told.ready else "not ready"
    said = f"{mark}, generation {told.generation}" if told.boot_id == report.boot_id else "nothing of this boot"
    return f"kubernetes {said}{f'; {told.error}' if told.error else ''}"


_COLOURS = {"True": "green", "False": "red", "Unknown": "yellow"}


def _lines(report: Report, ready: bool) -> Iterator[str]:
    yield f"node       {printable(report.node_name or '-')}"
    yield f"ready      {click.style('yes', fg='green') if ready else click.style('no', fg='red')}"
    yield f"spec       {printable(report.spec_hash or '-')}"
    if report.refusal:
        yield f"refused    {printable(report.refusal)}"
    yield f"agent      {printable(report.agent_version)}, generation {report.generation}"
    for condition in report.conditions:
        colour = _COLOURS[condition.status] if condition.severity == "required" else "cyan"
        state = click.style(f"{condition.status:<8}", fg=colour)
        said = printable(f"{condition.reason}  {condition.message}")
        yield f"  {printable(condition.type):<18} {state} {said}".rstrip()


def _watch(as_json: bool) -> int:
    screen = _common.Screen() if _common.live() and not as_json else None
    shown: Verdict | None = None
    code = 1
    try:
        while True:
            verdict = _judge()
            code = 0 if verdict.ready else 1
            if screen is not None:
                screen.show(_view(verdict))
            elif shown != verdict.without_heartbeat():
                shown = verdict.without_heartbeat()
                _print(verdict, as_json)
            time.sleep(LOOK)
    except KeyboardInterrupt:
        return code


def _view(verdict: Verdict) -> Iterator[str]:
    report = verdict.report
    if report is None:
        yield printable(f"trackbed: {verdict.reasons[0]}")
        return
    yield from _lines(report, verdict.ready)
    age = max(0.0, time.time() - report.heartbeat)
    yield f"heartbeat  {age:.0f} s ago; Ctrl-C ends this view"
    for outcome in report.outcomes:
        if outcome.result != "applied":
            yield f"  {_common.say_outcome(outcome)}"


def _print(verdict: Verdict, as_json: bool) -> None:
    report, reasons = verdict.report, verdict.reasons
    if as_json:
        click.echo(json.dumps({"ready": verdict.ready, "reasons": reasons, "report": to_plain(report)}))
        return
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    generation = f"generation {report.generation}" if report else "no report"
    parts = [when, "ready" if verdict.ready else "not ready", generation, "; ".join(reasons)]
    click.echo(printable("  ".join(parts).rstrip()))
