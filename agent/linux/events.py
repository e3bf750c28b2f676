"""The kernel's events: rtnetlink, uevents and ethtool, by pyroute2's sockets; and of who owns CPUs, by inotify.

pyroute2 opens and subscribes the sockets, and recvmsg(2) reads them: pyroute2's own readers give up a socket that overran
(ENOBUFS), and leave out the ancillary data that marks the events of other namespaces. Only what names a device is decoded.
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

from agent.linux import file_events, routing
from agent.linux.messages import ATTRIBUTE, HEADER, IFINFOMSG, attributes, layout, numbers, widen
from agent.linux.namespaces import own_number
from agent.linux.sockets import close_with, generic
from agent.machine import Event, EventSource
from agent.report.names import CGROUPS, CPU_CLAIMS, KUBELET_CPUS
from agent.spec.selector import PCI_ADDRESS

BUFFER = 16 << 20
"""Bytes of events that may wait, as the kernel counts them: some 14,000 link events. An overrun costs a full reading."""

AT_ONCE = 10_000
"""Messages that are taken at a time: a storm of events must not keep the agent from working."""

# Of routes and rules, only those that go are events (routing_events).
ROUTING_GROUPS = (
    RTMGRP_IPV4_IFADDR
    | RTMGRP_IPV6_IFADDR
    | RTMGRP_IPV4_ROUTE
    | RTMGRP_IPV6_ROUTE
    | RTMGRP_IPV4_RULE
    | RTMGRP_IPV6_RULE
)

GENLMSG = layout(genlmsg.fields)
# Every ethtool notification begins with this nest, and in it the netdev's index (include/uapi/linux/ethtool_netlink.h).
ETHTOOL_MONITOR = "monitor"
ETHTOOL_A_HEADER = 1
ETHTOOL_A_HEADER_DEV_INDEX = numbers(ethtoolheader)["ETHTOOL_A_HEADER_DEV_INDEX"]

IFLA_IFNAME, IFLA_PARENT_DEV_NAME = (numbers(ifinfmsg)[name] for name in ("IFLA_IFNAME", "IFLA_PARENT_DEV_NAME"))
# Ancillary data of an event: the number of the namespace that it is from.
NSID = struct.Struct("=i")
NSID_ROOM = socket.CMSG_SPACE(NSID.size)
# A PCI address in IFLA_PARENT_DEV_NAME (Linux 5.14), which ends with a NUL, and as a folder in a path of sysfs.
PARENT = re.compile(
    b"(?:%s)(%s)\0"
    % (
        b"|".join(
            re.escape(ATTRIBUTE.pack(ATTRIBUTE.size + length + 1, IFLA_PARENT_DEV_NAME))
            for length in range(len("0000:00:00.0"), len("ffffffff:00:00.0") + 1)
        ),
        PCI_ADDRESS.pattern.encode(),
    )
)
ADDRESS = re.compile(b"(?<=/)%s(?![^/])" % PCI_ADDRESS.pattern.encode())
SUBSYSTEMS = frozenset({b"pci", b"net", b"infiniband", b"queues"})
CPU = b"cpu"
DEVICES = "/sys/bus/pci/devices"

Decode = Callable[[bytes, bool], Iterator[Event]]


@frozen
class NetlinkSource:
    """One subscribed socket. It is closed when nothing refers to the source any more."""

    channel: socket.socket
    decode: Decode

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self.channel.fileno()

    def receive(self) -> tuple[list[Event], bool]:
        """Take the messages that wait, at most :data:`AT_ONCE` of them."""
        taken: list[tuple[bytes, int | None]] = []
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
            taken.append((message, _namespace_of(ancillary)))
        others = {number for _, number in taken} - {None}
        # Asked after the last message was taken: another program may give the own namespace a number at any time.
        others -= {own_number()} if others else set()
        return [event for message, number in taken for event in self.decode(message, number in others)], lost


def _namespace_of(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The number of the namespace that an event is from, if the kernel gives one.

    It gives none with an event of the own namespace. But before Linux 88b126b39f97 it gives the number that the own namespace
    has of itself, once it has one, and -1 if another socket was given a number with the same event (do_one_broadcast,
    net/netlink/af_netlink.c).
    """
    for level, kind, data in ancillary:
        if (level, kind) == (SOL_NETLINK, NETLINK_LISTEN_ALL_NSID) and len(data) == NSID.size:
            number = NSID.unpack(data)[0]
            return number if number >= 0 else None
    return None


class LinuxEvents:
    """The kernel's events. A subscription lasts as long as the source that :meth:`subscribe` returns."""

    def subscribe(self) -> list[EventSource]:
        """Subscribe to links in all namespaces, and in this one to addresses, routes, uevents and ethtool's notifications."""
        # Addresses and routes have another socket than links, which would receive those of every pod, too.
        kernel = [_links(), _rtnetlink(ROUTING_GROUPS, routing_events), _uevents(), *_ethtool()]
        return [*kernel, *file_events.subscribe((*KUBELET_CPUS, CPU_CLAIMS), CGROUPS)]


def _links() -> NetlinkSource:
    """Events of links, also of those in another network namespace once a netdev was moved there: then it has a number in ours.

    A socket inside a pod's namespace would keep that namespace alive. Without CAP_NET_BROADCAST, only the regular full reading
    notices changes of VFs in other namespaces.
    """
    source = _rtnetlink(RTMGRP_LINK, link_events)
    with suppress(PermissionError):
        source.channel.setsockopt(SOL_NETLINK, NETLINK_LISTEN_ALL_NSID, 1)
    return source


def _source(opened: Any, decode: Decode) -> NetlinkSource:
    source = NetlinkSource(opened.asyncore.socket, decode)
    close_with(source, opened)
    widen(source.channel, BUFFER)
    return source


def _rtnetlink(groups: int, decode: Decode) -> NetlinkSource:
    opened = IPRSocket(groups=0)
    source = _source(opened, decode)
    opened.bind(groups=groups)
    return source


def _uevents() -> NetlinkSource:
    """Uevents of both groups: the kernel's own, and udev's when it has handled the device."""
    opened = UeventSocket()
    source = _source(opened, uevent_events)
    opened.bind(groups=MONITOR_GROUP_KERNEL | MONITOR_GROUP_UDEV)
    return source


def _ethtool() -> list[NetlinkSource]:
    """ethtool's notifications; nothing on a kernel whose ethtool has no netlink (before Linux 5.6)."""
    opened = generic(ETHTOOL_GENL_NAME)
    if opened is None:
        return []
    source = _source(opened, ethtool_events)
    opened.add_membership(ETHTOOL_MONITOR)
    return [source]


def link_events(message: bytes, elsewhere: bool) -> Iterator[Event]:
    """The links of an rtnetlink message.

    :param elsewhere: it is from another namespace. There an index means another netdev; the parent device is the function.
    """
    for kind, offset, length in _messages(message, IFINFOMSG.size):
        if kind in (RTM_NEWLINK, RTM_DELLINK) and elsewhere:
            yield Event(netdev_of=_parent(message, offset, length))
        elif kind in (RTM_NEWLINK, RTM_DELLINK):
            index = IFINFOMSG.unpack_from(message, offset + HEADER.size)[2]
            yield Event(ifindex=index, netdev=_name(message, offset, length))


def _messages(data: bytes, least: int) -> Iterator[tuple[int, int, int]]:
    """The type, place and length of each message whose body may have ``least`` bytes."""
    offset = 0
    while offset + HEADER.size + least <= len(data):
        length, kind, _, _, _ = HEADER.unpack_from(data, offset)
        yield kind, offset, length
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
    """The netdevs whose addresses have changed, and the tables that have lost a route or a rule."""
    for kind, offset, length in _messages(message, routing.IFADDRMSG.size):
        body = message[offset + HEADER.size : offset + length]
        if kind in (RTM_NEWADDR, RTM_DELADDR) and len(body) >= routing.IFADDRMSG.size:
            yield Event(ifindex=routing.IFADDRMSG.unpack_from(body)[4])
        elif kind in (RTM_DELROUTE, RTM_DELRULE) and len(body) >= routing.RTMSG.size:
            yield Event(table=routing.table_of(body))


def _parent(message: bytes, offset: int, length: int) -> str:
    # Searching for the header costs a tenth of decoding all attributes. A false match is the address of no known device.
    found = PARENT.search(message, offset, offset + length)
    return found[1].decode() if found else ""


def ethtool_events(message: bytes, elsewhere: bool) -> Iterator[Event]:
    """The netdev of a notification, which is one message. Other namespaces send none to this socket."""
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
    """The PF of a VF; empty for any other function. The link ``physfn`` is made before the event of a new VF is sent."""
    try:
        return os.readlink(f"{DEVICES}/{function}/physfn").rpartition("/")[2]  # noqa: PTH115
    except OSError:
        return ""


def _value(message: bytes, key: bytes) -> bytes:
    """The value of a key of a uevent; never the first key, which is ACTION."""
    return message.partition(b"\0" + key + b"=")[2].partition(b"\0")[0]
