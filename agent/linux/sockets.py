"""Closes pyroute2's sockets.

pyroute2 0.9 runs an event loop of asyncio for each socket, and only ``close()`` closes that loop. A loop that Python collects
unclosed, at the latest when the process ends, prints "Exception ignored in: <function BaseEventLoop.__del__ ...>".
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any


def close_with(holder: object, opened: Any) -> None:
    """Close ``opened``, one of pyroute2's sockets, once nothing refers to its holder, or when the process ends.

    pyroute2's object refers to itself, so Python collects it at any later moment, also while the loop of another socket runs;
    then its own loop cannot be closed. The holder must not refer to itself, and the thread that opened the socket must be the
    last that refers to the holder: the loop is that thread's.
    """
    weakref.finalize(holder, _close, opened.asyncore)


def _close(core: Any) -> None:
    with suppress(OSError):  # the socket failed before, and pyroute2 raises that error again
        core.close()
