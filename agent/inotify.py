"""The kernel's events of files, by inotify(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from functools import cache

# linux/inotify.h
MODIFY = 0x2
CLOSE_WRITE = 0x8
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
Q_OVERFLOW = 0x4000
IGNORED = 0x8000
ISDIR = 0x40000000
_EVENT = struct.Struct("=iIII")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def opened(flags: int = 0) -> int:
    """A new instance's descriptor. OSError: the kernel has no more for this user."""
    descriptor: int = _libc().inotify_init1(os.O_CLOEXEC | flags)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    return descriptor


def watch(descriptor: int, folder: str, mask: int) -> int:
    """The number of a watch; negative if there is no such folder. A folder that is watched already keeps its number."""
    number: int = _libc().inotify_add_watch(descriptor, os.fsencode(folder), mask)
    return number


def events(read: bytes) -> Iterator[tuple[int, int, str]]:
    """Watch, mask and file name of each event; an event is a struct inotify_event and a name, which ends with NULs."""
    position = 0
    while position < len(read):
        number, mask, _, length = _EVENT.unpack_from(read, position)
        position += _EVENT.size + length
        yield number, mask, os.fsdecode(read[position - length : position].rstrip(b"\0"))
