"""`trackbed doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.report import published
from agent.report.names import REPORT
from agent.report.printable import printable
from agent.report.records import Report, Severity, to_plain
from agent.report.verdict import NoReport, read_report, why_not_fresh
from agent.runtime import boot_id, uptime
from agent.spec.node import NodeSpec, spec_hash
from cli import node_files
from cli.commands import Failed, as_json
from cli.diagnosis import Evidence, Service, diagnose, redirecting
from cli.programs import run

if TYPE_CHECKING:
    from agent.machine import Machine

DEADLINE = 5.0
"""Seconds that each program it runs may take."""

UNIT = "trackbed.service"


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """List the faults of this node with their remedies, in the order in which to repair them.

    Exit code: 0 nothing is wrong, 1 something is (warnings alone count, too).

    Example: trackbed doctor
    """
    findings = diagnose(_evidence())
    if as_json:
        click.echo(json.dumps({"findings": to_plain(findings)}))
    for number, finding in enumerate(() if as_json else findings, start=1):
        click.echo(f"{number}. {_LABELS[finding.severity]} ({finding.stage}): {printable(finding.what)}")
        click.echo(f"   do: {printable(finding.remedy)}")
    if not findings and not as_json:
        click.echo("nothing is wrong")
    sys.exit(1 if findings else 0)


_LABELS: dict[Severity, str] = {
    "required": click.style("problem", fg="red"),
    "warn": click.style("warning", fg="yellow"),
}


def _evidence() -> Evidence:
    from agent import linux

    report, no_report, not_fresh = _read_report()
    spec, fault = _read_spec()
    machine = linux.machine()
    return Evidence(
        service=_service(),
        report=report,
        no_report=no_report,
        not_fresh=not_fresh,
        spec=spec,
        spec_hash=spec_hash(spec) if spec else "",
        spec_fault=fault,
        redirecting=_redirecting(machine, spec) if spec and spec.gpus and spec.gpus.peer_memory else (),
        processes=machine.processes.running(),
        publishes=published.SETTINGS.exists(),
        published=published.read(published.PATH),
    )


def _read_report() -> tuple[Report | None, NoReport | None, list[str]]:
    try:
        report = read_report(node_files.RUN / REPORT)
    except NoReport as error:
        return None, error, []
    return report, None, why_not_fresh(report, boot_id(), uptime())


def _read_spec() -> tuple[NodeSpec | None, str]:
    if not node_files.SPEC.exists():
        return None, f"{node_files.SPEC} does not exist"
    try:
        return node_files.read_spec(None), ""
    except Failed as error:
        # The refusal has a line for each fault, with its remedy.
        return None, f"the spec is refused: {error.message}"


def _service() -> Service | None:
    properties = "ActiveState,UnitFileState,Result,NRestarts,LoadState"
    try:
        ran = run(["systemctl", "show", f"--property={properties}", UNIT], DEADLINE)
    except OSError:
        return None
    return Service.shown(ran.output) if ran.code == 0 else None


def _redirecting(machine: Machine, spec: NodeSpec) -> list[str]:
    """The PCI bridges above the spec's NICs and the GPUs that redirect what one of them writes to another."""
    from agent.hardware.functions import device_path
    from agent.state.snapshot import nics_now
    from cli.topology import gpus

    try:
        ran = run(["lspci", "-D", "-vv"], DEADLINE)
    except OSError:
        return []
    devices = [*nics_now(machine, spec), *(address for address, _ in gpus(machine.files))]
    # Each folder on the way to a device is that of a bridge above it.
    above = {part for address in devices for part in Path(device_path(address)).resolve().parent.parts}
    return sorted(redirecting(ran.output) & above)
