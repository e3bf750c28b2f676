"""The processes of the node."""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

DEV = "/dev/"
DELETED = " (deleted)"
CLOCK = "/dev/ptp"


class LinuxProcesses:
    """The processes, by /proc."""

    def running(self) -> frozenset[str]:
        return frozenset(name for _, name in _commands())

    def holders(self, paths: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
        numbers = {number: path for path in sorted(paths) if (number := _device_number(path)) is not None}
        by_path: dict[str, list[str]] = {}
        for pid in _pids():
            for path in sorted(paths.intersection(_open_files(pid, numbers))):
                with suppress(OSError):  # it has ended
                    by_path.setdefault(path, []).append(f"{_command(pid)} (pid {pid})")
        return {path: tuple(holders) for path, holders in by_path.items()}

    def memlock(self, names: frozenset[str]) -> Mapping[str, int]:
        lowest: dict[str, int] = {}
        for pid, name in _named(names):
            with suppress(ProcessLookupError):  # ended meanwhile
                soft, _ = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)
                limits = [limit for limit in (soft, lowest.get(name, -1)) if limit != resource.RLIM_INFINITY]
                lowest[name] = min(limits, default=-1)
        return lowest

    def arguments(self, name: str) -> tuple[tuple[str, ...], ...]:
        command_lines = []
        for pid, _ in _named({name}):
            with suppress(FileNotFoundError, ProcessLookupError):
                text = Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape")
                if text:  # else it is a zombie
                    command_lines.append(tuple(text.removesuffix("\0").split("\0")))
        return tuple(command_lines)

    def hang_up(self, name: str) -> None:
        for pid, _ in _named({name}):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)

    def affinity(self, pid: int) -> tuple[int, ...]:
        return tuple(sorted(os.sched_getaffinity(pid)))

    def set_affinity(self, pid: int, cpus: Collection[int]) -> None:
        os.sched_setaffinity(pid, cpus)


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208  thousands of them


def _commands() -> Iterator[tuple[int, str]]:
    for pid in _pids():
        with suppress(OSError):  # it has ended
            yield pid, _command(pid)


def _command(pid: int) -> str:
    """The `comm` of a process; OSError: it has ended.

    To read the command line instead would wait for the process's memory lock (proc_pid_cmdline_read, fs/proc/base.c): for
    ever, if the owner of the lock hangs in a driver.
    """
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")


def _open_files(pid: int, numbers: Mapping[int, str]) -> Iterator[str]:
    """What a process has open, device nodes by the path that ``numbers`` has for them.

    A container may have the node under another path, or another node under this one. Only what may be a node is asked for its
    number: a file system may not answer. The node of a device that is gone was deleted.

    A PTP clock counts for who may steer it, so has it open for writing, which the link's mode says (tid_fd_update_inode,
    fs/proc/fd.c): ptp4l and phc2sys. chronyd only reads clocks, perhaps all of them (hwtimestamp).
    """
    folder, nodes = f"/proc/{pid}/fd", tuple(numbers.values())
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208  thousands of them
    except OSError:
        return  # the process has ended
    for descriptor in descriptors:
        path = f"{folder}/{descriptor}"
        with suppress(OSError):  # closed meanwhile
            link = os.readlink(path)  # noqa: PTH115  as above
            if (nodes and link.startswith(DEV) and not link.endswith(DELETED)) or link.endswith(nodes):
                link = numbers.get(os.stat(path).st_rdev, "" if link in nodes else link)  # noqa: PTH116  as above
            if not link.startswith(CLOCK) or os.lstat(path).st_mode & stat.S_IWUSR:
                yield link


def _device_number(path: str) -> int | None:
    """The number of a device node; None for anything else, and if there is no such node."""
    with suppress(OSError):
        found = os.stat(path)  # noqa: PTH116  a socket has no path
        return found.st_rdev if stat.S_ISCHR(found.st_mode) else None
    return None


def _named(names: Collection[str]) -> Iterator[tuple[int, str]]:
    """The processes whose `comm`, of at most 15 characters, is one of these names."""
    return ((pid, command) for pid, command in _commands() if command in names)
