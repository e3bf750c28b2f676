"""A process of this host that outlives the command that started it."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from lab.errors import LabError
from lab.node import tail, wait

EXIT_S = 20.0


@attrs.frozen
class Daemon:
    """One program of a cluster. ``folder`` has its pid file and its log; its command line must name that folder."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        """All that it said, over all its starts."""
        return self.folder / f"{self.name}.log"

    def pid(self) -> int | None:
        """Its process, None when it does not run."""
        try:
            pid = int(self._pid_file.read_text())
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            # A number may have been handed out again; the command line tells.
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(self.folder) in words else None

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        """Start it; one that runs is left alone."""
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
        # Its command line, by which it is known, is there a moment later.
        wait(lambda: self.pid() is not None or _has_ended(pid), EXIT_S, f"{self.name}'s start")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it, and wait until it has; SIGKILL lets it say nothing any more."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, how)
            wait(lambda: _has_ended(pid), EXIT_S, f"{self.name}'s end")
        self._pid_file.unlink(missing_ok=True)

    def must_run(self) -> None:
        """Raise a LabError with its last words if it has ended."""
        if self.pid() is None:
            raise LabError(f"{self.name} has ended\n{tail(self.log)}", f"Its log is {self.log}.")

    @property
    def _pid_file(self) -> Path:
        return self.folder / f"{self.name}.pid"


def _has_ended(pid: int) -> bool:
    """Whether it is gone with all of its threads: until then its ports are taken."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        # Another command's child, whose parent may never ask after it.
        task = Path(f"/proc/{pid}/task")
        try:
            return len(list(task.iterdir())) <= 1 and not Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return True
