"""What wakes the agent: rtnetlink and uevents, both only as hints of where to look again."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct
from collections.abc import Mapping

from attrs import frozen

from agent.nics import PCI
from agent.snapshot import Scope

RTMGRP_LINK = 1
RTM_NEWLINK = 16
RTM_DELLINK = 17
# Group 1: as the kernel says it; group 2: once udev is through with the device.
UEVENT_GROUPS = 1 | 2
NLMSGHDR = struct.Struct("=IHHII")
IFINFOMSG = struct.Struct("=BxHiII")
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
SUBSYSTEMS = frozenset({"pci", "net", "infiniband", "queues"})


@frozen
class Known:
    """Where the last snapshot saw which device: what a scope calls each netdev's function, and the PF of each function."""

    by_ifindex: Mapping[int, str]
    by_address: Mapping[str, str]


@frozen
class WakeUp:
    """Why to look again. ``scope``: the PFs concerned, None for everything; ``reload``: the spec may have changed."""

    scope: Scope
    reload: bool = False
    stop: bool = False


class Watch:
    """Subscribed from its making on: whatever happens after that is seen, so dump afterwards.

    ``control`` is a descriptor on which the supervisor writes ``reload`` lines; its end stops the worker.
    """

    def __init__(self, control: int | None) -> None:
        self._links = _subscribe(socket.NETLINK_ROUTE, RTMGRP_LINK)
        self._uevents = _subscribe(15, UEVENT_GROUPS)  # NETLINK_KOBJECT_UEVENT
        self._control = control
        self._poll = select.poll()
        for descriptor in (self._links.fileno(), self._uevents.fileno(), control):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN | select.POLLHUP)

    def wait(self, known: Known, timeout: float) -> WakeUp:
        """Sleep until something happens that concerns a wanted device, or ``timeout`` seconds are over (scope: none)."""
        events = self._poll.poll(max(0, int(timeout * 1000)))
        scope: set[str] = set()
        everything = reload = stop = False
        for descriptor, _ in events:
            if descriptor == self._control:
                text = os.read(descriptor, 4096)
                reload, stop = bool(text), not text
                continue
            source = self._links if descriptor == self._links.fileno() else self._uevents
            named = _drain(source, _link_scope if source is self._links else _uevent_scope, known)
            everything = everything or named is None
            scope |= named or set()
        return WakeUp(None if everything or reload else frozenset(scope), reload, stop)


def _subscribe(protocol: int, groups: int) -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    made.bind((0, groups))
    return made


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
