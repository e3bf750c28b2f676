"""A client of QEMU's monitor, over its QMP socket."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from lab.errors import LabError
from lab.qemu.connection import connection

# Seconds. savevm of a busy machine writes a gigabyte.
TIMEOUT_S = 120.0


class Monitor:
    """One connection to the monitor."""

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def __enter__(self) -> "Monitor":
        self._open = ExitStack()
        try:
            self._stream = self._open.enter_context(connection(self._path, self._timeout_s))
            # The greeting, once QEMU has ended its connection to another command.
            self._stream.readline()
        except OSError as error:
            raise LabError(f"no answer from QEMU at {self._path}: {error}", self._remedy()) from None
        self.execute("qmp_capabilities")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def execute(self, command: str, **arguments: object) -> Any:
        """Run a command and return its result."""
        try:
            self._stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
            self._stream.flush()
            while line := self._stream.readline():
                reply = json.loads(line)
                if "error" in reply:
                    raise LabError(f"QEMU refused {command}: {reply['error']['desc']}")
                if "return" in reply:
                    return reply["return"]
        except OSError as error:
            raise LabError(f"QEMU at {self._path} did not answer {command}: {error}", self._remedy()) from None
        raise LabError(f"QEMU at {self._path} went away during {command}", self._remedy())

    def _remedy(self) -> str:
        node = self._path.parent.name
        return f"`python -m lab power-cut {node}`, then `python -m lab power-on {node}` start it anew; its disk stays."

    def human(self, line: str) -> None:
        """Run a line of the human monitor, which has commands that QMP lacks. It prints something only if the line fails."""
        if complaint := str(self.execute("human-monitor-command", **{"command-line": line})).strip():
            raise LabError(f"QEMU refused {line}: {complaint}")
