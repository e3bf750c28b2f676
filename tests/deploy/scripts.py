"""Runs the scripts of the tasks for real, in a folder of their own, with programs that stand in for those of a node."""

from __future__ import annotations

import os
import shlex
import subprocess

from tasks.common.commands import script


def sh(text: str, *arguments: object, **environment: str) -> list[str]:
    """Run a script as a task does."""
    done = subprocess.run(
        shlex.split(str(script(text, *map(str, arguments)))),
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
