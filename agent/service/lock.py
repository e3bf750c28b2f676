"""One writer on a node: the service holds this lock as long as it runs, `trackbed apply` while it works without it.

The supervisor holds it, not the worker: a worker that hangs in the kernel cannot be killed, and would keep it for ever.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

NAME = "lock"


class Held(Exception):
    """Somebody else is the writer."""


def held(folder: Path) -> bool:
    """Whether there is a writer now; leaves no trace."""
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
    """Become the writer until the process ends (or the returned descriptor is closed).

    :param wait: wait for the present one to end.
    :raises Held: there is one, and ``wait`` is False.
    """
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise Held from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
