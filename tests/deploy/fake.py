"""Has pyinfra's fake connector answer as a shell does, with the marks that a fact's command prints (tasks/common/answers.py).

Inventories for pyinfra's command line import this module: IMPORT is their first line, as in those of `deployed`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyinfra.connectors.fake import FakeConnector
from pyinfra.connectors.util import CommandOutput, OutputLine

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


def deployed(
    folder: Path, hosts: Mapping[str, Mapping[str, Any]], deploy: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Deploy to fake hosts of these names, with -y, by pyinfra's command line and the project's config.py.

    :param deploy: the text of the deploy's file.
    """
    delays = {"fake_delay": 0, "fake_delay_jitter": 0}
    made = [(f"@fake/{name}", {**delays, **data}) for name, data in hosts.items()]
    inventory, file = folder / "fleet.py", folder / "deploy.py"
    inventory.write_text(f"{IMPORT}hosts = {made!r}\n")
    file.write_text(deploy)
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", inventory, file, *options],
        cwd=Path(__file__).parents[2], env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
