"""A network namespace on this host's kernel, whose netdevs look to the agent like PCI functions."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from agent.hardware.functions import PCI
from agent.linux.mount import LIBC, last_error

P = ParamSpec("P")
T = TypeVar("T")

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_REC_PRIVATE = 0x4000 | (1 << 18)
MNT_DETACH = 2
ADDRESS = "0000:01:00.0"
START_S = 30


def enter() -> None:
    """Enter a new network namespace with a sysfs of its own. The process cannot leave it."""
    _unshare(CLONE_NEWNET, "a new network namespace")
    _mount("/sys", "sysfs")


def _unshare(namespaces: int, what: str) -> None:
    """Enter new namespaces, and one of mounts that are this process's alone."""
    if LIBC.unshare(CLONE_NEWNS | namespaces):
        raise last_error(f"{what} (run as root)")
    _mount("/", "", MS_REC_PRIVATE)


def _mount(target: str, filesystem: str, flags: int = 0) -> None:
    if LIBC.mount(b"none", target.encode(), filesystem.encode(), ctypes.c_ulong(flags), None):
        raise last_error(f"a mount on {target}")


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
def devices(netdevs: Mapping[str, str]) -> Iterator[None]:
    """Show this process one PCI function with a netdev at each given address, instead of the machine's PCI devices.

    A virtual netdev has no PCI device.
    """
    _unshare(0, "private mounts")
    _mount(PCI, "tmpfs")
    try:
        for address, netdev in netdevs.items():
            folder = Path(PCI, address)
            (folder / "net" / netdev).mkdir(parents=True)
            for name, text in (("class", "0x020000"), ("vendor", "0x0000"), ("device", "0x0000"), ("numa_node", "0")):
                (folder / name).write_text(text)
            # A driver that changes an MTU without losing the link, so that the agent need not look for users.
            (folder / "driver").symlink_to("../drivers/mlx5_core")
        yield
    finally:
        LIBC.umount2(PCI.encode(), MNT_DETACH)
