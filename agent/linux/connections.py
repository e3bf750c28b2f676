"""The established TCP connections, by sock_diag (include/uapi/linux/inet_diag.h, net/ipv4/inet_diag.c)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import IPv6Address
from struct import Struct

from agent.linux.messages import decoder, dump
from agent.machine import Connection

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
TCP_ESTABLISHED = 1
# struct inet_diag_req_v2 up to its addresses, which a dump does not need: family, protocol, attributes, states.
REQUEST = Struct("=BBBxI48x")
# struct inet_diag_msg: family, state, ports, addresses, netdev, inode. Ports and addresses are in network order.
ANSWER = Struct(">BB2xHH16s16s4s24x4s")
NATIVE = Struct("=I")


def established() -> Iterator[Connection]:
    """The connections of both families."""
    for family in (socket.AF_INET, socket.AF_INET6):
        body = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << TCP_ESTABLISHED)
        yield from map(decode_connection, dump(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, body))


@decoder
def decode_connection(body: bytes) -> Connection:
    """A connection (struct inet_diag_msg)."""
    family, _, local_port, peer_port, local, peer, ifindex, inode = ANSWER.unpack_from(body)
    return Connection(
        local=_address(family, local),
        local_port=local_port,
        peer=_address(family, peer),
        peer_port=peer_port,
        ifindex=NATIVE.unpack(ifindex)[0],
        socket=f"socket:[{NATIVE.unpack(inode)[0]}]",
    )


def _address(family: int, address: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[:4])
    ip = IPv6Address(address)
    return str(ip.ipv4_mapped or ip)
