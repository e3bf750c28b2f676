"""How much may wait on a socket until it is read."""

from __future__ import annotations

import socket

SO_RCVBUFFORCE = 33
"""include/uapi/asm-generic/socket.h; the socket module has no name for it."""


def widen(channel: socket.socket, size: int) -> None:
    """Let so many bytes wait, as the kernel counts them; without CAP_NET_ADMIN at most net.core.rmem_max."""
    try:
        channel.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size)
    except PermissionError:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
