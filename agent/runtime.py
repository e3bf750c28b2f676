"""Used by every process of trackbed: the boot and its clock, atomic writes, the journal, systemd, the version."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def boot_id() -> str:
    """The kernel's identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Seconds since the boot, including time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def journal(message: str) -> None:
    """Write a line to standard error, which systemd passes to the journal. If that fails, the process goes on."""
    with suppress(OSError, ValueError):
        print(message.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)  # noqa: T201


def fault(error: Exception) -> str:
    """The message for an unexpected exception: what it is, where it was raised, and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    what = f"{type(error).__name__}: {str(error)[:400]}{where}"
    return f"a fault of trackbed itself: {what}; please report it, with `trackbed bundle`"


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens (prctl(2)).

    :raises OSError: the kernel refuses.
    """
    import ctypes  # here, since only the worker needs it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file so that a reader sees the old or the new text, and a power cut leaves one of them.

    :raises OSError: the old file is unchanged, and the temporary file is removed.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        # A file of its own: no link that somebody has put there is followed, and nobody has it open before it has its mode.
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # UTF-8 in each locale. The name of a file that is not UTF-8 keeps its bytes.
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


NOTIFY_TIMEOUT = 1.0
"""Seconds to wait while systemd's socket is full."""


def notify(message: str, timeout: float | None = NOTIFY_TIMEOUT) -> None:
    """Send a message to systemd (sd_notify(3)) if this is a unit's process. A failure is logged.

    :param timeout: seconds to wait while systemd's socket is full; None: without end.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as made:
            made.settimeout(timeout)
            made.connect("\0" + address[1:] if address.startswith("@") else address)
            made.send(message.encode())
    except OSError as error:
        journal(f"{message.splitlines()[0]} did not reach systemd at NOTIFY_SOCKET={address}: {error}")


def notify_ready() -> None:
    """Tell systemd that this process is ready, or has read its files again.

    systemd ends a unit that does not say so in time. So a thread waits for as long as systemd's socket is full.
    """
    threading.Thread(target=notify, args=("READY=1", None), daemon=True).start()


def doubling(first: float, times: int, last: float) -> float:
    """Seconds to wait after something has failed so many times in a row: each time doubles them, up to ``last``."""
    # The smaller exponent keeps the number small enough for a float.
    return min(first * 2.0 ** min(times - 1, 16), last)


def version() -> str:
    """The version: of a built archive that of its file VERSION, of a checkout the project's."""
    root = Path(__file__).parent.parent
    try:
        return (root / "VERSION").read_text().strip()
    except FileNotFoundError:
        project = re.search(r'^version = "([^"]+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
        return project[1] if project else "unknown"
