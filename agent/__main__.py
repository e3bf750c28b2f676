"""The command line, and the wiring of everything."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO

import click

from agent import boot, supervise
from agent.change import Change, Disruption, Outcome, Report, is_ready, report_from_json, to_plain, why_not
from agent.notify import notify
from agent.spec import NodeSpec, SpecError, parse, spec_hash
from agent.version import version

# What reads the kernel is imported by the commands that do: the supervisor stays small, and `status` answers at once.

SPEC = Path("/etc/trackbed/node.json")
RUN = Path("/run/trackbed")
STATE = Path("/var/lib/trackbed")

FILE = click.Path(path_type=Path)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
spec_option = click.option(
    "--spec",
    "spec_file",
    type=click.File("r"),
    default=None,
    help=f"A spec to use instead of {SPEC}; - is standard input.",
)


class Failed(click.ClickException):
    """An error the user can do something about; exit code 1."""

    def show(self, file: object = None) -> None:
        """Print it as one message."""
        click.echo(f"trackbed: {self.message}", err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="trackbed")
def cli() -> None:
    """Keep this node's VFs, netdevs and interrupts as its spec says, and say whether it is ready."""


def _read_spec(spec_file: IO[str] | None) -> NodeSpec:
    try:
        if spec_file is not None:
            return parse(spec_file.read(), spec_file.name.strip("<>"))
        return parse(SPEC.read_text(), str(SPEC))
    except FileNotFoundError:
        raise Failed(f"{SPEC} does not exist; run the deploy, or give --spec FILE") from None
    except SpecError as error:
        raise Failed(str(error)) from None
    except OSError as error:
        raise Failed(f"{SPEC}: {error.strerror}; run as root") from None


def _say_change(change: Change) -> str:
    notes = [] if change.disruption is Disruption.NONE else [f"[{change.disruption}]"]
    notes += [f"disturbs {', '.join(change.victims)}"] if change.victims else []
    notes += [f"cannot: {change.obstacle}; {change.remedy}"] if change.obstacle else []
    return "  ".join([str(change), *notes])


def _say_outcome(outcome: Outcome) -> str:
    reason = f": {outcome.error}; {outcome.remedy}" if outcome.error else ""
    return f"{outcome.result:<11} {outcome.change}{reason}"


@cli.command()
@spec_option
@as_json
def plan(spec_file: IO[str] | None, as_json: bool) -> None:
    """Show what would be changed, each change with its disruption; touch nothing.

    Exit code: 0 nothing to change, 2 changes, 1 an error (also: the spec asks for what this node does not have).

    Example: trackbed plan --spec candidate.json
    """
    from agent import linux
    from agent.originals import ORIGINALS, Originals
    from agent.preview import preview

    try:
        spec = _read_spec(spec_file)
    except Failed as error:
        if as_json:
            click.echo(json.dumps({"spec_hash": "", "changes": [], "errors": error.message.splitlines()}))
            sys.exit(1)
        raise
    found = preview(linux.machine(), spec, Originals.load(RUN / ORIGINALS, keep=False))
    if as_json:
        document = {"spec_hash": spec_hash(spec), "changes": to_plain(found.changes), "errors": list(found.errors)}
        click.echo(json.dumps(document))
    else:
        for change in found.changes:
            click.echo(_say_change(change))
        for error_text in found.errors:
            click.echo(f"trackbed: {error_text}", err=True)
        if not found.changes and not found.errors:
            click.echo("nothing to change")
    sys.exit(1 if found.errors else 2 if found.changes else 0)


@cli.command()
@spec_option
@click.option("--allow", default=None, help="The most disruptive level: none, rebind, link-flap, vf-reset.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds for devices to come up after a change.")
@as_json
def apply(spec_file: IO[str] | None, allow: str | None, timeout: float, as_json: bool) -> None:
    """Make the node what the spec says, once, and verify it.

    Exit code: 0 the node is ready, 1 it is not.

    Example: trackbed apply --allow none
    """
    from agent import linux
    from agent.converge import Failures, converge
    from agent.originals import ORIGINALS, Originals
    from agent.preview import preview
    from agent.readiness import Readiness
    from agent.watch import Known, Watch

    spec = _read_spec(spec_file)
    try:
        limit = Disruption.parse(allow) if allow else None
    except ValueError as error:
        raise click.UsageError(f"--allow: {error}") from None
    machine = linux.machine()
    if impossible := preview(machine, spec).errors:
        raise Failed("\n".join(impossible))
    readiness = Readiness(machine)
    watch = Watch(None, readiness)
    failures = Failures()
    originals = Originals.load(RUN / ORIGINALS)
    deadline = time.monotonic() + timeout
    applied: list[Outcome] = []
    while True:
        found = converge(
            machine, spec, None, None, failures, time.monotonic, limit, judge=readiness.judge, originals=originals
        )
        applied += [outcome for outcome in found.outcomes if outcome.result == "applied"]
        remaining = [outcome for outcome in found.outcomes if outcome.result != "applied"]
        ready = is_ready(found.conditions)
        left = deadline - time.monotonic()
        # A netdev, a carrier or a probe's answer may still come; a refusal stays one.
        refused = any(o.result in ("deferred", "unsupported") for o in remaining)
        if ready or left <= 0 or (refused and not readiness.waiting()):
            break
        watch.wait(Known({}, {}), min(left, 0.5))
    if as_json:
        document = {
            "ready": ready,
            "outcomes": to_plain([*applied, *remaining]),
            "conditions": to_plain(found.conditions),
        }
        click.echo(json.dumps(document))
    else:
        for outcome in [*applied, *remaining]:
            click.echo(_say_outcome(outcome))
        for condition in found.conditions:
            if condition.status != "True":
                click.echo(f"{condition.type} {condition.status} {condition.reason}: {condition.message}")
        click.echo("ready" if ready else "not ready")
    sys.exit(0 if ready else 1)


def _read_report() -> Report:
    path = RUN / supervise.REPORT
    try:
        report = report_from_json(path.read_text())
    except FileNotFoundError:
        raise Failed(f"{path} is not there: the agent has not run since the boot; systemctl start trackbed") from None
    except (OSError, ValueError) as error:
        raise Failed(f"{path}: {error}") from None
    return report


def _why_not(report: Report, wanted_hash: str | None) -> list[str]:
    return why_not(report, boot.boot_id(), boot.uptime(), wanted_hash)


@cli.command()
@as_json
def status(as_json: bool) -> None:
    """Say whether the node is ready, and why not.

    Exit code: 0 only when it is ready by a fresh report of this boot, else 1.

    Example: trackbed status --json
    """
    report = _read_report()
    reasons = _why_not(report, None)
    if as_json:
        click.echo(json.dumps(to_plain(report)))
    else:
        click.echo(f"node       {report.node_name or '-'}")
        click.echo(f"ready      {'yes' if not reasons else 'no'}")
        click.echo(f"spec       {report.spec_hash or '-'}")
        if not report.up_to_date:
            click.echo(f"refused    {report.refusal}")
        click.echo(f"agent      {report.agent_version}, generation {report.generation}")
        for condition in report.conditions:
            click.echo(f"  {condition.type:<18} {condition.status:<8} {condition.reason}  {condition.message}".rstrip())
        for reason in reasons:
            click.echo(f"trackbed: {reason}", err=True)
    sys.exit(1 if reasons else 0)


@cli.command()
@click.option("--hash", "wanted_hash", default=None, help="Wait for this spec to be the one that is ready.")
@click.option("--first-pass", is_flag=True, help="Wait for the first verified pass since the boot instead.")
@click.option("--timeout", default=0.0, help="Give up after so many seconds; 0 never does.")
@as_json
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
            raise Failed("\n".join([f"not ready after {timeout:.0f} s", *reasons]))
        # The report is a file that is replaced: looking at it costs less than a watch that must survive restarts.
        time.sleep(0.1)


def _first_pass_missing() -> list[str]:
    try:
        if (RUN / supervise.FIRST_PASS).read_text().strip() == boot.boot_id():
            return []
    except FileNotFoundError:
        pass
    return ["no pass of this boot has verified the node yet", *_not_ready(None)]


def _not_ready(wanted_hash: str | None) -> list[str]:
    try:
        return _why_not(_read_report(), wanted_hash)
    except Failed as error:
        return [error.message]


@cli.command(name="inspect")
@as_json
def inspect_command(as_json: bool) -> None:
    """Show every network function: addresses, driver, firmware, netdev, RDMA device, VFs, NUMA node, interrupts.

    Exit code: 0.

    Example: trackbed inspect --json
    """
    from agent import linux
    from agent.inspect import inspect, render

    found = inspect(linux.machine())
    click.echo(json.dumps(to_plain(found)) if as_json else render(found))


@cli.command()
def run() -> None:
    """Keep the spec true until stopped; what the systemd unit runs.

    SIGHUP reads the spec again. Exit code: 0 after SIGTERM.
    """
    RUN.mkdir(exist_ok=True)
    STATE.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(Path(sys.argv[0]).resolve()), "worker"]
    supervise.supervise(command, supervise.Publisher(RUN, boot.boot_id(), version()))


@cli.command()
@click.option("--listen", default="127.0.0.1:9809", show_default=True, help="An IP address and a port.")
@click.option("--tls-cert", "certificate", type=FILE, default=None, help="A PEM certificate, and those that sign it.")
@click.option("--tls-key", "key", type=FILE, default=None, help="The certificate's key.")
@click.option("--token-file", "token", type=FILE, default=None, help="Holds the token that each request must carry.")
@click.option("--socket", "unix", type=FILE, default=None, help="A unix socket to serve on, too.")
def reporter(listen: str, certificate: Path | None, key: Path | None, token: Path | None, unix: Path | None) -> None:
    """Serve the report over HTTP: /readyz, /livez, /status and /metrics; what the unit trackbed-reporter runs.

    Anywhere but on this machine's own address it asks for TLS and a token. Exit code: 1 if it cannot serve.

    Example: trackbed reporter --listen 127.0.0.1:9809
    """
    from agent.reporter.server import Address, Guard, Refused, serve

    def started(port: int) -> None:
        click.echo(f"serving {RUN / supervise.REPORT} on port {port}", err=True)
        notify("READY=1")

    try:
        address = Address.parse(listen)
        serve(RUN / supervise.REPORT, address, Guard.load(address, certificate, key, token), unix, started)
    except Refused as error:
        raise Failed(str(error)) from None


@cli.command(name="worker", hidden=True)
@click.option("--activity", "activity_fd", type=int, default=None)
@click.option("--avoid", "hung", multiple=True)
def worker_command(activity_fd: int | None, hung: tuple[str, ...]) -> None:
    """Do the kernel I/O for `run`."""
    from agent import linux, worker

    worker.main(linux.machine(), SPEC, RUN, STATE, hung, activity_fd)


def main() -> None:
    """Run the command line. Every error is one message and exit code 1: click's own 2 would mean "changes" to `plan`."""
    try:
        cli.main(prog_name="trackbed", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(1)
    except click.Abort:
        sys.exit(130)
    except PermissionError as error:
        click.echo(f"trackbed: {error}; run as root", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"trackbed: {error}; a device went away meanwhile? run it again", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
