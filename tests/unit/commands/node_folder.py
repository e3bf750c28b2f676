"""A node of a test: a folder with its report, spec and history, and the commands on it as processes."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

from attrs import evolve

from agent import runtime
from agent.report import names
from agent.report.records import Change, Condition, Disruption, Outcome, Report, report_to_json

ROOT = Path(__file__).parents[3]
# The same program with its three folders elsewhere.
PROGRAM = """
import sys
from pathlib import Path
from cli import node_files
from agent.report import published
node_files.RUN = node_files.STATE = Path(sys.argv.pop(1))
node_files.SPEC = node_files.RUN / "node.json"
published.PATH = node_files.RUN / "published.json"
published.SETTINGS = node_files.RUN / "reporter.json"
from cli.__main__ import main
main()
"""
CONDITIONS = (
    Condition("Converged", "True", "AsWanted"),
    Condition("Clock", "False", "NotSynced", "no", severity="warn"),
)
OUTCOME = Outcome(Change("vfs", "0000:21:00.0", "count", 4, 5, Disruption.VF_RESET), "applied")


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(folder), *arguments]


def trackbed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def report(folder: Path, **different: object) -> Report:
    made = Report("n1", "h1", runtime.boot_id(), "0.1", ready=True, up_to_date=True, conditions=CONDITIONS)
    stamps = {"uptime": runtime.uptime(), "heartbeat": time.time()}
    made = evolve(made, **{**stamps, **different})  # type: ignore[arg-type]
    runtime.write_atomically(folder / names.REPORT, report_to_json(made))
    return made


def spec(folder: Path, **more: object) -> None:
    (folder / "node.json").write_text(json.dumps({"node_name": "n1", **more}))


def on_a_terminal(folder: Path, *arguments: str, until: str = "", **environment: str) -> str:
    """What a command writes when its standard output is a terminal; Ctrl-C once it has written ``until``."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(folder, *arguments), cwd=ROOT, stdout=theirs, stderr=theirs, env={**os.environ, **environment}
    )
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            said += chunk
            if until and until.encode() in said:
                process.send_signal(signal.SIGINT)
                until = ""
    except OSError:
        pass  # EIO: the other end is closed
    process.wait(timeout=30)
    os.close(ours)
    return said.decode()
