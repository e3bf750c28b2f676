"""A process of this host that keeps running after the command that started it."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from lab.command import has_ended, tail
from lab.errors import LabError
from lab.node import wait

EXIT_S = 20.0


@attrs.frozen
class Daemon:
    """A program of the cluster. Its pid file and log are in ``folder``, whose path its command line must contain."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        """The process's output, of all its starts."""
        return self.folder / f"{self.name}.log"

    def pid(self) -> int | None:
        """The process's id; None while it does not run."""
        try:
            pid = int(self._pid_file.read_text())
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            # The kernel may have given the id to another process: compare the command line.
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(self.folder) in words else None

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        """Start the process, unless it runs."""
        if self.pid() is not None:
            return
        words = [str(word) for word in argv]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            words[0],
            words,
            {**os.environ, **(env or {})},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self._pid_file.write_text(f"{pid}\n")
        # Wait until /proc shows its command line, by which it is recognised.
        wait(lambda: self.pid() is not None or has_ended(pid), EXIT_S, f"{self.name}'s start")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the process, and wait until it has ended. After SIGKILL it cannot write anything."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, how)
            wait(lambda: has_ended(pid), EXIT_S, f"{self.name}'s end")
        self._pid_file.unlink(missing_ok=True)

    def must_run(self) -> None:
        """Raise a LabError with the end of its log if it has ended."""
        if self.pid() is None:
            raise LabError(f"{self.name} has ended\n{tail(self.log)}", f"Its log is {self.log}.")

    @property
    def _pid_file(self) -> Path:
        return self.folder / f"{self.name}.pid"
