"""Reads JSON from outside: limits size and depth, and refuses repeated keys and numbers that are not JSON (NaN)."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

LARGEST_SPEC = 4 << 20
"""Bytes. A spec with a group for each of 4096 VFs has less than one million."""

LARGEST_REPORT = 64 << 20
"""Bytes. A report on a thousand VFs that were just created has four million."""

DEEPEST = 32
"""Levels of nested objects and lists. A spec has 7, a report 4."""


def read(path: Path, largest: int, follow: bool = True) -> str:
    """The text of a file of at most ``largest`` bytes.

    :param follow: follow a symbolic link. False in a folder of another user, whose link could lead to any file that the reader
        may read.
    :raises OSError: it cannot be read, or is not a regular file (reading another kind might never end).
    :raises ValueError: it is larger, or not UTF-8.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    # O_NONBLOCK: opening a FIFO would wait for a writer.
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(largest + 1)
    finally:
        os.close(descriptor)
    if len(content) > largest:
        raise ValueError(too_large(largest))
    return content.decode()


def too_large(largest: int) -> str:
    """The message for a document that is too large."""
    return f"it has more than the {largest} bytes that it may have"


def load(text: str | bytes, largest: int) -> Any:
    """The data of a JSON text.

    :raises ValueError: it is not JSON, too large, or nested too deeply.
    """
    if len(text) > largest or (isinstance(text, str) and len(text.encode(errors="surrogatepass")) > largest):
        raise ValueError(too_large(largest))
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse, parse_int=_whole)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [document]
    for _ in range(DEEPEST + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        if not inner:
            return document
        level = [each for values in inner for each in values]
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"its objects and lists are nested more than {DEEPEST} levels deep"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} is given twice")
            seen.add(key)
    return unique


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        # Python's own message tells the user to change a setting of Python.
        raise ValueError("a number has too many digits") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
