"""Reads netlink messages with the struct module, by the numbers and layouts of pyroute2's tables.

pyroute2 makes all writes. Why the readings of each pass do not use it: docs/decisions/0022-rtnetlink-reads.md.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from pyroute2.netlink import (
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    nlmsg,
    nlmsgerr,
)
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

T = TypeVar("T")

SO_RCVBUFFORCE = 33
"""include/uapi/asm-generic/socket.h; the socket module has no name for it."""

NLA_F_NESTED = 1 << 15
NLA_TYPE_MASK = 0x3FFF


def layout(fields: tuple[tuple[str, str], ...]) -> struct.Struct:
    """The struct of a message whose ``fields`` pyroute2 lists (name, format)."""
    return struct.Struct("=" + "".join(code for _, code in fields))


def numbers(message: Any) -> Mapping[str, int]:
    """The number of each attribute of a pyroute2 message, by the name that the kernel's header gives it."""
    return {name: number for number, (name, *_) in enumerate(message.nla_map)}


HEADER = layout(nlmsg.header)
ERROR = layout(nlmsgerr.fields)
ATTRIBUTE = struct.Struct("=HH")
S32, U32 = struct.Struct("=i"), struct.Struct("=I")
IFINFOMSG = layout(ifinfmsg.fields)

IFLA_EXT_MASK = numbers(ifinfmsg)["IFLA_EXT_MASK"]
# include/uapi/linux/rtnetlink.h; pyroute2 has no names for them.
RTEXT_FILTER_VF = 1
RTEXT_FILTER_SKIP_STATS = 8

LARGEST = 1 << 20
"""Bytes of an answer. A PF's answer lists all its VFs in one message: 128 of them take 25 kB, 4,096 of them 800 kB. The kernel
cuts off what does not fit."""

TRIES = 50
"""How often a dump is read, at most, if the table changes meanwhile. A storm of changes leaves room for one of them."""


def widen(channel: socket.socket, size: int) -> None:
    """Let ``size`` bytes wait in a socket, as the kernel counts them; without CAP_NET_ADMIN at most net.core.rmem_max."""
    try:
        channel.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size)
    except PermissionError:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def attribute(kind: int, payload: bytes) -> bytes:
    """An attribute, padded to the alignment of the next one."""
    packed = ATTRIBUTE.pack(ATTRIBUTE.size + len(payload), kind) + payload
    return packed + bytes(-len(packed) % 4)


def attributes(data: bytes, offset: int = 0) -> list[tuple[int, bytes]]:
    """The attributes in ``data`` from ``offset`` on: type without its flags, payload."""
    # A netdev has fifty attributes, and each pass reads every netdev. So this is no generator, and looks no name up twice.
    entries = []
    unpack, size, mask = ATTRIBUTE.unpack_from, ATTRIBUTE.size, NLA_TYPE_MASK
    last = len(data) - size
    while offset <= last:
        length, kind = unpack(data, offset)
        if length < size:
            break
        entries.append((kind & mask, data[offset + size : offset + length]))
        offset += (length + 3) & ~3
    return entries


def u32(payload: bytes) -> int:
    """The number in an attribute of 32 bits."""
    number: int = U32.unpack(payload)[0]
    return number


def text(payload: bytes) -> str:
    """A name as sysfs lists it, which may be any bytes but blanks, slashes and colons (dev_valid_name, net/core/dev.c)."""
    return os.fsdecode(payload.rstrip(b"\0"))


def asked_links(more: int = 0, ifindex: int = 0) -> bytes:
    """The body of a request for one link, or for all. ``more``: what is asked for besides.

    VFs' statistics are left out: mlx5 reads those of each VF from its firmware. The 64 kB of an attribute have room for 334 VFs
    without them, and for 220 with them (seen on 6.1 with netdevsim).
    """
    mask = U32.pack(RTEXT_FILTER_SKIP_STATS | more)
    return IFINFOMSG.pack(socket.AF_UNSPEC, 0, ifindex, 0, 0) + attribute(IFLA_EXT_MASK, mask)


def decoder(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Make a decoder of a message's body raise OSError (EPROTO) for a body that it cannot read.

    Drivers fill in parts of messages. If a driver writes nonsense, its device is unreadable, and the pass goes on.
    """

    @wraps(decode)
    def checked(body: bytes) -> T:
        try:
            return decode(body)
        except (struct.error, LookupError, ValueError, OverflowError) as error:
            raise OSError(errno.EPROTO, f"the kernel's answer cannot be read: {error!r}") from error

    return checked


class ignoring:
    """Skips the rest of a `with` block if the kernel answers one of these errors, as contextlib.suppress() does."""

    def __init__(self, *errnos: int) -> None:
        self._errnos = errnos

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        return isinstance(error, OSError) and error.errno in self._errnos


def ask(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """Send a request and return the bodies of the messages before its acknowledgement.

    :raises OSError: the kernel's refusal.
    """
    replies, _ = _exchange(protocol, kind, NLM_F_ACK, body)
    return replies


def dump(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """Dump a table and return the bodies of its entries. The dump is repeated if the table changed meanwhile.

    :raises OSError: the kernel's refusal; EAGAIN: the table changed each time. Entries may be missing from such a dump, and
        what is missing would count as gone: an address, or the route that shows a user.
    """
    for _ in range(TRIES):
        replies, interrupted = _exchange(protocol, kind, NLM_F_DUMP, body)
        if not interrupted:
            return replies
    raise OSError(errno.EAGAIN, f"the kernel's table changed during each of {TRIES} readings; try again")


def _exchange(protocol: int, kind: int, flags: int, body: bytes) -> tuple[list[bytes], bool]:
    message = HEADER.pack(HEADER.size + len(body), kind, NLM_F_REQUEST | flags, 1, 0) + body
    replies: list[bytes] = []
    interrupted = False
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as channel:
        channel.bind((0, 0))
        # The default buffer is too small for the largest answer.
        widen(channel, 2 * LARGEST)
        channel.send(message)
        while True:
            bodies, changed, ended = answers(channel.recv(LARGEST))
            replies += bodies
            interrupted = interrupted or changed
            if ended:
                return replies, interrupted


@decoder
def answers(data: bytes) -> tuple[list[bytes], bool, bool]:
    """The bodies of the messages in ``data``, whether the table changed meanwhile, and whether the answer is complete.

    :raises OSError: the kernel's refusal; EPROTO: it is no series of messages.
    """
    replies: list[bytes] = []
    interrupted = False
    offset = 0
    while offset + HEADER.size <= len(data):
        length, answer, given, _, _ = HEADER.unpack_from(data, offset)
        interrupted = interrupted or bool(given & NLM_F_DUMP_INTR)
        if answer in (NLMSG_ERROR, NLMSG_DONE):
            # A dump may also end with an error.
            refusal = -ERROR.unpack_from(data, offset + HEADER.size)[0]
            if refusal > 0:
                raise OSError(refusal, os.strerror(refusal))
            return replies, interrupted, True
        if not HEADER.size <= length <= len(data) - offset:
            raise ValueError(f"a message of {length} bytes, of which {len(data) - offset} are there")
        replies.append(data[offset + HEADER.size : offset + length])
        offset += (length + 3) & ~3
    return replies, interrupted, False
