"""Starts all processes of this package on the host, and says how they have ended."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.errors import LabError


def run(
    argv: Sequence[str | Path],
    *,
    log: Path | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    remedy: str = "",
) -> str:
    """Run a command to its end and return its standard output.

    :raises LabError: it failed; with the command, the end of its output, and its log.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=env,
            check=False,
        )
    except FileNotFoundError:
        raise LabError(f"{words[0]} is not installed", remedy) from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(words)} took longer than {timeout:.0f} s", remedy) from None
    if log is not None:
        with log.open("a") as out:
            out.write(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}\n")
    if done.returncode != 0:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        where = f"\nits whole output is in {log}" if log is not None else ""
        raise LabError(f"{' '.join(words)} failed with status {done.returncode}:\n{end}{where}", remedy)
    return done.stdout


def has_ended(pid: int) -> bool:
    """Whether a process and all of its threads are gone. Until then its ports are in use, and its pid file is locked.

    A zombie counts as ended: its parent may be another command, which never waits for it.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return len(threads) <= 1 and state == "Z"


def tail(log: Path) -> str:
    """The last lines of a log, for an error message."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    except FileNotFoundError:
        return f"({log} does not exist)"
