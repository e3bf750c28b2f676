"""Has pyinfra's fake connector answer at once, and as a shell does, with the marks that a fact's command prints.

tasks/common/answers.py has the marks. Inventories for pyinfra's command line import this module: IMPORT is their first line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyinfra.connectors.base import DataMeta
from pyinfra.connectors.fake import FakeConnector
from pyinfra.connectors.util import CommandOutput, OutputLine

ROOT = Path(__file__).parents[2]
IMPORT = "import tests.deploy.fake as _fake\n"
FRAME = re.compile(r"\{ printf '\\n%s\\n' ([0-9a-f]{32}); \( (.*)\n\); code=\$\?.*", re.DOTALL)
"""A fact's command as it is sent: its mark, and the command itself."""

_look_up = FakeConnector._lookup_response


def _answer(self: FakeConnector, command_str: str) -> tuple[bool, CommandOutput]:
    succeeded, output = _look_up(self, command_str)
    if not (frame := FRAME.fullmatch(command_str)):
        return succeeded, output
    begin, end = OutputLine("stdout", frame[1]), OutputLine("stdout", f"+{int(not succeeded)} {frame[1]}")
    return succeeded, CommandOutput([begin, *output.combined_lines, end])


FakeConnector._lookup_response = _answer  # type: ignore[method-assign]
FakeConnector.data_meta |= {name: DataMeta("", 0) for name in ("fake_delay", "fake_delay_jitter")}


def pyinfra(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pyinfra's command line in the project, with its config.py and without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", *map(str, words)],
        cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, start_new_session=True,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def inventory(file: Path, hosts: object) -> Path:
    """Write an inventory whose hosts are these, or this text of Python."""
    file.write_text(f"{IMPORT}hosts = {hosts if isinstance(hosts, str) else repr(hosts)}\n")
    return file


def deployed(
    folder: Path, hosts: Mapping[str, Mapping[str, Any]], deploy: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Deploy to fake hosts of these names, with -y.

    :param deploy: the text of the deploy's file.
    """
    made = inventory(folder / "fleet.py", [(f"@fake/{name}", dict(data)) for name, data in hosts.items()])
    (folder / "deploy.py").write_text(deploy)
    return pyinfra("-y", made, folder / "deploy.py", *options, **environment)
