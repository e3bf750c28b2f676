"""`trackbed apply`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import click

from agent.report.options import seconds
from agent.report.printable import printable
from agent.report.records import Disruption, Outcome, to_plain
from agent.report.verdict import explained, failing, is_ready, nic_faults
from agent.service import lock
from agent.service.apply_socket import NAME, ApplyRefused, Progress, ask
from agent.spec.node import NodeSpec, spec_hash
from cli import node_files, terminal
from cli.commands import Failed, as_json

AGAIN = 0.5
"""Seconds after which the next pass runs, if no event comes before."""


@click.command()
@node_files.spec_option
@click.option("--allow", default=None, help="The most disruptive level: none, rebind, link-flap, vf-reset, reboot.")
@click.option(
    "--timeout", type=seconds, default=60.0, show_default=True, help="Seconds for changes, and for devices to come up."
)
@click.option(
    "--device", "nic", default="", metavar="NIC", help="Only this NIC of the spec; wait until its users are gone."
)
@as_json
def apply(spec_file: str | None, allow: str | None, timeout: float, nic: str, as_json: bool) -> None:
    """Make the node match its spec, once, and verify it.

    If the service runs, the service makes the changes: --allow applies while this command runs, and changes that failed or were
    given up are tried again. If the service does not run, this command makes the changes itself.

    With --device, --allow is for this NIC alone, and the command ends well once the NIC is as its spec says.

    Exit code: 0 the node (with --device: the NIC) is ready and its whole spec is applied, 1 not.

    Example: trackbed apply --allow link-flap
    """
    try:
        limit = Disruption.parse(allow) if allow is not None else None
    except ValueError as error:
        raise click.UsageError(f"--allow: {error}") from None
    spec = node_files.read_spec(spec_file)
    if spec.mode == "observe":
        raise Failed("the spec says mode: observe, so nothing is written; set it to enforce, or see: trackbed plan")
    deadline = time.monotonic() + timeout
    if not lock.held(node_files.RUN):
        passes = _by_ourselves(spec, limit, nic, deadline)
    elif spec_file is None:
        passes = _by_the_service(limit, nic, timeout)
    else:
        raise Failed(
            f"the service is running, and keeps {node_files.SPEC} true; write the spec there and `systemctl reload trackbed`, "
            "or stop the service first: systemctl stop trackbed"
        )

    applied: list[Outcome] = []
    progress = Progress(False)
    line = terminal.WaitingLine(timeout)
    for progress in passes:
        applied += [outcome for outcome in progress.outcomes if outcome.result == "applied"]
        faults = _faults(progress, nic)
        # A netdev, a carrier or a probe's answer may still come, so wait. A refused change will not be made by waiting.
        refused = any(_is_refused(outcome, limit if nic else None) for outcome in progress.outcomes)
        if not faults or (refused and not progress.waiting) or time.monotonic() >= deadline:
            break
        line.show(faults)
    line.clear()
    done = bool(progress.conditions) and not _faults(progress, nic)
    _say(progress, applied, nic, done, as_json)
    sys.exit(0 if done else 1)


def _faults(progress: Progress, nic: str) -> list[str]:
    """Why the node, or this NIC, is not ready with the newest spec; empty if it is."""
    of_spec = [c for c in progress.conditions if c.type == "UpToDate" and c.status != "True"]
    if nic:
        refused = [explained(c) for c in of_spec if c.reason == "Refused"]
        verdict = next((each for each in progress.nics if each.name == nic), None)
        known = ", ".join(each.name for each in progress.nics)
        none = f"the last pass has no verdict on a NIC {nic}; it has: {known or 'none'}"
        return [*refused, *(nic_faults(verdict, progress.outcomes) if verdict else [none])]
    # While a part of the newest spec waits, Ready refers to the spec before it.
    faults = [explained(condition) for condition in (*failing(progress.conditions), *of_spec)]
    return faults or ([] if progress.ready else ["the agent does not call it ready"])


def _is_refused(outcome: Outcome, awaited: Disruption | None) -> bool:
    """Whether waiting does not help. ``awaited``: the level up to which users of the device are waited for."""
    if outcome.result == "deferred":
        return awaited is None or outcome.change.disruption > awaited
    return outcome.result == "unsupported"


def _by_ourselves(spec: NodeSpec, limit: Disruption | None, nic: str, deadline: float) -> Iterator[Progress]:
    from agent import linux
    from agent.engine.context import Callbacks, Goal, Memory
    from agent.engine.converge import converge
    from agent.engine.dry_run import dry_run
    from agent.engine.originals import ORIGINALS, Originals
    from agent.engine.readiness import Probes
    from agent.engine.retry import Failures
    from agent.report.history import History
    from agent.service.activity import Activity
    from agent.service.inbox import Inbox

    machine = linux.machine()
    if impossible := dry_run(machine, spec).errors:
        raise Failed("\n".join(impossible))
    try:
        lock.take(node_files.RUN)
    except lock.Held:
        raise Failed("another `trackbed apply` or the service has just started; run this command again") from None
    probes = Probes(machine)
    inbox = Inbox(machine.events.subscribe(), Activity.at(None), lambda: None, probes=probes)
    goal = Goal(spec, asked=lambda: (limit, nic))
    memory = Memory(time.monotonic, Failures(), Originals.load(node_files.RUN / ORIGINALS))
    history = History(node_files.STATE)
    while True:
        result = converge(machine, goal, memory, callbacks=Callbacks(judge=probes.judge))
        if node_files.STATE.is_dir() and (gap := history.record(result.outcomes, spec_hash(spec), "apply")):
            click.echo(printable(f"trackbed: {gap}"), err=True)
        ready, waiting = is_ready(result.conditions), probes.waiting()
        yield Progress(ready, result.outcomes, result.conditions, waiting, result.nics)
        inbox.wait(min(max(0.0, deadline - time.monotonic()), AGAIN))


def _by_the_service(limit: Disruption | None, nic: str, timeout: float) -> Iterator[Progress]:
    try:
        yield from ask(node_files.RUN / NAME, limit, timeout, nic)
    except ApplyRefused as error:
        raise Failed(
            f"the service is running and refuses this: {error}; see why with `trackbed doctor`, "
            "or do it without the service: systemctl stop trackbed"
        ) from None


def _say(progress: Progress, applied: list[Outcome], nic: str, done: bool, as_json: bool) -> None:
    remaining = [outcome for outcome in progress.outcomes if outcome.result != "applied"]
    if as_json:
        document = {
            "ready": progress.ready,
            "done": done,
            "outcomes": to_plain([*applied, *remaining]),
            "conditions": to_plain(progress.conditions),
        }
        click.echo(json.dumps(document))
        return
    for outcome in [*applied, *remaining]:
        click.echo(terminal.say_outcome(outcome))
    for condition in progress.conditions:
        if condition.status != "True":
            click.echo(printable(f"{condition.type} {condition.status} {condition.reason}: {condition.text}"))
    if not progress.conditions:
        click.echo("no answer of the service in time; give a longer --timeout, or see: trackbed doctor", err=True)
    if nic:
        click.echo("\n".join(map(printable, _faults(progress, nic))) or f"{nic} is ready")
        return
    click.echo("ready" if done else "ready, but a part of the spec is not applied" if progress.ready else "not ready")
