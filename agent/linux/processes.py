"""The processes of the node."""

from __future__ import annotations

import psutil


class LinuxProcesses:
    """The processes as psutil sees them."""

    def running(self) -> frozenset[str]:
        """Every process's name."""
        return frozenset(process.info["name"] for process in psutil.process_iter(["name"]))
