"""The established TCP connections and the bound AF_XDP sockets, by sock_diag.

include/uapi/linux/inet_diag.h, net/ipv4/inet_diag.c; include/uapi/linux/xdp_diag.h, net/xdp/xsk_diag.c.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from ipaddress import IPv6Address
from struct import Struct

from agent.linux.messages import attributes, decoder, dump, ignoring, u32
from agent.machine import Connection, QueueUser

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
TCP_ESTABLISHED = 1
# struct inet_diag_req_v2 up to its addresses, which a dump does not need: family, protocol, attributes, states.
REQUEST = Struct("=BBBxI48x")
# struct inet_diag_msg: family, state, ports, addresses, netdev, inode. Ports and addresses are in network order.
ANSWER = Struct(">BB2xHH16s16s4s24x4s")

AF_XDP = 44
XDP_SHOW_INFO = XDP_DIAG_INFO = 1
# struct xdp_diag_req and xdp_diag_msg: family, protocol or type, inode.
XDP_REQUEST = Struct("=BBxx4xI8x")
XDP_ANSWER = Struct("=BBxxI8x")
IFINDEX_AND_QUEUE = Struct("=II")


def established() -> Iterator[Connection]:
    """The connections of both families."""
    for family in (socket.AF_INET, socket.AF_INET6):
        body = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << TCP_ESTABLISHED)
        yield from map(decode_connection, dump(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, body))


def xdp_sockets() -> list[tuple[int, QueueUser]]:
    """The netdev (by ifindex) and the queue of each AF_XDP socket; none if the kernel lists none (its xsk_diag)."""
    with ignoring(errno.ENOENT, errno.EINVAL):
        answers = dump(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, XDP_REQUEST.pack(AF_XDP, 0, XDP_SHOW_INFO))
        return [decode_xdp_socket(answer) for answer in answers]
    return []


@decoder
def decode_xdp_socket(body: bytes) -> tuple[int, QueueUser]:
    """The ifindex of a socket's netdev, and its queue (struct xdp_diag_msg, struct xdp_diag_info)."""
    inode = XDP_ANSWER.unpack_from(body)[2]
    ifindex, queue = IFINDEX_AND_QUEUE.unpack(dict(attributes(body, XDP_ANSWER.size))[XDP_DIAG_INFO])
    return ifindex, QueueUser(queue, "AF_XDP", f"socket:[{inode}]")


@decoder
def decode_connection(body: bytes) -> Connection:
    """A connection (struct inet_diag_msg)."""
    family, _, local_port, peer_port, local, peer, ifindex, inode = ANSWER.unpack_from(body)
    return Connection(
        local=_address(family, local),
        local_port=local_port,
        peer=_address(family, peer),
        peer_port=peer_port,
        ifindex=u32(ifindex),
        socket=f"socket:[{u32(inode)}]",
    )


def _address(family: int, address: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[:4])
    ip = IPv6Address(address)
    return str(ip.ipv4_mapped or ip)
