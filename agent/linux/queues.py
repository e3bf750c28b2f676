"""The queues of a netdev, as the kernel itself knows them: the generic netlink family ``netdev``.

A driver links its queues with NAPI instances, and these with interrupts (netif_queue_set_napi and netif_napi_set_irq,
net/core/dev.c). Linux 6.8 and later answer; include/uapi/linux/netdev.h has the numbers, and
Documentation/netlink/specs/netdev.yaml explains them. No request enters the driver.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from pyroute2.netlink import NETLINK_GENERIC, ctrlmsg

from agent.linux.messages import U32, ask, attribute, attributes, decoder, dump, ignoring, numbers, u32
from agent.machine import QueueIrq, QueueUser

FAMILY = "netdev"
QUEUE_GET, NAPI_GET, NAPI_SET = 10, 11, 14
QUEUE_ID, QUEUE_IFINDEX, QUEUE_TYPE, QUEUE_NAPI = 1, 2, 3, 4
# By the attribute that shows it. AF_XDP is in queues since Linux 6.15, in sock_diag since 5.1.
HOW = {5: "devmem TCP", 6: "io_uring zero copy", 7: "AF_XDP", 8: "a netkit lease"}
NAPI_IFINDEX, NAPI_ID, NAPI_IRQ, NAPI_PID = 1, 2, 3, 4
NAPI_FACTS = {NAPI_IRQ: "irq", NAPI_PID: "pid"}
# Since Linux 6.13, threaded since 6.17.
NAPI_SETTINGS = {5: "defer_hard_irqs", 6: "gro_flush_timeout", 7: "irq_suspend_timeout", 8: "threaded"}
RX, TX = 0, 1
"""NETDEV_QUEUE_TYPE_RX and _TX."""

GENL = struct.Struct("=BBH")
U16, U64 = struct.Struct("=H"), struct.Struct("=Q")
CONTROL = numbers(ctrlmsg)
GETFAMILY = 3
"""CTRL_CMD_GETFAMILY, include/uapi/linux/genetlink.h."""

GENL_ID_CTRL = 16


def queue_irqs(ifindex: int) -> Mapping[int, QueueIrq]:
    """The interrupts that serve queues of a netdev, by number; empty if the kernel or the driver does not tell.

    :raises OSError: the kernel's refusal; ENODEV: there is no such netdev.
    """
    return served(_dumped(NAPI_GET, NAPI_IFINDEX, ifindex), _dumped(QUEUE_GET, QUEUE_IFINDEX, ifindex))


def queue_users(ifindex: int, sockets: Iterable[tuple[int, QueueUser]]) -> tuple[QueueUser, ...]:
    """The programs to which the kernel gave queues of a netdev, in the order of the queues.

    :param sockets: the AF_XDP sockets of all netdevs, by ifindex.
    :raises OSError: as :func:`queue_irqs`.
    """
    known = [user for index, user in sockets if index == ifindex]
    return users(_dumped(QUEUE_GET, QUEUE_IFINDEX, ifindex), known)


def users(queues: Iterable[bytes], sockets: Collection[QueueUser]) -> tuple[QueueUser, ...]:
    """The users in the entries of the dump, and these sockets."""
    known = {(user.queue, user.how) for user in sockets}
    taken = ((entry, kind) for entry in queues for kind, _ in attributes(entry, GENL.size) if kind in HOW)
    shown = {(_numbers(entry, QUEUE_ID)[0], HOW[kind]) for entry, kind in taken} - known
    found = [*sockets, *(QueueUser(number, how) for number, how in shown)]
    return tuple(sorted(found, key=lambda user: (user.queue, user.how, user.socket)))


def _dumped(command: int, index: int, ifindex: int) -> list[bytes]:
    family = _family()
    request = GENL.pack(command, 1, 0) + attribute(index, U32.pack(ifindex))
    # Linux 6.7 has the family without these requests.
    with ignoring(errno.EOPNOTSUPP):
        return [] if family is None else dump(NETLINK_GENERIC, family, request)
    return []


def served(napis: Iterable[bytes], queues: Iterable[bytes]) -> Mapping[int, QueueIrq]:
    """The interrupts and their queues in the entries of both dumps."""
    irqs = {napi: irq for napi, irq in (_numbers(entry, NAPI_ID, NAPI_IRQ) for entry in napis) if napi and irq}
    of_queues = (_numbers(entry, QUEUE_NAPI, QUEUE_TYPE, QUEUE_ID) for entry in queues)
    # Of several queues the lowest stays.
    first = {(irqs[napi], kind): number for napi, kind, number in sorted(of_queues, reverse=True) if napi in irqs}
    return {irq: QueueIrq(first.get((irq, RX)), first.get((irq, TX))) for irq, _ in first}


def napis(ifindex: int) -> Mapping[int, Mapping[str, int]]:
    """The settings of each NAPI instance of a netdev, its interrupt and thread, by its ID.

    Linux before 6.13 also lists those without an ID, which only transmit and cannot be set (netif_napi_add_tx; mana has some).

    :raises OSError: as :func:`queue_irqs`.
    """
    entries = _dumped(NAPI_GET, NAPI_IFINDEX, ifindex)
    return dict(decode_napi(entry) for entry in entries if _numbers(entry, NAPI_ID) != (0,))


@decoder
def decode_napi(entry: bytes) -> tuple[int, Mapping[str, int]]:
    """The ID of an instance, and what it has. The kernel writes a timeout in 4 or 8 bytes."""
    found = dict(attributes(entry, GENL.size))
    names = NAPI_FACTS | NAPI_SETTINGS
    known = {names[kind]: value for kind, value in found.items() if kind in names}
    return u32(found[NAPI_ID]), {name: int.from_bytes(value, sys.byteorder) for name, value in known.items()}


def set_napi(napi: int, given: Mapping[str, int]) -> None:
    """Set values of a NAPI instance.

    :raises OSError: the kernel's refusal; ENOENT: there is no such instance; EOPNOTSUPP: it is older than Linux 6.13.
    """
    family = _family()
    if family is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    kinds = {name: kind for kind, name in NAPI_SETTINGS.items()}
    values = (attribute(kinds[name], (U32 if value >> 32 == 0 else U64).pack(value)) for name, value in given.items())
    ask(NETLINK_GENERIC, family, GENL.pack(NAPI_SET, 1, 0) + attribute(NAPI_ID, U32.pack(napi)) + b"".join(values))


def _numbers(entry: bytes, *wanted: int) -> tuple[int, ...]:
    """The wanted attributes; 0 for one that the entry lacks."""
    found = {kind: payload for kind, payload in attributes(entry, GENL.size) if kind in wanted}
    return tuple(u32(found[kind]) if kind in found else 0 for kind in wanted)


@cache
def _family() -> int | None:
    name = attribute(CONTROL["CTRL_ATTR_FAMILY_NAME"], FAMILY.encode() + b"\0")
    with ignoring(errno.ENOENT):
        (answer,) = ask(NETLINK_GENERIC, GENL_ID_CTRL, GENL.pack(GETFAMILY, 1, 0) + name)
        return _family_id(answer)
    return None


@decoder
def _family_id(answer: bytes) -> int:
    (number,) = U16.unpack(dict(attributes(answer, GENL.size))[CONTROL["CTRL_ATTR_FAMILY_ID"]])
    return int(number)
