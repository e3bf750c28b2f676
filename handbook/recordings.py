"""Recordings of a terminal for the site: what commands print of a simulated server, drawn as a terminal shows it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import StringIO

import click
from rich.console import Console
from rich.text import Text

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.report import diff
from agent.report.history import Entry
from agent.report.records import Outcome, Report
from agent.report.verdict import Verdict, is_ready, why_not_ready
from agent.runtime import boot_id, uptime, version
from agent.spec.node import NodeSpec, from_mapping, spec_hash
from cli.commands import history, status, topology
from handbook import samples
from handbook.samples import MIDNIGHT
from tests.sim.kernel import Kernel

COLUMNS = 110
RAILS = {"rail0": ("0000:18:00.0", "ens1f0np0"), "rail1": ("0000:9a:00.0", "ens5f0np0")}
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""rich's picture names a font on the network; the viewer's own is as good."""


def plan() -> str:
    """What a fresh server would be changed to."""
    kernel, spec = _server()
    planned = dry_run(kernel.machine(), spec)
    lines = [*diff.lines(planned.changes, planned.names), "", click.style(diff.summary(planned.changes), bold=True)]
    return _drawn("plan", "trackbed plan", lines)


def repair() -> str:
    """Somebody deletes the VFs of a NIC; the agent makes them again."""
    kernel, spec = _server()
    _pass(kernel, spec)
    kernel.files.write(f"/sys/bus/pci/devices/{RAILS['rail1'][0]}/sriov_numvfs", "0")
    outcomes = _pass(kernel, spec).outcomes
    entries = [_entry(outcome, spec) for outcome in outcomes if outcome.result == "applied"]
    return _drawn("repair", "trackbed history --last 1", history.lines_of_pass(entries))


def watch() -> str:
    """A cable is pulled."""
    kernel, spec = _server()
    _pass(kernel, spec)
    kernel.carriers.lose(RAILS["rail1"][0])
    return _drawn("watch", "trackbed status --watch", status.view(_verdict(_pass(kernel, spec), spec)))


def queues() -> str:
    """The queues of a NIC are on few cores, and one is on the wrong socket."""
    return _drawn("queues", "trackbed topology", topology.lines(samples.topology(), COLUMNS))


RECORDINGS = {"plan": plan, "repair": repair, "watch": watch, "queues": queues}


def _server() -> tuple[Kernel, NodeSpec]:
    """Two NICs as the kernel makes them, and what they should be."""
    kernel = Kernel()
    nics = []
    for number, (name, (address, netdev)) in enumerate(RAILS.items()):
        kernel.add_nic(address, netdev, f"02:00:00:00:0{number}:00", node=number)
        vfs = {"count": 4, "defaults": {"trust": True, "spoofchk": False}}
        nics.append({"name": name, "select": {"pci": address}, "mtu": 9000, "vfs": vfs})
    return kernel, from_mapping({"node_name": "gpu-01", "nics": nics})


def _pass(kernel: Kernel, spec: NodeSpec) -> Pass:
    return converge(kernel.machine(), Goal(spec), Memory(lambda: 0.0))


def _entry(outcome: Outcome, spec: NodeSpec) -> Entry:
    return Entry(float(MIDNIGHT), "boot", spec_hash(spec), f"event of {RAILS['rail1'][0]}", outcome)


def _verdict(done: Pass, spec: NodeSpec) -> Verdict:
    ready, now = is_ready(done.conditions), uptime()
    report = Report(
        *(spec.node_name, spec_hash(spec), boot_id(), version(), ready, True),
        generation=7, uptime=now, conditions=done.conditions, outcomes=done.outcomes,
    )  # fmt: skip
    return Verdict(report, tuple(why_not_ready(report, report.boot_id, now)), 0.0, True)


def _drawn(name: str, command: str, lines: Iterable[str]) -> str:
    """The picture of a terminal in which the command was typed."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("\n".join([f"root@gpu-01:~# {command}", *lines])))
    picture = console.export_svg(title="gpu-01", unique_id=f"terminal-{name}")
    return re.sub(r"\n\s*\n", "\n", FONT.sub("", picture))
