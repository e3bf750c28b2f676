"""A client of QEMU's monitor, over its QMP socket."""

import json
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

from lab.errors import LabError

# Seconds. savevm of a busy machine writes a gigabyte.
TIMEOUT_S = 120.0


class Monitor:
    """One connection to the monitor. QEMU serves one connection at a time; the next one waits."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "Monitor":
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        try:
            self._socket.connect(str(self._path))
        except OSError as error:
            self._socket.close()
            raise LabError(f"no answer from QEMU at {self._path}: {error}", self._remedy()) from None
        self._stream = self._socket.makefile("rw")
        self._stream.readline()
        self.execute("qmp_capabilities")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._socket.close()

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

    def human(self, line: str) -> str:
        """Run a line of the human monitor, which has commands that QMP lacks. It prints something only if the line fails."""
        return str(self.execute("human-monitor-command", **{"command-line": line})).strip()
