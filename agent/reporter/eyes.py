"""Hears of changes of files, by inotify(7): nobody polls."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection
from pathlib import Path
from time import sleep

# linux/inotify.h
_IN_CLOSE_WRITE = 0x8
_IN_MOVED_TO = 0x80
_IN_DELETE = 0x200
_IN_IGNORED = 0x8000

MISSING = 5.0
"""Seconds until it is looked again whether a folder is there: the agent's is made when that starts."""


def listen(folders: Collection[Path], changed: Callable[[], None]) -> None:
    """Call ``changed`` whenever a file of the folders was replaced, written or removed; never returns.

    :raises OSError: the kernel has no more inotify instances for this user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    while True:
        descriptor = libc.inotify_init1(os.O_CLOEXEC)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        try:
            mask = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_DELETE
            watches = [libc.inotify_add_watch(descriptor, os.fsencode(folder), mask) for folder in folders]
            changed()
            # A folder that is gone, or not yet there, has no watch: begin anew.
            while all(watch >= 0 for watch in watches) and not _ignored(os.read(descriptor, 4096)):
                changed()
        finally:
            os.close(descriptor)
        sleep(MISSING)


def _ignored(events: bytes) -> bool:
    """Whether one of the events says that its watch has ended; each is a struct inotify_event and a name."""
    position = 0
    while position < len(events):
        mask = int.from_bytes(events[position + 4 : position + 8], "little")
        if mask & _IN_IGNORED:
            return True
        position += 16 + int.from_bytes(events[position + 12 : position + 16], "little")
    return False
