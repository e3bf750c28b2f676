"""What every process of ours needs at run time: this boot and its clock, small files, systemd, the version."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path


def boot_id() -> str:
    """The kernel's identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Seconds since the boot, those of a suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file so that a reader sees the old or the new text, and a power cut leaves one of them."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def notify(message: str) -> None:
    """Tell systemd (sd_notify(3)); nothing outside of a unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as made:
            made.connect("\0" + address[1:] if address.startswith("@") else address)
            made.send(message.encode())


UNRELEASED = "unreleased"


def version() -> str:
    """The version that the archive's VERSION file names; the sources themselves have none."""
    try:
        return (Path(__file__).parent.parent / "VERSION").read_text().strip()
    except FileNotFoundError:
        return UNRELEASED
