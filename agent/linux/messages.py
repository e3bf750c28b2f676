"""Netlink messages that pyroute2 does not know: put together, sent, and taken apart again (include/uapi/linux/netlink.h)."""

from __future__ import annotations

import os
import socket
import struct

from agent.receive_buffer import widen

HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
ERROR = struct.Struct("=i")
NLMSG_ERROR = 2
NLMSG_DONE = 3
NLM_F_REQUEST = 1
NLM_F_ACK = 4
NLM_F_DUMP_INTR = 0x10
NLM_F_DUMP = 0x300
NLA_F_NESTED = 1 << 15
NLA_TYPE_MASK = 0x3FFF

# A PF's answer tells all of its VFs in one message: 128 of them take 25 kB, 1,024 of them 200 kB.
ROOM = 1 << 18
# A table that changes while it is told may be told again this often.
TELLINGS = 5


def attribute(kind: int, payload: bytes) -> bytes:
    """An attribute, padded as the next one needs it."""
    packed = ATTRIBUTE.pack(ATTRIBUTE.size + len(payload), kind) + payload
    return packed + bytes(-len(packed) % 4)


def attributes(data: bytes, offset: int = 0) -> list[tuple[int, bytes]]:
    """The attributes in ``data`` from ``offset`` on: type without its flags, payload."""
    # A netdev has fifty, and is asked for again and again: no generator, no look-up of what does not change.
    found = []
    unpack, size, mask = ATTRIBUTE.unpack_from, ATTRIBUTE.size, NLA_TYPE_MASK
    last = len(data) - size
    while offset <= last:
        length, kind = unpack(data, offset)
        if length < size:
            break
        found.append((kind & mask, data[offset + size : offset + length]))
        offset += (length + 3) & ~3
    return found


def ask(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """Send one request, and give the bodies of what comes before its acknowledgement.

    :raises OSError: the kernel's refusal.
    """
    found, _ = _exchange(protocol, kind, NLM_F_ACK, body)
    return found


def dump(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """Have a whole table told: the bodies of its entries. If it changed meanwhile, entries may be missing: it is told again.

    :raises OSError: the kernel's refusal.
    """
    for _ in range(TELLINGS):
        found, interrupted = _exchange(protocol, kind, NLM_F_DUMP, body)
        if not interrupted:
            break
    return found


def _exchange(protocol: int, kind: int, flags: int, body: bytes) -> tuple[list[bytes], bool]:
    message = HEADER.pack(HEADER.size + len(body), kind, NLM_F_REQUEST | flags, 1, 0) + body
    found: list[bytes] = []
    interrupted = False
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as channel:
        channel.bind((0, 0))
        # An answer of ROOM does not fit into the usual buffer.
        widen(channel, 2 * ROOM)
        channel.send(message)
        while True:
            data = channel.recv(ROOM)
            offset = 0
            while offset + HEADER.size <= len(data):
                length, answer, given, _, _ = HEADER.unpack_from(data, offset)
                interrupted = interrupted or bool(given & NLM_F_DUMP_INTR)
                if answer in (NLMSG_ERROR, NLMSG_DONE):
                    # A dump may end with an error, too.
                    refusal = -ERROR.unpack_from(data, offset + HEADER.size)[0]
                    if refusal > 0:
                        raise OSError(refusal, os.strerror(refusal))
                    return found, interrupted
                found.append(data[offset + HEADER.size : offset + length])
                offset += (length + 3) & ~3
