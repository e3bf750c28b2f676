"""`trackbed status`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from agent.report import names, published
from agent.report.age import say_age
from agent.report.printable import printable
from agent.report.records import Condition, NicVerdict, Report, VfVerdict, to_plain
from agent.report.verdict import Verdict, judge, nic_faults, warnings
from agent.runtime import uptime
from cli import node_files, terminal
from cli.commands import Failed, as_json

LOOK = 0.2
"""Seconds between two readings of the report file under --watch."""


@click.command()
@click.option("--watch", is_flag=True, help="Show every change of the report, until Ctrl-C.")
@click.option("--devices", is_flag=True, help="Show the verdict on each NIC and its VFs in place of the conditions.")
@click.option("--device", metavar="NIC", help="Only this NIC of the spec: its name, or a PCI address or netdev of it.")
@as_json
def status(watch: bool, devices: bool, device: str | None, as_json: bool) -> None:
    """Show whether the node is ready, and if not, why.

    --watch is a live view on a terminal, or else prints a line for each change; with --json, a document for each change.

    Exit code: 0 a fresh report of this boot says that the node (with --device: the NIC) is ready, 1 not. With --watch, the last
    state counts.

    Example: trackbed status --json
    """
    if device is not None:
        if watch or devices:
            raise click.UsageError("--device shows one NIC, once; give it without --watch and --devices")
        sys.exit(_one_nic(device, as_json))
    if watch:
        sys.exit(_watch(as_json, devices))
    verdict = _judge()
    report = verdict.report
    if report is None:
        raise Failed(verdict.reasons[0])
    if as_json:
        publication = published.read(published.PATH) if published.SETTINGS.exists() else None
        click.echo(json.dumps({**to_plain(report), **({"kubernetes": to_plain(publication)} if publication else {})}))
    else:
        for line in _lines(verdict, report, devices):
            click.echo(line)
        # On a terminal the view has shown the last state already.
        for reason in () if sys.stdout.isatty() else verdict.reasons:
            click.echo(printable(f"trackbed: {reason}"), err=True)
    sys.exit(0 if verdict.ready else 1)


def _one_nic(device: str, as_json: bool) -> int:
    """Show the verdict on one NIC, and why it is not as the newest spec has it. :returns: the exit code."""
    verdict = _judge()
    nics = verdict.report.nics if verdict.report else ()
    link = Path("/sys/class/net") / device / "device"
    pci = link.resolve().name if "/" not in device and link.is_symlink() else device.lower()
    nic = next((each for each in nics if device == each.name or pci in (each.pci.lower(), *each.vfs)), None)
    if verdict.report is None or nic is None:
        known = ", ".join(each.name for each in nics)
        raise Failed(f"the report has no NIC {device}; it has: {known or 'none'}; see: trackbed status")
    stale = [] if verdict.fresh else list(verdict.reasons[:1])
    refused = [f"the newest spec was refused: {verdict.report.refusal}"] if verdict.report.refusal else []
    faults = [*stale, *refused, *nic_faults(nic, verdict.report.outcomes)]
    if as_json:
        click.echo(json.dumps({"nic": to_plain(nic), "faults": faults}))
    else:
        for line in (*_nic(nic, len(nic.name)), *(f"  {printable(fault)}" for fault in faults if nic.ready)):
            click.echo(line)
    return 1 if faults else 0


def _judge() -> Verdict:
    return judge(node_files.RUN / names.REPORT)


def _kubernetes(report: Report) -> str:
    """What the reporter last published to Kubernetes about this Node, and whether the report says the same."""
    publication = published.read(published.PATH)
    if publication is None:
        return "nothing is published yet; see: systemctl status trackbed-reporter"
    mark = "ready" if publication.ready else "not ready"
    of_this_boot = publication.boot_id == report.boot_id
    text = f"{mark}, generation {publication.generation}" if of_this_boot else "nothing of this boot"
    until = publication.tainted_until if publication.ready else ""
    waits = f"the taint stays until {until}" if until else ""
    return "; ".join(filter(None, (text, waits, publication.error)))


def _lines(verdict: Verdict, report: Report, devices: bool) -> Iterator[str]:
    name = printable(report.node_name or "this node")
    colour = "red" if not verdict.ready else "yellow" if warnings(report.conditions) else "green"
    yield f"{click.style(name, bold=True)} is {click.style(printable(verdict.summary), fg=colour)}"
    facts = {
        "since": _since(verdict, report),
        "spec": f"{report.spec_hash or '-'}{'' if report.up_to_date else ', not up to date'}",
        "refused": report.refusal,
        "agent": f"{report.agent_version}, generation {report.generation}",
        "kubernetes": _kubernetes(report) if published.SETTINGS.exists() else "",
    }
    for key, fact in facts.items():
        if fact:
            yield from terminal.wrapped(f"{key:<10} ", printable(fact))
    if not verdict.fresh:
        # The conditions below are out of date then.
        for reason in verdict.reasons[:1]:
            yield from terminal.wrapped("silent     ", printable(reason))
    if devices:
        width = max((len(nic.name) for nic in report.nics), default=0)
        for nic in report.nics:
            yield from _nic(nic, width)
        return
    width = max((len(printable(condition.type)) for condition in report.conditions), default=0)
    for severity, heading in (("required", "required"), ("warn", "only warn")):
        group = [condition for condition in report.conditions if condition.severity == severity]
        if group:
            true = sum(condition.status == "True" for condition in group)
            yield click.style(f"{heading}: {true} of {len(group)} True", bold=True)
        for condition in sorted(group, key=lambda each: each.status == "True"):
            yield from _condition(condition, width)


def _nic(nic: NicVerdict, width: int) -> Iterator[str]:
    """The verdict on a NIC, and below it those on its faulty VFs."""
    of_vfs = f"{nic.ready_vfs} of {len(nic.vfs)} VFs ready" if nic.vfs else "no VFs"
    of_vfs += "" if nic.link == "good" else f", link {nic.link}"
    head = f"{nic.name:<{width}}  {nic.pci or '-':<12}"
    yield from _fault(f"  {head}  ", f", {of_vfs}", nic)
    for vf in nic.faulty_vfs:
        pci = nic.vfs[vf.index] if vf.index < len(nic.vfs) else ""
        yield from _fault(f"    VF {vf.index} {pci}  ", "", vf)


def _fault(head: str, tail: str, verdict: NicVerdict | VfVerdict) -> Iterator[str]:
    """The verdict on one function in a line, and its message below."""
    ready = isinstance(verdict, NicVerdict) and verdict.ready
    word = "ready" if ready else "unknown" if verdict.certainty == "unknown" else "not ready"
    why = f" ({verdict.reason})" if verdict.reason else ""
    age = f" for {say_age(uptime() - verdict.since)}"
    yield f"{printable(head)}{click.style(word, fg='green' if ready else 'red')}{age}{printable(why)}{tail}"
    yield from terminal.wrapped("      ", printable(verdict.message)) if verdict.message else ()


def _since(verdict: Verdict, report: Report) -> str:
    """When the node became ready or not ready; empty if that is unknown."""
    if not verdict.fresh or not report.since:
        return ""
    age = max(0.0, uptime() - report.since)
    # Computed from the age, since the clock may have been set after the time was recorded.
    return f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(time.time() - age))} ({say_age(age)})"


def _condition(condition: Condition, width: int) -> Iterator[str]:
    """A condition in one line, or, where a terminal is narrower, with its message below it."""
    bad = "yellow" if condition.severity == "warn" or condition.status == "Unknown" else "red"
    status = click.style(f"{condition.status:<7}", fg="green" if condition.status == "True" else bad)
    head = f"  {printable(condition.type):<{width}}  {status}  {printable(condition.reason)}"
    text = printable(condition.text)
    if not text:
        yield head
    elif terminal.fits(f"{head}  {text}"):
        yield f"{head}  {text}"
    else:
        yield head
        yield from terminal.wrapped("      ", printable(condition.message))
        yield from terminal.wrapped("      do: ", printable(condition.remedy)) if condition.remedy else ()


def _watch(as_json: bool, devices: bool) -> int:
    screen = terminal.Screen() if terminal.live() and not as_json else None
    shown: Verdict | None = None
    code = 1
    try:
        while True:
            verdict = _judge()
            code = 0 if verdict.ready else 1
            if screen is not None:
                screen.show(view(verdict, devices))
            elif shown != verdict.without_heartbeat():
                shown = verdict.without_heartbeat()
                _print(verdict, as_json)
            time.sleep(LOOK)
    except KeyboardInterrupt:
        return code


def view(verdict: Verdict, devices: bool = False) -> Iterator[str]:
    """The lines of the live view."""
    report = verdict.report
    if report is None:
        yield printable(f"trackbed: {verdict.reasons[0]}")
        return
    yield from _lines(verdict, report, devices)
    yield f"heartbeat  {verdict.age:.0f} s ago; Ctrl-C ends this view"
    for outcome in report.outcomes:
        if outcome.result != "applied":
            yield f"  {terminal.say_outcome(outcome)}"


def _print(verdict: Verdict, as_json: bool) -> None:
    report, reasons = verdict.report, verdict.reasons
    if as_json:
        click.echo(json.dumps({"ready": verdict.ready, "reasons": reasons, "report": to_plain(report)}))
        return
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    generation = f"generation {report.generation}" if report else "no report"
    parts = [when, verdict.summary, generation, "; ".join(reasons)]
    click.echo(printable("  ".join(parts).rstrip()))
