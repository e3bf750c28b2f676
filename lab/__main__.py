"""`python -m lab`: the commands for the virtual servers."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from agent.report import names
from lab import checks, fleet, instance, logs
from lab.cluster import commands
from lab.errors import BadInput, LabError
from lab.hardware import ALL_MACHINES, MACHINES
from lab.node import Node
from lab.progress import say, step
from lab.qemu import console

NAMES = [machine.name for machine in ALL_MACHINES]
NEXT = (
    "ready; what to do next:",
    "    .venv/bin/python -m lab ssh node1 trackbed status     why it is ready; delete its VFs, and look again",
    "    .venv/bin/pyinfra inventories/lab.py deploy.py --dry  what a deploy would change",
)
REMEDIES = {
    "off": "is off: `python -m lab power-on {name}` boots it, `python -m lab logs {name}` collects its logs",
    "no ssh": "does not answer: `python -m lab console {name}` opens its console, `python -m lab logs {name}` collects logs",
    "no room": "has been stopped: make room in {folder}, then `python -m lab power-cut {name}` and `power-on {name}`",
    "no report": "has no agent yet: `.venv/bin/pyinfra -y inventories/lab.py deploy.py` deploys it",
    "not ready": "is not ready: `python -m lab ssh {name} trackbed doctor` says why, and what to do",
    "report not understood": "has another agent: `.venv/bin/pyinfra -y inventories/lab.py deploy.py` deploys this one",
}
"""The remedy for each state that `status` shows for a node."""
FOLDERS = (
    "Make room there, or give another folder: XDG_STATE_HOME is for the labs, XDG_CACHE_HOME for images and programs."
)
"""The remedy for a file that cannot be read or written."""
NO_OTHER_REMEDY = "`python -m lab status` shows the nodes; `python -m lab logs NODE` collects the logs of one."
_F = TypeVar("_F", bound=Callable[..., Any])


def _one(command: _F) -> _F:
    return click.argument("name", metavar="NODE", type=click.Choice(NAMES))(command)


def _some(command: _F) -> _F:
    return click.argument("name", metavar="NODE|all", type=click.Choice([*NAMES, "all"]))(command)


def _chosen(name: str) -> list[Node]:
    chosen = [node for node in fleet.nodes() if name in (node.name, "all")]
    if not chosen:
        raise BadInput(f"the lab has no {name}", "`python -m lab status` shows its nodes.")
    return chosen


def _at_once(act: Callable[[Node], None], chosen: list[Node]) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(act, chosen))


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`make lab` runs `up` and deploys to the nodes. More is in docs/lab.md.",
)
def main() -> None:
    """Virtual servers with SR-IOV and RDMA. TRACKBED_LAB names the lab; the default is "lab"."""


@main.command()
@click.option(
    "--nodes",
    "count",
    type=click.IntRange(len(MACHINES), len(ALL_MACHINES)),
    help=f"How many nodes. [default: as many as the lab has; {len(MACHINES)} for a new lab]",
)
def up(count: int | None) -> None:
    """Boot the nodes; build the image first if needed. Running nodes are left alone.

    Example: python -m lab up --nodes 3
    """
    began = time.monotonic()
    try:
        booted = fleet.up(count=count)
    except KeyboardInterrupt:
        say("interrupted: `python -m lab up` goes on from here, `python -m lab down` stops the nodes that run")
        raise
    if booted:
        say(f"the lab is up after {time.monotonic() - began:.0f} s; `python -m lab ssh node1` gets in")
    else:
        say("the lab is up already; changes nothing. `python -m lab status --ready` says whether its nodes are ready")


@main.command()
def down() -> None:
    """Stop the nodes, and the cluster's control plane if there is one, and delete their disks; logs and keys stay."""
    commands.discard(instance.named())
    was_up = fleet.down()
    say(
        "the lab is down; `make lab` boots and deploys a new one"
        if was_up
        else "the lab was down already; changes nothing"
    )


@main.command()
@click.option("--ready", is_flag=True, help="Also ask each node's agent, and fail unless all are ready.")
def status(ready: bool) -> None:
    """Show the nodes."""
    lab = instance.named()
    if lab.plan() is None:
        say(f"lab {lab.name} is down; `python -m lab up` starts it")
        sys.exit(1 if ready else 0)
    table = Table("node", "state", "ssh port", "pid", "folder")
    if ready:
        table.add_column("agent")
    remedies = []
    all_ready = True
    for node in fleet.nodes():
        pid = node.pid()
        on = pid is not None and node.answers(5.0)
        state = "off" if pid is None else "up" if on else "no room" if node.lacks_room() else "no ssh"
        row = [node.name, state, str(node.ssh_port), str(pid or ""), str(node.folder)]
        if ready:
            word = _readiness(node) if on else "Unknown"
            all_ready = all_ready and word == "ready"
            row.append(word)
            state = word if on else state
        table.add_row(*row)
        if state in REMEDIES:
            remedies.append(f"{node.name} {REMEDIES[state].format(name=node.name, folder=node.folder)}")
    # A pipe has no width. The folder must not be cut off.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for line in NEXT if ready and all_ready else remedies:
        say(line)
    sys.exit(0 if all_ready else 1)


def _readiness(node: Node) -> str:
    report = node.run(["cat", f"{names.RUN_FOLDER}/{names.REPORT}"])
    if report.returncode != 0:
        return "no report"
    try:
        return "ready" if json.loads(report.stdout)["ready"] is True else "not ready"
    except (ValueError, KeyError, TypeError):
        return "report not understood"


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_one
@click.argument("cmd", nargs=-1)
def ssh(name: str, cmd: tuple[str, ...]) -> None:
    """Log in to a node as root, or run one command there."""
    (node,) = _chosen(name)
    words = ["ssh", "-F", str(node.ssh_config), node.name, *(["--", " ".join(cmd)] if cmd else [])]
    os.execvp("ssh", words)  # noqa: S606 - no shell is needed


@main.command("console")
@_one
def console_command(name: str) -> None:
    """Join a node's serial console, logged in as root; Ctrl-] detaches."""
    (node,) = _chosen(name)
    console.attach(node.console_socket)


@main.command()
@click.argument("arguments", nargs=-1)
def check(arguments: tuple[str, ...]) -> None:
    """Run the operators' checks (tests/node) on the nodes; ARGUMENTS are pytest's, after `--`."""
    sys.exit(checks.run(fleet.nodes(), *arguments).returncode)


@main.command()
@_one
def power_cut(name: str) -> None:
    """Switch a node off without a clean shutdown; its disk stays."""
    (node,) = _chosen(name)
    node.power_cut()
    say(f"{name} is off; `python -m lab power-on {name}` boots it again on the same disk")


@main.command()
@_one
def power_on(name: str) -> None:
    """Boot a node that is off, on its own disk."""
    (node,) = _chosen(name)
    if node.pid() is not None:
        say(f"{name} is on already; changes nothing")
        return
    with step(f"booting {name}", usual_s=node.accelerator.usual(25)):
        node.boot()
    say(f"`python -m lab ssh {name}` gets in")


@main.command()
@_some
@click.argument("snapshot_name", metavar="SNAPSHOT")
def snapshot(name: str, snapshot_name: str) -> None:
    """Save memory, devices and disk under a name."""
    with step(f"saving {snapshot_name} of {name}"):
        _at_once(lambda node: node.snapshot(snapshot_name), _chosen(name))
    say(f"`python -m lab restore {name} {snapshot_name}` goes back to it")


@main.command()
@_some
@click.argument("snapshot_name", metavar="SNAPSHOT")
def restore(name: str, snapshot_name: str) -> None:
    """Go back to a snapshot; the clock is set to the present time."""
    with step(f"restoring {snapshot_name} of {name}"):
        _at_once(lambda node: node.restore(snapshot_name), _chosen(name))


@main.command()
@_one
@click.argument("pci", metavar="PCI-ADDRESS")
def unplug(name: str, pci: str) -> None:
    """Unplug a PCI function of a node, such as 0000:21:00.0."""
    (node,) = _chosen(name)
    node.unplug(pci)
    say(f"{name} lost {pci}; `python -m lab replug {name}` brings it back")


@main.command()
@_one
def replug(name: str) -> None:
    """Let a node scan for PCI devices, so that unplugged functions come back."""
    (node,) = _chosen(name)
    node.replug()
    say(f"{name} has looked for its PCI devices again; `python -m lab ssh {name} trackbed wait` ends once it is ready")


@main.command("logs")
@_one
def logs_command(name: str) -> None:
    """Collect console, QEMU's messages, journal, kernel log, report, spec and plan of a node in one folder."""
    (node,) = _chosen(name)
    folder = node.folder / f"logs-{time.strftime('%Y%m%dT%H%M%S')}"
    if not logs.keep(node, folder):
        say(f"{name} does not answer: the folder has only its console's output and QEMU's messages")
    click.echo(folder)


main.add_command(commands.cluster)


def cli() -> None:
    """Run the command line. A failure is one message with exit code 1; bad input has exit code 2."""
    # The same as Ctrl-C: children are ended and locks released in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main(prog_name="python -m lab")
    except LabError as error:
        say(f"lab: {error}")
        if not error.remedy:
            say(NO_OTHER_REMEDY)
        sys.exit(2 if isinstance(error, BadInput) else 1)
    except OSError as error:
        # A disk that is full, or a folder of another user: nearly every line of this package may meet it.
        say(f"lab: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        say(FOLDERS)
        sys.exit(1)


if __name__ == "__main__":
    cli()
