"""Helps cases to wait for a kernel's asynchronous changes, and to expect its errors."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def soon(probe: Callable[[], T | None], what: str, within: float = 20.0) -> T:
    """What ``probe`` finds, once it finds something."""
    deadline = time.monotonic() + within
    while (found := probe()) is None:
        assert time.monotonic() < deadline, f"no {what} within {within:.0f} s"
        time.sleep(0.05)
    return found


def errno_of(action: Callable[[], object]) -> int | None:
    """The number of the error that an action meets; None if it meets none."""
    try:
        action()
    except OSError as error:
        return error.errno
    return None
