"""Helps cases to wait for a kernel's asynchronous changes, and to expect its errors."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def soon(probe: Callable[[], T | None], what: str, within: float = 20.0) -> T:
    """The first value of ``probe`` that is not empty."""
    deadline = time.monotonic() + within
    while (value := probe()) is None:
        assert time.monotonic() < deadline, f"no {what} within {within:.0f} s"
        time.sleep(0.05)
    return value


def errno_of(action: Callable[[], object]) -> int | None:
    """The errno of the OSError that an action raises; None if it raises none."""
    try:
        action()
    except OSError as error:
        return error.errno
    return None
