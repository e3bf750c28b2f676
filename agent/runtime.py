"""What every process of ours needs at run time: this boot and its clock, small files, systemd, the version."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """The kernel's identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Seconds since the boot, those of a suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def journal(message: str) -> None:
    """Write a line to standard error, which is the journal's. That nobody takes it must not end the process."""
    with suppress(OSError, ValueError):
        print(message.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)  # noqa: T201


def fault(error: Exception) -> str:
    """What to say of an exception that nobody expected: what and where, and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    what = f"{type(error).__name__}: {str(error)[:400]}{where}"
    return f"a fault of trackbed itself: {what}; please report it, with `trackbed bundle`"


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file so that a reader sees the old or the new text, and a power cut leaves one of them.

    :raises OSError: the old file is as it was, and nothing is left beside it that would take the room of others.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("w") as file:
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
"""Seconds that a message may wait for room on systemd's socket."""


def notify(message: str) -> None:
    """Tell systemd (sd_notify(3)); nothing outside of a unit. What does not get through is said in the journal."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as made:
            made.settimeout(NOTIFY_TIMEOUT)
            made.connect("\0" + address[1:] if address.startswith("@") else address)
            made.send(message.encode())
    except OSError as error:
        journal(f"{message.splitlines()[0]} did not reach systemd at NOTIFY_SOCKET={address}: {error}")


UNRELEASED = "unreleased"


def version() -> str:
    """The version that the archive's VERSION file names; the sources themselves have none."""
    try:
        return (Path(__file__).parent.parent / "VERSION").read_text().strip()
    except FileNotFoundError:
        return UNRELEASED
