"""What wakes the agent: rtnetlink, uevents and ethtool, all only as hints of where to look again."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct
import sys
from collections.abc import Mapping

from attrs import frozen
from pyroute2.netlink import genlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic import GenericNetlinkSocket
from pyroute2.netlink.generic.ethtool import ETHTOOL_GENL_NAME

from agent.nics import PCI
from agent.readiness import Readiness
from agent.snapshot import Scope

RTMGRP_LINK = 1
RTM_NEWLINK = 16
RTM_DELLINK = 17
# Group 1: as the kernel says it; group 2: once udev is through with the device.
UEVENT_GROUPS = 1 | 2
# include/uapi/linux/ethtool_netlink.h: every notification's first attribute is this nest, and in it the netdev's index.
ETHTOOL_MONITOR = "monitor"
ETHTOOL_A_HEADER = 1
ETHTOOL_A_HEADER_DEV_INDEX = 1
NETLINK_ADD_MEMBERSHIP = 1
SOL_NETLINK = 270
NETLINK_GENERIC = 16
NLMSGHDR = struct.Struct("=IHHII")
IFINFOMSG = struct.Struct("=BxHiII")
GENLMSGHDR_SIZE = 4
NLATTR = struct.Struct("=HH")
NLA_TYPE_MASK = 0x3FFF
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
SUBSYSTEMS = frozenset({"pci", "net", "infiniband", "queues"})


@frozen
class Known:
    """Where the last snapshot saw which device: what a scope calls each netdev's function, and the PF of each function."""

    by_ifindex: Mapping[int, str]
    by_address: Mapping[str, str]


@frozen
class WakeUp:
    """Why to look again. ``scope``: the PFs concerned, None for everything; ``reload``: the spec may have changed;
    ``asked``: somebody has come to the door.
    """

    scope: Scope
    reload: bool = False
    stop: bool = False
    asked: bool = False


class Watch:
    """Subscribed from its making on: whatever happens after that is seen, so dump afterwards.

    ``control`` is a descriptor on which the supervisor writes ``reload`` lines; its end stops the worker.
    ``readiness`` ends a wait when its probes have more to say. ``door`` is a descriptor that becomes readable when somebody
    asks for something.
    """

    def __init__(self, control: int | None, readiness: Readiness | None = None, door: int | None = None) -> None:
        self._links = _subscribe(socket.NETLINK_ROUTE, RTMGRP_LINK)
        self._uevents = _subscribe(15, UEVENT_GROUPS)  # NETLINK_KOBJECT_UEVENT
        self._ethtool = _subscribe(NETLINK_GENERIC, 0)
        if group := _ethtool_group():
            self._ethtool.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
        self._scopes = {
            self._links.fileno(): (self._links, _link_scope),
            self._uevents.fileno(): (self._uevents, _uevent_scope),
            self._ethtool.fileno(): (self._ethtool, _ethtool_scope),
        }
        self._control = control
        self._readiness = readiness
        self._door = door
        self._poll = select.poll()
        probes = readiness.fileno() if readiness else None
        for descriptor in (*self._scopes, control, probes, door):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN | select.POLLHUP)

    def wait(self, known: Known, timeout: float) -> WakeUp:
        """Sleep until something happens that concerns a wanted device, or ``timeout`` seconds are over (scope: none)."""
        events = self._poll.poll(max(0, int(timeout * 1000)))
        scope: set[str] = set()
        everything = reload = stop = asked = False
        for descriptor, _ in events:
            if descriptor == self._control:
                text = os.read(descriptor, 4096)
                reload, stop = bool(text), not text
                continue
            if descriptor == self._door:
                asked = True
                continue
            if self._readiness and descriptor == self._readiness.fileno():
                self._readiness.drain()
                continue
            named = _drain(*self._scopes[descriptor], known)
            everything = everything or named is None
            scope |= named or set()
        return WakeUp(None if everything or reload else frozenset(scope), reload, stop, asked)


def _subscribe(protocol: int, groups: int) -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    made.bind((0, groups))
    return made


def _ethtool_group() -> int | None:
    """The multicast group of ethtool's notifications; None on a kernel without them (before Linux 5.6)."""
    with GenericNetlinkSocket() as resolver:
        # That it is missing is no error here, and pyroute2 would write it to standard error.
        resolver.asyncore.module_err_level = "debug"
        try:
            resolver.bind(ETHTOOL_GENL_NAME, genlmsg)
        except NetlinkError:
            return None
        return int(resolver.mcast_groups[ETHTOOL_MONITOR])


def _drain(source: socket.socket, scope_of: object, known: Known) -> set[str] | None:
    """The PFs named by all that waits in a socket; None if that cannot be told."""
    named: set[str] = set()
    everything = False
    while True:
        try:
            message = source.recv(1 << 16)
        except BlockingIOError:
            return None if everything else named
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            everything = True  # messages were lost: which, nobody knows
            continue
        found = scope_of(message, known)  # type: ignore[operator]
        if found is None:
            everything = True
        else:
            named |= found


def _link_scope(message: bytes, known: Known) -> set[str]:
    """Netdevs that no wanted function has are no concern; a new one of a wanted function is heard of as a uevent."""
    found = set()
    offset = 0
    while offset + NLMSGHDR.size + IFINFOMSG.size <= len(message):
        length, kind, _, _, _ = NLMSGHDR.unpack_from(message, offset)
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            ifindex = IFINFOMSG.unpack_from(message, offset + NLMSGHDR.size)[2]
            if ifindex in known.by_ifindex:
                found.add(known.by_ifindex[ifindex])
        offset += max(NLMSGHDR.size, (length + 3) & ~3)
    return found


def _ethtool_scope(message: bytes, known: Known) -> set[str]:
    """As with links; a notification is one message."""
    header = _attribute(message[NLMSGHDR.size + GENLMSGHDR_SIZE :], ETHTOOL_A_HEADER)
    ifindex = int.from_bytes(_attribute(header, ETHTOOL_A_HEADER_DEV_INDEX), sys.byteorder)
    return {known.by_ifindex[ifindex]} if ifindex in known.by_ifindex else set()


def _attribute(attributes: bytes, wanted: int) -> bytes:
    """The payload of the first attribute of that type; empty if there is none."""
    offset = 0
    while offset + NLATTR.size <= len(attributes):
        length, kind = NLATTR.unpack_from(attributes, offset)
        if kind & NLA_TYPE_MASK == wanted:
            return attributes[offset + NLATTR.size : offset + length]
        offset += max(NLATTR.size, (length + 3) & ~3)
    return b""


def _uevent_scope(message: bytes, known: Known) -> set[str] | None:
    """The PF below whose PCI function the event happened; None (everything) for a function not known before."""
    fields = dict(part.split("=", 1) for part in message.decode(errors="replace").split("\0") if "=" in part)
    if fields.get("SUBSYSTEM") not in SUBSYSTEMS:
        return set()
    addresses = ADDRESS.findall(fields.get("DEVPATH", ""))
    if not addresses:
        return set()
    last = addresses[-1]
    if last in known.by_address:
        return {known.by_address[last]}
    try:
        # A new VF names its PF; the link is there before the event is sent.
        return {os.readlink(f"{PCI}/{last}/physfn").rpartition("/")[2]}  # noqa: PTH115
    except OSError:
        return None if fields["SUBSYSTEM"] == "pci" else set()
