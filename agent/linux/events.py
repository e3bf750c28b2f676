"""What the kernel announces: rtnetlink, uevents and ethtool, by pyroute2's sockets.

pyroute2 opens and subscribes the sockets. Messages are taken from them by recvmsg(2): its own readers give up a socket that
overran (ENOBUFS), and leave out the ancillary data that tells another namespace's events. Only what names a device is decoded.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from attrs import frozen
from pyroute2.netlink import NETLINK_LISTEN_ALL_NSID, SOL_NETLINK, genlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic import GenericNetlinkSocket
from pyroute2.netlink.generic.ethtool import ETHTOOL_GENL_NAME, ethtoolheader
from pyroute2.netlink.rtnl import (
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_DELROUTE,
    RTM_DELRULE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTMGRP_IPV4_IFADDR,
    RTMGRP_IPV4_ROUTE,
    RTMGRP_IPV4_RULE,
    RTMGRP_IPV6_IFADDR,
    RTMGRP_IPV6_ROUTE,
    RTMGRP_IPV6_RULE,
    RTMGRP_LINK,
)
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.iprsocket import IPRSocket
from pyroute2.netlink.uevent import MONITOR_GROUP_KERNEL, MONITOR_GROUP_UDEV, UeventSocket

from agent.linux import routing
from agent.linux.messages import ATTRIBUTE, HEADER, attributes, layout, numbers, widen
from agent.linux.sockets import closed_in_the_end
from agent.machine import Event, EventSource

BUFFER = 16 << 20
"""Bytes of events that may wait, as the kernel counts them: some 14,000 link events; an overrun costs a full reading."""

AT_ONCE = 10_000
"""Messages that are taken in one go: a storm must not keep the agent from working."""

# Addresses that come and go, routes and rules that go.
ROUTING_GROUPS = (
    RTMGRP_IPV4_IFADDR
    | RTMGRP_IPV6_IFADDR
    | RTMGRP_IPV4_ROUTE
    | RTMGRP_IPV6_ROUTE
    | RTMGRP_IPV4_RULE
    | RTMGRP_IPV6_RULE
)

IFINFOMSG, GENLMSG = layout(ifinfmsg.fields), layout(genlmsg.fields)
# Every ethtool notification begins with this nest, and in it the netdev's index (include/uapi/linux/ethtool_netlink.h).
ETHTOOL_MONITOR = "monitor"
ETHTOOL_A_HEADER = 1
ETHTOOL_A_HEADER_DEV_INDEX = numbers(ethtoolheader)["ETHTOOL_A_HEADER_DEV_INDEX"]

IFLA_IFNAME = numbers(ifinfmsg)["IFLA_IFNAME"]
# Ancillary data of an event from another namespace: that namespace's number.
NSID_ROOM = socket.CMSG_SPACE(4)
# The header of IFLA_PARENT_DEV_NAME (Linux 5.14) with a PCI address in it: 12 characters and a NUL.
PARENT = ATTRIBUTE.pack(ATTRIBUTE.size + 13, numbers(ifinfmsg)["IFLA_PARENT_DEV_NAME"])

ADDRESS = re.compile(rb"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
SUBSYSTEMS = frozenset({b"pci", b"net", b"infiniband", b"queues"})
CPU = b"cpu"
DEVICES = "/sys/bus/pci/devices"

Decode = Callable[[bytes, bool], Iterator[Event]]


@frozen
class NetlinkSource:
    """One subscribed socket. ``owner``: pyroute2's object, which closes the socket when it goes."""

    owner: Any
    channel: socket.socket
    decode: Decode

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self.channel.fileno()

    def receive(self) -> tuple[list[Event], bool]:
        """Take the messages that wait, at most :data:`AT_ONCE`."""
        events: list[Event] = []
        lost = False
        for _ in range(AT_ONCE):
            try:
                message, ancillary, _, _ = self.channel.recvmsg(1 << 16, NSID_ROOM, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True
                continue
            events += self.decode(message, bool(ancillary))
        return events, lost


class LinuxEvents:
    """The kernel's announcements. A subscription lasts as long as what :meth:`subscribe` returns."""

    def subscribe(self) -> list[EventSource]:
        """Subscribe to links in all namespaces, to this one's addresses and routes, to uevents and ethtool's notifications."""
        return [_links(), _routing(), _uevents(), *_ethtool()]


def _links() -> NetlinkSource:
    """A netdev that is moved to another namespace gives that a number in ours, and its events arrive from then on.

    A socket inside a pod's namespace would keep the namespace alive. This needs CAP_NET_BROADCAST; without it, only the agent's
    regular full reading sees such VFs.
    """
    owner = closed_in_the_end(IPRSocket(groups=0))
    widen(owner.socket, BUFFER)
    owner.bind(groups=RTMGRP_LINK)
    with suppress(PermissionError):
        owner.socket.setsockopt(SOL_NETLINK, NETLINK_LISTEN_ALL_NSID, 1)
    return NetlinkSource(owner, owner.socket, link_events)


def _routing() -> NetlinkSource:
    """A socket of its own: that of links would also hear of every pod's addresses and routes."""
    owner = closed_in_the_end(IPRSocket(groups=0))
    widen(owner.socket, BUFFER)
    owner.bind(groups=ROUTING_GROUPS)
    return NetlinkSource(owner, owner.socket, routing_events)


def _uevents() -> NetlinkSource:
    """Both groups: the kernel's own event, and udev's once it has handled the device."""
    owner = closed_in_the_end(UeventSocket())
    channel = owner.asyncore.socket
    widen(channel, BUFFER)
    owner.bind(groups=MONITOR_GROUP_KERNEL | MONITOR_GROUP_UDEV)
    return NetlinkSource(owner, channel, uevent_events)


def _ethtool() -> list[NetlinkSource]:
    """None on a kernel whose ethtool has no netlink (before Linux 5.6)."""
    owner: Any = closed_in_the_end(GenericNetlinkSocket())
    # A missing family is no error here; pyroute2 would write it to standard error.
    owner.asyncore.module_err_level = "debug"
    try:
        owner.bind(ETHTOOL_GENL_NAME, genlmsg)
    except NetlinkError:
        return []
    channel = owner.asyncore.socket
    widen(channel, BUFFER)
    owner.add_membership(ETHTOOL_MONITOR)
    return [NetlinkSource(owner, channel, ethtool_events)]


def link_events(message: bytes, elsewhere: bool) -> Iterator[Event]:
    """The links of an rtnetlink message.

    :param elsewhere: it is from another namespace, where an index means another netdev; there the parent names the function.
    """
    offset = 0
    while offset + HEADER.size + IFINFOMSG.size <= len(message):
        length, kind, _, _, _ = HEADER.unpack_from(message, offset)
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            if elsewhere:
                yield Event(netdev_of=_parent(message, offset, length))
            else:
                yield Event(
                    ifindex=IFINFOMSG.unpack_from(message, offset + HEADER.size)[2],
                    netdev=_name(message, offset, length),
                )
        offset += max(HEADER.size, (length + 3) & ~3)


def _name(message: bytes, offset: int, length: int) -> str:
    """The netdev's name, which is the first attribute of an announcement (rtnl_fill_ifinfo, net/core/rtnetlink.c)."""
    start, end = offset + HEADER.size + IFINFOMSG.size, min(offset + length, len(message))
    if start + ATTRIBUTE.size > end:
        return ""
    size, kind = ATTRIBUTE.unpack_from(message, start)
    if kind != IFLA_IFNAME or not ATTRIBUTE.size < size <= end - start:
        return ""
    return message[start + ATTRIBUTE.size : start + size].rstrip(b"\0").decode(errors="surrogateescape")


def routing_events(message: bytes, elsewhere: bool) -> Iterator[Event]:
    """The netdevs whose addresses changed, and the tables of which a route or a rule is gone."""
    offset = 0
    while offset + HEADER.size + routing.IFADDRMSG.size <= len(message):
        length, kind, _, _, _ = HEADER.unpack_from(message, offset)
        body = message[offset + HEADER.size : offset + length]
        if kind in (RTM_NEWADDR, RTM_DELADDR) and len(body) >= routing.IFADDRMSG.size:
            yield Event(ifindex=routing.IFADDRMSG.unpack_from(body)[4])
        elif kind in (RTM_DELROUTE, RTM_DELRULE) and len(body) >= routing.RTMSG.size:
            yield Event(table=routing.table_of(body))
        offset += max(HEADER.size, (length + 3) & ~3)


def _parent(message: bytes, offset: int, length: int) -> str:
    # Searching for the header costs a tenth of walking through all attributes. A false match is no known address.
    start = message.find(PARENT, offset, offset + length)
    return message[start + 4 : start + 16].decode(errors="replace") if start >= 0 else ""


def ethtool_events(message: bytes, elsewhere: bool) -> Iterator[Event]:
    """The netdev of a notification, which is one message; other namespaces send none here."""
    header = dict(attributes(message, HEADER.size + GENLMSG.size)).get(ETHTOOL_A_HEADER, b"")
    index = dict(attributes(header)).get(ETHTOOL_A_HEADER_DEV_INDEX, b"")
    if len(index) == 4:
        yield Event(ifindex=struct.unpack("=I", index)[0])


def uevent_events(message: bytes, elsewhere: bool) -> Iterator[Event]:
    """The PCI function below which a uevent happened, and its PF if it is a VF; every device for a CPU that came or went."""
    subsystem = _value(message, b"SUBSYSTEM")
    if subsystem == CPU:
        yield Event(every_device=True)
    elif subsystem in SUBSYSTEMS and (addresses := ADDRESS.findall(_value(message, b"DEVPATH"))):
        function = addresses[-1].decode()
        yield Event(function=function, physical_function=_physical_function(function), is_pci=subsystem == b"pci")


def _physical_function(function: str) -> str:
    """The PF of a VF, empty for any other function. The link is there before the event of a new VF is sent."""
    try:
        return os.readlink(f"{DEVICES}/{function}/physfn").rpartition("/")[2]  # noqa: PTH115
    except OSError:
        return ""


def _value(message: bytes, key: bytes) -> bytes:
    """The value of a key of a uevent; never the first key, which is ACTION."""
    return message.partition(b"\0" + key + b"=")[2].partition(b"\0")[0]
