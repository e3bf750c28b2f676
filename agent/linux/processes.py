"""The processes of the node."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil


class LinuxProcesses:
    """The processes, by /proc."""

    def running(self) -> frozenset[str]:
        """Every process's name."""
        return frozenset(name for _, name in _commands())

    def holders(self, paths: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
        """Read the link of every descriptor: psutil lists only regular files."""
        by_path: dict[str, list[str]] = {}
        for pid in psutil.pids():
            for path in sorted(paths.intersection(_open_files(pid))):
                with suppress(OSError):  # it has ended
                    by_path.setdefault(path, []).append(f"{_command(pid)} (pid {pid})")
        return {path: tuple(holders) for path, holders in by_path.items()}

    def memlock(self, names: frozenset[str]) -> Mapping[str, int]:
        """prlimit(2) of each process of these names."""
        lowest: dict[str, int] = {}
        for name, process in _named(names):
            with suppress(psutil.NoSuchProcess):  # ended meanwhile
                soft, _ = process.rlimit(psutil.RLIMIT_MEMLOCK)
                limits = [limit for limit in (soft, lowest.get(name, -1)) if limit != psutil.RLIM_INFINITY]
                lowest[name] = min(limits, default=-1)
        return lowest

    def arguments(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Read the command line of each."""
        command_lines = []
        for _, process in _named({name}):
            with suppress(psutil.NoSuchProcess):
                command_lines.append(tuple(process.cmdline()))
        return tuple(command_lines)

    def hang_up(self, name: str) -> None:
        """Send the signal to each."""
        for _, process in _named({name}):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGHUP)


def _commands() -> Iterator[tuple[int, str]]:
    """Each process and its `comm`."""
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            yield pid, _command(pid)


def _command(pid: int) -> str:
    """The `comm` of a process; OSError: it has ended.

    psutil reads the command line if the name has 15 characters. That waits for the process's memory lock
    (proc_pid_cmdline_read, fs/proc/base.c): for ever, if the owner of the lock hangs in a driver.
    """
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")


def _open_files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208  thousands of them
    except OSError:
        return  # the process has ended
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115  as above


def _named(names: Collection[str]) -> Iterator[tuple[str, psutil.Process]]:
    """The processes whose `comm`, of at most 15 characters, is one of these names."""
    for pid, command in _commands():
        if command in names:
            try:
                process = psutil.Process(pid)
            except psutil.NoSuchProcess:
                continue
            yield command, process
