"""What wakes the agent: rtnetlink, uevents and ethtool, all only as hints of where to look again."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from attrs import define, evolve, field, frozen
from pyroute2.netlink import genlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic import GenericNetlinkSocket
from pyroute2.netlink.generic.ethtool import ETHTOOL_GENL_NAME

from agent.engine.readiness import Readiness
from agent.hardware.functions import PCI
from agent.receive_buffer import widen
from agent.state.snapshot import Scope, devices

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
ADDRESS = re.compile(rb"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
SUBSYSTEMS = frozenset({b"pci", b"net", b"infiniband", b"queues"})

# include/uapi/linux/netlink.h; what comes from another namespace has that namespace's number in its ancillary data.
NETLINK_LISTEN_ALL_NSID = 8
NSID_ROOM = socket.CMSG_SPACE(4)
# The header of IFLA_PARENT_DEV_NAME (Linux 5.14) with a PCI address in it: 12 characters and a NUL.
PARENT = struct.pack("=HH", 4 + 13, 56)

BUFFER = 16 << 20
"""Bytes of events that may wait, as the kernel counts them: some 14,000 link events; an overrun costs a full reading."""

AT_ONCE = 10_000
"""Messages that are taken in one go: a storm must not keep us from working."""

BURST = 20
RATE = 100.0
"""Passes that events may cause: so many in a row, then so many a second; what happens meanwhile is one."""


@frozen
class Known:
    """Where the last snapshot saw which device: what a scope calls each netdev's function, and the PF of each function.

    ``incomplete``: a NIC of the spec was not found. Another function may turn out to be it, once it has its driver or its name.
    ``required``: the PFs without which the node is not ready.
    """

    by_ifindex: Mapping[int, str]
    by_address: Mapping[str, str]
    incomplete: bool = False
    required: frozenset[str] = frozenset()


@frozen
class WakeUp:
    """Why to look again.

    ``scope``: the PFs concerned, None for everything. ``reload``: the spec may have changed. ``asked``: somebody asks for
    something on the apply socket. ``doubt``: a required device may have changed, so Ready is unproven.
    """

    scope: Scope
    reload: bool = False
    stop: bool = False
    asked: bool = False
    doubt: bool = False

    def joined(self, other: WakeUp) -> WakeUp:
        """Both in one."""
        scope = None if self.scope is None or other.scope is None else self.scope | other.scope
        flags = (self.reload or other.reload, self.stop or other.stop, self.asked or other.asked)
        return WakeUp(scope, *flags, self.doubt or other.doubt)


@define
class Pace:
    """How soon the next pass may come: ``BURST`` at once, then ``RATE`` a second (seconds of a monotonic clock)."""

    _paid_until: float = 0.0

    def pause(self, now: float) -> float:
        """Count a pass; the seconds that it must wait."""
        self._paid_until = max(self._paid_until, now) + 1 / RATE
        return max(0.0, self._paid_until - now - BURST / RATE)


ScopeOf = Callable[[bytes, bool, Known], "set[str] | None"]


@define(eq=False)
class _Source:
    """A socket by which events come, and those that were taken from it and not judged yet; ``lost``: there were more."""

    socket: socket.socket
    scope_of: ScopeOf
    kept: list[tuple[bytes, bool]] = field(factory=list)
    lost: bool = False

    def receive(self) -> None:
        """Take what waits in the socket."""
        for _ in range(AT_ONCE):
            try:
                message, ancillary, _, _ = self.socket.recvmsg(1 << 16, NSID_ROOM)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self.lost = True
                continue
            self.kept.append((message, bool(ancillary)))

    def judged(self, known: Known, start: int = 0) -> WakeUp:
        """What the events from ``start`` on mean. Where some were lost, any device may have changed."""
        named: set[str] = set()
        everything = self.lost
        for message, elsewhere in self.kept[start:]:
            found = self.scope_of(message, elsewhere, known)
            everything = everything or found is None
            named |= found or set()
        doubt = bool(known.required) if self.lost else not known.required.isdisjoint(devices(frozenset(named)))
        return WakeUp(None if everything else frozenset(named), doubt=doubt)

    def taken(self, known: Known, first: bool) -> WakeUp:
        """The same, after which they are forgotten. In a ``first`` pass those of unknown devices are judged again after it."""
        wake = self.judged(known)
        self.kept = [kept for kept in self.kept if self.scope_of(*kept, known) == set()] if first else []
        self.lost = False
        return wake


class Watch:
    """Subscribed from its making on: whatever happens after that is seen, so dump afterwards.

    ``control``: a descriptor on which the supervisor writes ``reload`` lines; its end stops the worker.
    ``readiness``: ends a wait when its probes have more to say.
    ``apply_socket``: a descriptor that becomes readable when somebody asks for something.
    """

    def __init__(
        self, control: int | None, readiness: Readiness | None = None, apply_socket: int | None = None
    ) -> None:
        links = _subscribe(socket.NETLINK_ROUTE, RTMGRP_LINK)
        _listen_to_all_namespaces(links)
        uevents = _subscribe(15, UEVENT_GROUPS)  # NETLINK_KOBJECT_UEVENT
        ethtool = _subscribe(NETLINK_GENERIC, 0)
        if group := _ethtool_group():
            ethtool.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
        self._sources = {
            links.fileno(): _Source(links, _link_scope),
            uevents.fileno(): _Source(uevents, _uevent_scope),
            ethtool.fileno(): _Source(ethtool, _ethtool_scope),
        }
        self._control = control
        self._readiness = readiness
        self._apply_socket = apply_socket
        self._pace = Pace()
        self._poll, self._commands = select.poll(), select.poll()
        probes = readiness.fileno() if readiness else None
        for descriptor in (*self._sources, control, probes, apply_socket):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        if control is not None:
            self._commands.register(control, select.POLLIN | select.POLLHUP)

    def wait(self, known: Known, timeout: float, first: bool = False) -> WakeUp:
        """Sleep until something happens that concerns a wanted device, or ``timeout`` seconds are over (scope: none).

        :param first: a pass runs before which nothing was known. What concerns no device yet is judged again after it.
        """
        reload = stop = asked = False
        if any(source.kept or source.lost for source in self._sources.values()):
            timeout = 0.0
        if self._readiness and timeout > 0.0:
            self._readiness.go_on()
        for descriptor, _ in self._poll.poll(max(0, int(timeout * 1000))):
            if descriptor == self._control:
                text = os.read(descriptor, 4096)
                reload, stop = bool(text), not text
            elif descriptor == self._apply_socket:
                asked = True
            elif self._readiness and descriptor == self._readiness.fileno():
                self._readiness.drain()
            else:
                self._sources[descriptor].receive()
        heard = WakeUp(frozenset())
        for source in self._sources.values():
            heard = heard.joined(source.taken(known, first))
        return evolve(heard, scope=None if reload else heard.scope, reload=reload, stop=stop, asked=asked)

    def sources(self) -> Iterable[int]:
        """The descriptors by which events come."""
        return self._sources

    def keep(self, known: Known) -> WakeUp:
        """Take the events that wait now, and keep them for :meth:`wait`, by when more devices may be known."""
        heard = WakeUp(frozenset())
        for source in self._sources.values():
            judged = len(source.kept)
            source.receive()
            heard = heard.joined(source.judged(known, judged))
            if len(source.kept) > AT_ONCE:
                source.kept.clear()
                source.lost = True
        return heard

    def gather(self, known: Known) -> WakeUp:
        """What happens while the pace of passes makes the next one wait: nothing, but in a storm. A command ends it."""
        wake = WakeUp(frozenset())
        now = time.monotonic()
        until = now + self._pace.pause(now)
        while now < until and not (wake.reload or wake.stop or wake.asked):
            self._commands.poll((until - now) * 1000)
            wake = wake.joined(self.wait(known, 0.0))
            now = time.monotonic()
        return wake


def _subscribe(protocol: int, groups: int) -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    widen(made, BUFFER)
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


def _listen_to_all_namespaces(links: socket.socket) -> None:
    """Hear of netdevs in the namespaces that have a number in ours: a namespace that a netdev is moved to gets one by that.

    A socket inside a pod's namespace would keep it alive. It takes CAP_NET_BROADCAST; without, a resync sees to such VFs.
    """
    try:
        links.setsockopt(SOL_NETLINK, NETLINK_LISTEN_ALL_NSID, 1)
    except PermissionError:
        return


def _link_scope(message: bytes, elsewhere: bool, known: Known) -> set[str]:
    """Netdevs that no wanted function has are no concern; a new one of a wanted function is heard of as a uevent.

    ``elsewhere``: of another namespace, where an index means another netdev; there the parent's address tells whose it is.
    """
    found = set()
    offset = 0
    while offset + NLMSGHDR.size + IFINFOMSG.size <= len(message):
        length, kind, _, _, _ = NLMSGHDR.unpack_from(message, offset)
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            if elsewhere:
                concerned = known.by_address.get(_parent(message, offset, length))
            else:
                concerned = known.by_ifindex.get(IFINFOMSG.unpack_from(message, offset + NLMSGHDR.size)[2])
            if concerned is not None:
                found.add(concerned)
        offset += max(NLMSGHDR.size, (length + 3) & ~3)
    return found


def _ethtool_scope(message: bytes, elsewhere: bool, known: Known) -> set[str]:
    """As with links of this namespace: the socket hears no other; a notification is one message."""
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


def _parent(message: bytes, offset: int, length: int) -> str:
    # Looking for the header costs a tenth of walking through the attributes; what else looks like it is no known address.
    start = message.find(PARENT, offset, offset + length)
    return message[start + 4 : start + 16].decode(errors="replace") if start >= 0 else ""


def _uevent_scope(message: bytes, elsewhere: bool, known: Known) -> set[str] | None:
    """The PF below whose PCI function the event happened; None (everything) for a function not known before."""
    subsystem = _value(message, b"SUBSYSTEM")
    if subsystem == b"cpu":
        return None  # one went off or came back: interrupts, and who may serve them, change everywhere
    if subsystem not in SUBSYSTEMS:
        return set()
    addresses = ADDRESS.findall(_value(message, b"DEVPATH"))
    if not addresses:
        return set()
    last = addresses[-1].decode()
    if last in known.by_address:
        return {known.by_address[last]}
    try:
        # A new VF names its PF; the link is there before the event is sent.
        return {os.readlink(f"{PCI}/{last}/physfn").rpartition("/")[2]}  # noqa: PTH115
    except OSError:
        return None if subsystem == b"pci" or known.incomplete else set()


def _value(message: bytes, key: bytes) -> bytes:
    """The value of a key of a uevent; never the first key, which is ACTION."""
    return message.partition(b"\0" + key + b"=")[2].partition(b"\0")[0]
