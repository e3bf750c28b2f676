"""Collects a node's logs in one folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent.report import names
from lab.errors import LabError
from lab.node import Node

SCRIPTS = (
    ("journal.txt", "journalctl --no-pager -o short-precise"),
    ("dmesg.txt", "dmesg -T"),
    ("report.json", f"cat {names.RUN_FOLDER}/{names.REPORT}"),
    ("node.json", f"cat {names.SPEC_FILE}"),
    ("plan.txt", "timeout 60 trackbed plan"),
)


def keep(node: Node, folder: Path) -> bool:
    """Write the logs into the folder. A node that hangs may not give all of them: a file then has the error.

    Returns whether the node answers. Otherwise there are only its console's output and QEMU's messages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for log in (node.console_log, node.qemu_log):
        if log.exists():
            shutil.copy(log, folder)
    if node.pid() is None or not node.answers(5.0):
        return False
    for name, script in SCRIPTS:
        try:
            ran = node.run(["sh", "-c", script], timeout=120)
            text = ran.stdout or ran.stderr
        except LabError as error:
            text = f"{error}\n"
        (folder / name).write_text(text)
    return True
