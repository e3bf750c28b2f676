"""Collects a node's logs in one folder after something failed on it."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent.report import names
from lab.errors import LabError
from lab.node import Node

SCRIPTS = (
    ("journal.txt", "journalctl -b --no-pager -o short-precise"),
    ("report.json", f"cat {names.RUN_FOLDER}/{names.REPORT}"),
    ("node.json", f"cat {names.SPEC_FILE}"),
    ("plan.txt", "timeout 60 trackbed plan"),
)


def keep(node: Node, folder: Path) -> None:
    """Write the logs into the folder. A node on which a test has failed may hang, so a log may be missing."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(node.console_log, folder / "console.log")
    if node.pid() is None or not node.answers():
        return
    for name, script in SCRIPTS:
        try:
            text = node.run(["sh", "-c", script], timeout=120).stdout
        except LabError as error:
            text = f"{error}\n"
        (folder / name).write_text(text)
