"""A client of QEMU's monitor, over its QMP socket."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import attrs

from lab.errors import LabError
from lab.qemu.connection import connection

# Seconds. savevm of a busy machine writes a gigabyte.
TIMEOUT_S = 120.0


@attrs.frozen
class Monitor:
    """A connection to QEMU's monitor. ``path``: its socket."""

    path: Path
    _lines: TextIO

    def execute(self, command: str, **arguments: object) -> Any:
        """Run a command and return its result."""
        try:
            self._lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
            self._lines.flush()
            while line := self._lines.readline():
                reply = json.loads(line)
                if "error" in reply:
                    raise LabError(f"QEMU refused {command}: {reply['error']['desc']}")
                if "return" in reply:
                    return reply["return"]
        except OSError as error:
            raise LabError(f"QEMU at {self.path} did not answer {command}: {error}", _remedy(self.path)) from None
        raise LabError(f"QEMU at {self.path} went away during {command}", _remedy(self.path))

    def human(self, line: str) -> None:
        """Run a line of the human monitor, which has commands that QMP lacks. It prints something only if the line fails."""
        if complaint := str(self.execute("human-monitor-command", **{"command-line": line})).strip():
            raise LabError(f"QEMU refused {line}: {complaint}")


@contextmanager
def connected(path: Path, timeout_s: float = TIMEOUT_S) -> Iterator[Monitor]:
    """Connect to the monitor."""
    with ExitStack() as opened:
        try:
            lines = opened.enter_context(connection(path, timeout_s))
            # QEMU serves one connection after the other, and begins each with a greeting.
            lines.readline()
        except OSError as error:
            raise LabError(f"no answer from QEMU at {path}: {error}", _remedy(path)) from None
        monitor = Monitor(path, lines)
        monitor.execute("qmp_capabilities")
        yield monitor


def _remedy(path: Path) -> str:
    node = path.parent.name
    return f"`python -m lab power-cut {node}`, then `python -m lab power-on {node}` start it anew; its disk stays."
