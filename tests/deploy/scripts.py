"""Runs the scripts of the tasks for real, in a folder of their own, with programs that stand in for those of a node."""

import os
import shlex
import subprocess
from pathlib import Path

from tasks.common.commands import script
from tests.programs import success


def ran(
    command: object, programs: Path | str | None = None, cwd: Path | str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of a task, whatever its exit status. ``programs``: a folder that comes first in PATH."""
    if programs:
        environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    return subprocess.run(
        shlex.split(str(command)),
        cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def sh(
    text: str, *arguments: object, programs: Path | str | None = None, cwd: Path | str | None = None, **environment: str
) -> list[str]:
    """Run a script as a task does; the lines that it prints."""
    return success(ran(script(text, *map(str, arguments)), programs, cwd, **environment)).splitlines()


def process(root: Path, pid: int, name: str, *opened: str, cgroup: str = "0::/") -> None:
    """Make the files of /proc of a process that has these files open."""
    folder = root / f"proc/{pid}/fd"
    folder.mkdir(parents=True)
    (folder.parent / "comm").write_text(f"{name}\n")
    (folder.parent / "cgroup").write_text(f"{cgroup}\n")
    for number, path in enumerate(opened):
        (folder / str(number)).symlink_to(path)
