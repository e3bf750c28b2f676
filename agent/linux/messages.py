"""Netlink messages that pyroute2 does not know: put together, sent, and taken apart again (include/uapi/linux/netlink.h)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
ERROR = struct.Struct("=i")
NLMSG_ERROR = 2
NLM_F_REQUEST = 1
NLM_F_ACK = 4
NLA_F_NESTED = 1 << 15
NLA_TYPE_MASK = 0x3FFF


def attribute(kind: int, payload: bytes) -> bytes:
    """An attribute, padded as the next one needs it."""
    packed = ATTRIBUTE.pack(ATTRIBUTE.size + len(payload), kind) + payload
    return packed + bytes(-len(packed) % 4)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes in ``data``: type without its flags, payload."""
    while len(data) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(data)
        if length < ATTRIBUTE.size:
            return
        yield kind & NLA_TYPE_MASK, data[ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]


def ask(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """Send one request, and give the bodies of what comes before its acknowledgement.

    :raises OSError: the kernel's refusal.
    """
    message = HEADER.pack(HEADER.size + len(body), kind, NLM_F_REQUEST | NLM_F_ACK, 1, 0) + body
    found: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as channel:
        channel.bind((0, 0))
        channel.send(message)
        while True:
            data = channel.recv(1 << 16)
            while len(data) >= HEADER.size:
                length, answer, _, _, _ = HEADER.unpack_from(data)
                part = data[HEADER.size : length]
                if answer == NLMSG_ERROR:
                    refusal = -ERROR.unpack_from(part)[0]
                    if refusal:
                        raise OSError(refusal, os.strerror(refusal))
                    return found
                found.append(part)
                data = data[(length + 3) & ~3 :]
