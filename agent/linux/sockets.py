"""Closes pyroute2's sockets.

pyroute2 0.9 runs an event loop of asyncio for each socket, and only ``close()`` closes that loop. A loop that Python collects
unclosed, at the latest when the process ends, prints "Exception ignored in: <function BaseEventLoop.__del__ ...>".
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any


def closed_in_the_end(opened: Any) -> Any:
    """``opened``, one of pyroute2's sockets, which is closed once nothing refers to it, or when the process ends.

    The thread that opened it must also be the last that refers to it: the loop is that thread's.
    """
    weakref.finalize(opened, _close, opened.asyncore)
    return opened


def _close(core: Any) -> None:
    with suppress(OSError):  # the socket failed before, and pyroute2 raises that error again
        core.close()
