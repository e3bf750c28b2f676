"""This boot: its name, and its clock."""

from __future__ import annotations

import time
from pathlib import Path


def boot_id() -> str:
    """The kernel's identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Seconds since the boot, those of a suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
