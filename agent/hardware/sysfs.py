"""How attributes of sysfs and /proc are read: absent ones as a default, numbers and lists as such."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from agent.machine import Attributes
from agent.spec.ranges import parse_ranges

T = TypeVar("T")

# What sysfs answers for an attribute that the device does not implement, or has just lost.
ABSENT = frozenset({errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENXIO})


def read_or(files: Attributes, path: str, default: str) -> str:
    """The file's text, or ``default`` if the kernel does not have the attribute or the device is gone."""
    try:
        return files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return default
    except OSError as error:
        if error.errno in ABSENT:
            return default
        raise


def parsed(parse: Callable[[str], T], text: str, path: str) -> T:
    """What ``parse`` makes of the text of a file.

    :raises OSError: it makes nothing of it (ValueError): what was read of the device is worth nothing.
    """
    try:
        return parse(text)
    except ValueError:
        raise OSError(errno.EPROTO, f"{text!r} is nothing that belongs there", path) from None


def number_or(files: Attributes, path: str, default: int) -> int:
    """The number in a file, or ``default`` where there is no such file or nothing in it; raises as :func:`parsed`."""
    return parsed(lambda text: int(text or default), read_or(files, path, ""), path)


def ranges(files: Attributes, path: str) -> tuple[int, ...]:
    """A list of CPUs (``0-3,8``), none where there is no such file; raises as :func:`parsed`."""
    return parsed(parse_ranges, read_or(files, path, ""), path)


def names_or_none(files: Attributes, path: str) -> list[str]:
    """The names in a directory, none if it is not there."""
    try:
        return files.names(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
