"""Watches folders for changed files, by inotify(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

from attrs import frozen

# linux/inotify.h
_IN_CLOSE_WRITE = 0x8
_IN_MOVED_TO = 0x80
_IN_DELETE = 0x200
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_EVENT = struct.Struct("=iIII")

MISSING = 5.0
"""Seconds until the watches are set again, if a folder is missing: the agent's exists only once the agent has started."""


@frozen
class Folder:
    """A folder, and what to call when a file in it has changed.

    ``written``: files are also written in place there. Otherwise a file is written under another name, and only the rename
    matters.
    """

    path: Path
    changed: Callable[[], None]
    written: bool = False

    @property
    def mask(self) -> int:
        """The inotify events to watch for."""
        return _IN_MOVED_TO | _IN_DELETE | (_IN_CLOSE_WRITE if self.written else 0)


def listen(*folders: Folder) -> None:
    """Call a folder's ``changed`` whenever a file in it was replaced or removed. This never returns.

    :raises OSError: the kernel has no more inotify instances for this user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    while True:
        descriptor = libc.inotify_init1(os.O_CLOEXEC)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        try:
            watches = {libc.inotify_add_watch(descriptor, os.fsencode(each.path), each.mask): each for each in folders}
            for each in folders:
                each.changed()
            # Start over if a folder has no watch (it is missing) or if the queue overflowed, since events were lost.
            while min(watches) >= 0:
                events = list(_events(os.read(descriptor, 4096)))
                for watch in {watch for watch, _ in events if watch in watches}:
                    watches[watch].changed()
                if any(mask & (_IN_IGNORED | _IN_Q_OVERFLOW) for _, mask in events):
                    break
        finally:
            os.close(descriptor)
        sleep(MISSING)


def _events(read: bytes) -> Iterator[tuple[int, int]]:
    """Watch and mask of each event; an event is a struct inotify_event and a name."""
    position = 0
    while position < len(read):
        watch, mask, _, length = _EVENT.unpack_from(read, position)
        yield watch, mask
        position += _EVENT.size + length
