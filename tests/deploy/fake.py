"""Has pyinfra's fake connector answer as a shell does, with the marks that a fact's command prints (tasks/common/answers.py).

Inventories for pyinfra's command line import this module: IMPORT is their first line.
"""

from __future__ import annotations

import re

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
