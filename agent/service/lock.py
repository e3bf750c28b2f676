"""The lock of the only writer on a node. The service holds it while it runs; `trackbed apply` takes it if no service runs.

The supervisor holds it, not the worker: a worker that hangs in the kernel cannot be killed and would never release it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

NAME = "lock"


class Held(Exception):
    """Another process holds the lock."""


def held(folder: Path) -> bool:
    """Whether a process holds the lock. Creates no file."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def take(folder: Path, wait: bool = False) -> int:
    """Take the lock until the process ends or the returned descriptor is closed.

    :param wait: wait until it is free.
    :raises Held: another process holds it, and ``wait`` is False.
    """
    folder.mkdir(mode=0o755, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise Held from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
