"""Reading files of sysfs and /proc: a default for absent ones, and parsed numbers and lists."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from agent.machine import Attributes
from agent.spec.ranges import parse_ranges

T = TypeVar("T")

LONGEST_NUMBER = 20
"""Digits of the largest number of 64 bits."""

# The errors of sysfs for an attribute that the device does not implement or no longer has.
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
    """The text of a file, parsed.

    :raises OSError: ``parse`` raised ValueError, so the device reports nonsense.
    """
    try:
        return parse(text)
    except ValueError:
        raise OSError(errno.EPROTO, f"the file has an unexpected value: {text!r}", path) from None


def number_or(files: Attributes, path: str, default: int) -> int:
    """The number in a file, or ``default`` if the file does not exist or is empty; raises as :func:`parsed`."""
    return parsed(lambda text: int(text or default), read_or(files, path, ""), path)


def whole(text: str) -> int | None:
    """The number in a text of decimal digits; None for any other text, or one that no counter of 64 bits could have."""
    # Of the digits that str.isdigit() knows, int() refuses some, and it refuses more than 4,300 of any.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER else None


def numbered(names: Iterable[str], prefix: str = "") -> Mapping[int, str]:
    """Of the names in a directory those that are ``prefix`` and a number, by the number, in rising order."""
    return _numbered(tuple(names), prefix)


@lru_cache(maxsize=8192)
def _numbered(names: tuple[str, ...], prefix: str) -> Mapping[int, str]:
    """Cached: the directories of thousands of queues and interrupts have the same names in every pass."""
    numbers = ((whole(name[len(prefix) :]), name) for name in names if name.startswith(prefix))
    return MappingProxyType(dict(sorted((number, name) for number, name in numbers if number is not None)))


def ranges(files: Attributes, path: str) -> tuple[int, ...]:
    """A list of CPUs (``0-3,8``), empty if the file does not exist; raises as :func:`parsed`."""
    return parsed(parse_ranges, read_or(files, path, ""), path)


def target_of(files: Attributes, path: str) -> str | None:
    """The last component of a link's target; None if there is no such link."""
    try:
        return files.target(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def names_in(files: Attributes, path: str) -> list[str]:
    """The names in a directory, empty if it does not exist."""
    try:
        return files.names(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
