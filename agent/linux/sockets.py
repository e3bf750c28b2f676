"""The life of pyroute2's sockets.

pyroute2 0.9 runs an event loop of asyncio for each socket, and only ``close()`` closes that loop. A loop that Python collects
unclosed, at the latest when the process ends, prints "Exception ignored in: <function BaseEventLoop.__del__ ...>".
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from pyroute2.netlink import genlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic import GenericNetlinkSocket


def close_with(holder: object, opened: Any) -> None:
    """Close ``opened``, a socket of pyroute2, when its holder is freed or the process ends.

    The socket refers to itself, so without this only a garbage collection frees it. A collection may come while the event loop
    of another socket runs, and then pyroute2 cannot close the loop of this one.

    Python frees the holder by its reference count if the holder does not refer to itself. The loop belongs to the thread that
    opened the socket, so that thread must drop the last reference to the holder.
    """
    weakref.finalize(holder, close, opened)


def close(opened: Any) -> None:
    """Close a socket of pyroute2."""
    with suppress(OSError):  # the socket failed before, and pyroute2 raises that error again
        opened.asyncore.close()


def generic(family: str) -> Any | None:
    """Open a socket for a family of generic netlink; None if the kernel lacks the family.

    :raises OSError: the kernel refuses a socket.
    """
    opened: Any = GenericNetlinkSocket(ext_ack=True)
    # Otherwise pyroute2 writes to standard error if the family is missing.
    opened.asyncore.module_err_level = "debug"
    try:
        opened.bind(family, genlmsg)
    except NetlinkError:
        close(opened)
        return None
    except OSError:
        close(opened)
        raise
    return opened
