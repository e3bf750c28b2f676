"""Mounts without a mount point: fsopen(2), fsconfig(2) and fsmount(2), Linux 5.2 or later.

Such a mount is reachable only by its descriptor, and ends when that is closed.
"""

from __future__ import annotations

import ctypes
import os

# The same on every architecture (include/uapi/asm-generic/unistd.h); glibc has wrappers only from 2.36 on.
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT, SYS_FSPICK = 430, 431, 432, 433
FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = FSPICK_CLOEXEC = 1
FSPICK_EMPTY_PATH = 8
FSCONFIG_SET_FLAG, FSCONFIG_CMD_CREATE, FSCONFIG_CMD_RECONFIGURE = 0, 6, 7

LIBC = ctypes.CDLL(None, use_errno=True)


def detached(filesystem: str) -> int:
    """The descriptor of a new mount of ``filesystem`` (``sysfs``, ``configfs``) without a mount point."""
    context = _call(SYS_FSOPEN, filesystem.encode(), FSOPEN_CLOEXEC)
    try:
        _call(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
        return _call(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(context)


def reconfigure(mount: int, flag: str) -> None:
    """Set a flag (``ro``, ``rw``) of the file system behind a mount's descriptor."""
    context = _call(SYS_FSPICK, mount, b"", FSPICK_CLOEXEC | FSPICK_EMPTY_PATH)
    try:
        _call(SYS_FSCONFIG, context, FSCONFIG_SET_FLAG, flag.encode(), None, 0)
        _call(SYS_FSCONFIG, context, FSCONFIG_CMD_RECONFIGURE, None, None, 0)
    finally:
        os.close(context)


def last_error(what: str) -> OSError:
    """An OSError from errno after a call of the C library; ``what`` names the call."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _call(number: int, *arguments: int | bytes | None) -> int:
    # syscall(2) is variadic: an int must be widened to the register's size, or the upper half is undefined.
    widened = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = LIBC.syscall(ctypes.c_long(number), *widened)
    if result < 0:
        raise last_error("a detached mount")
    return result
