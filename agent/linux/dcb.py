"""Data Center Bridging over rtnetlink (include/uapi/linux/dcbnl.h, net/dcb/dcbnl.c).

The messages equal those of iproute2's `dcb`, byte for byte. They were not run on a NIC: how mlx5 handles them is taken from its
source (drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable

from pyroute2.netlink.rtnl import RTM_GETDCB, RTM_SETDCB

from agent.linux.messages import NLA_F_NESTED, ask, attribute, attributes, decoder, ignoring
from agent.machine import DcbState

# struct dcbmsg: family (AF_UNSPEC), command, padding.
DCBMSG = struct.Struct("=BBH")
IEEE_SET = 20
IEEE_GET = 21
IEEE_DEL = 27

ATTR_IFNAME = 1
ATTR_IEEE = 13
ATTR_IEEE_PFC = 2
ATTR_IEEE_APP_TABLE = 3
ATTR_IEEE_APP = 1

# struct ieee_pfc: capability, enabled priorities, mbc, delay, then counters that drivers ignore.
PFC_ENABLED = 1
PFC_SIZE = 136
# struct dcb_app: selector, priority, protocol.
APP = struct.Struct("=BBH")
SELECTOR_DSCP = 5


class LinuxDcb:
    """Data Center Bridging over netlink. Each request opens a socket."""

    def state(self, netdev: str) -> DcbState | None:
        with ignoring(errno.EOPNOTSUPP, errno.ENODEV):
            return decode(_get(netdev))
        return None

    def set_pfc(self, netdev: str, priorities: frozenset[int]) -> None:
        """Send the driver's record back with other priorities: mbc and delay (for the cable's length) must stay."""
        record = dict(attributes(_get(netdev))).get(ATTR_IEEE_PFC)
        if record is None:
            raise OSError(errno.EOPNOTSUPP, f"the driver of {netdev} reports no PFC")
        enabled = bytes([sum(1 << priority for priority in priorities)])
        changed = record[:PFC_ENABLED] + enabled + record[PFC_ENABLED + 1 :]
        _send(IEEE_SET, netdev, attribute(ATTR_IEEE_PFC, changed))

    def add_dscp(self, netdev: str, entries: frozenset[tuple[int, int]]) -> None:
        _send(IEEE_SET, netdev, app_table(entries))

    def remove_dscp(self, netdev: str, entries: frozenset[tuple[int, int]]) -> None:
        """Send the entries in one message. The kernel finds an entry only by DSCP and priority together."""
        _send(IEEE_DEL, netdev, app_table(entries))


def app_table(entries: Iterable[tuple[int, int]]) -> bytes:
    """DCB_ATTR_IEEE_APP_TABLE with these pairs of a DSCP and a priority."""
    records = (APP.pack(SELECTOR_DSCP, priority, dscp) for dscp, priority in sorted(entries))
    return attribute(ATTR_IEEE_APP_TABLE | NLA_F_NESTED, b"".join(attribute(ATTR_IEEE_APP, each) for each in records))


def request(command: int, netdev: str, ieee: bytes | None = None) -> bytes:
    """The body of a request: struct dcbmsg, the netdev's name, and the nested attributes."""
    body = DCBMSG.pack(socket.AF_UNSPEC, command, 0) + attribute(ATTR_IFNAME, os.fsencode(netdev) + b"\0")
    return body if ieee is None else body + attribute(ATTR_IEEE | NLA_F_NESTED, ieee)


@decoder
def decode(ieee: bytes) -> DcbState:
    """The state from the attributes of an answer (DCB_ATTR_IEEE)."""
    values = dict(attributes(ieee))
    pfc = values.get(ATTR_IEEE_PFC, bytes(PFC_SIZE))[PFC_ENABLED]
    entries = (APP.unpack_from(entry) for _, entry in attributes(values.get(ATTR_IEEE_APP_TABLE, b"")))
    dscp = frozenset((protocol, priority) for selector, priority, protocol in entries if selector == SELECTOR_DSCP)
    return DcbState(frozenset(bit for bit in range(8) if pfc >> bit & 1), dscp)


def _get(netdev: str) -> bytes:
    for answer in ask(socket.NETLINK_ROUTE, RTM_GETDCB, request(IEEE_GET, netdev)):
        for kind, payload in attributes(answer[DCBMSG.size :]):
            if kind == ATTR_IEEE:
                return payload
    return b""


def _send(command: int, netdev: str, ieee: bytes) -> None:
    answers = ask(socket.NETLINK_ROUTE, RTM_SETDCB, request(command, netdev, ieee))
    # If the driver refuses, the acknowledgement still is 0. Its negative errno is in the answer, as one unsigned octet.
    for answer in answers:
        if refusal := refusal_in(answer):
            raise OSError(refusal, os.strerror(refusal))


def refusal_in(answer: bytes) -> int:
    """The errno with which a driver refused, as dcbnl_ieee_set() answers; 0 if it did not."""
    octets = (payload[0] for kind, payload in attributes(answer[DCBMSG.size :]) if kind == ATTR_IEEE and payload)
    return -next(octets, 0) & 0xFF
