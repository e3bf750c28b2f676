"""A network namespace on this host's kernel, whose netdevs look to the agent like PCI functions."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import click
from attrs import evolve

from agent import linux
from agent.hardware.functions import PCI
from agent.linux.files import LinuxFiles
from agent.machine import Machine

P = ParamSpec("P")
T = TypeVar("T")

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_REC_PRIVATE = 0x4000 | (1 << 18)
ADDRESS = "0000:01:00.0"
START_S = 30


class Overlay(LinuxFiles):
    """The real files, except PCI devices, which are below ``root``: a virtual netdev has no PCI device."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def place(self, path: str) -> str:
        """The real path of a file."""
        return f"{self._root}{path}" if path.startswith(PCI) else path

    def read(self, path: str) -> str:
        """Read a file at its real path."""
        return super().read(self.place(path))

    def write(self, path: str, text: str) -> None:
        """Write a file at its real path."""
        super().write(self.place(path), text)

    def names(self, path: str) -> list[str]:
        """List a folder at its real path."""
        return super().names(self.place(path))

    def target(self, path: str) -> str:
        """Read a link at its real path."""
        return super().target(self.place(path))


def enter() -> None:
    """Enter a new network namespace with a sysfs of its own. The process cannot leave it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}; run as root")

    check(libc.unshare(CLONE_NEWNS | CLONE_NEWNET), "a new network namespace")
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None), "private mounts")
    check(libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None), "sysfs of the namespace")


def apart(measure: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The result of a measurement in a child process, in a network namespace of its own. If it fails, so does this one."""
    ours, theirs = multiprocessing.Pipe()

    def inside() -> None:
        enter()
        theirs.send(measure(*arguments, **named))

    process = multiprocessing.get_context("fork").Process(target=inside)
    process.start()
    theirs.close()
    try:
        result: T = ours.recv()
    except EOFError:
        # The child has printed why.
        sys.exit(1)
    process.join()
    return result


@contextmanager
def child(work: Callable[[Connection], None]) -> Iterator[tuple[int, Connection]]:
    """Run a function in a child process until the block ends. It sends something once it has started.

    Gives the process's id, and this end of the pipe that the function gets.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise click.ClickException(f"{work.__name__} did not start")
        yield process.pid or 0, ours
    finally:
        process.kill()
        process.join()


@contextmanager
def devices(netdevs: dict[str, str]) -> Iterator[Path]:
    """Make a folder that replaces sysfs's PCI devices. It has a function at each given address, with a netdev."""
    root = Path(tempfile.mkdtemp(prefix="trackbed-bench-"))
    try:
        for address, netdev in netdevs.items():
            folder = Path(f"{root}{PCI}/{address}")
            (folder / "net" / netdev).mkdir(parents=True)
            for name, text in (("class", "0x020000"), ("vendor", "0x0000"), ("device", "0x0000"), ("numa_node", "0")):
                (folder / name).write_text(text)
            # A driver that changes an MTU without losing the link, so that the agent need not look for users.
            (folder / "driver").symlink_to("../drivers/mlx5_core")
        yield root
    finally:
        shutil.rmtree(root)


def machine(root: Path) -> Machine:
    """The machine with this kernel and the PCI devices below ``root``."""
    return evolve(linux.machine(), files=Overlay(root))
