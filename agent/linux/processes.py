"""The processes of the node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

import psutil


class LinuxProcesses:
    """The processes as psutil sees them."""

    def running(self) -> frozenset[str]:
        """Every process's name."""
        return frozenset(process.info["name"] for process in psutil.process_iter(["name"]))

    def holders(self, paths: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
        """Look where every descriptor points; psutil lists those of regular files only."""
        found: dict[str, list[str]] = {}
        for process in psutil.process_iter(["name"]):
            for path in paths.intersection(_open_files(process.pid)):
                found.setdefault(path, []).append(f"{process.info['name']} (pid {process.pid})")
        return {path: tuple(holders) for path, holders in found.items()}

    def memlock(self, names: frozenset[str]) -> Mapping[str, int]:
        """prlimit(2) of each process of these names."""
        found: dict[str, int] = {}
        for process in psutil.process_iter(["name"]):
            name = process.info["name"]
            if name in names:
                with suppress(psutil.NoSuchProcess):  # ended meanwhile
                    soft, _ = process.rlimit(psutil.RLIMIT_MEMLOCK)
                    limits = [limit for limit in (soft, found.get(name, -1)) if limit != psutil.RLIM_INFINITY]
                    found[name] = min(limits, default=-1)
        return found


def _open_files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208  thousands of them
    except OSError:
        return  # the process has ended
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115  as above
