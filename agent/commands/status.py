"""`trackbed status`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import click

from agent.commands import _common
from agent.report import published, verdict
from agent.report.printable import printable
from agent.report.published import Published
from agent.report.records import Report, to_plain

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
    try:
        report = verdict.read_report(_common.RUN)
    except verdict.NoReport as error:
        raise _common.Failed(str(error)) from None
    reasons = verdict.why_not(report, None)
    told = published.read(published.PATH) if published.SETTINGS.exists() else None
    if as_json:
        click.echo(json.dumps({**to_plain(report), **({"kubernetes": to_plain(told)} if told else {})}))
    else:
        for line in _lines(report, not reasons):
            click.echo(line)
        if published.SETTINGS.exists():
            click.echo(printable(_kubernetes(report, told)))
        for reason in reasons:
            click.echo(printable(f"trackbed: {reason}"), err=True)
    sys.exit(1 if reasons else 0)


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
    said: tuple[Report | None, list[str]] | None = None
    code = 1
    try:
        while True:
            report, reasons = _look()
            code = 1 if reasons else 0
            if screen is not None:
                screen.show(_view(report, reasons))
            elif said != (_lasting(report), reasons):
                said = (_lasting(report), reasons)
                _say(report, reasons, as_json)
            time.sleep(LOOK)
    except KeyboardInterrupt:
        return code


def _look() -> tuple[Report | None, list[str]]:
    try:
        report = verdict.read_report(_common.RUN)
    except verdict.NoReport as error:
        return None, [str(error)]
    return report, verdict.why_not(report, None)


def _lasting(report: Report | None) -> Report | None:
    """Without what each heartbeat changes: a generation is what tells two reports apart."""
    from attrs import evolve

    return None if report is None else evolve(report, heartbeat=0.0, uptime=0.0)


def _view(report: Report | None, reasons: list[str]) -> Iterator[str]:
    if report is None:
        yield printable(f"trackbed: {reasons[0]}")
        return
    yield from _lines(report, not reasons)
    age = max(0.0, time.time() - report.heartbeat)
    yield f"heartbeat  {age:.0f} s ago; Ctrl-C ends this view"
    for outcome in report.outcomes:
        if outcome.result != "applied":
            yield f"  {_common.say_outcome(outcome)}"


def _say(report: Report | None, reasons: list[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"ready": not reasons, "reasons": reasons, "report": to_plain(report)}))
        return
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    generation = f"generation {report.generation}" if report else "no report"
    said = "  ".join([when, "ready" if not reasons else "not ready", generation, "; ".join(reasons)]).rstrip()
    click.echo(printable(said))
