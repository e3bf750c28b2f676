"""rtnetlink: what every pass asks in messages of our own, the rest through pyroute2.

On a node's slow core that costs a tenth, and a pass makes as many requests as there are netdevs (bench/creation.py).
Types and structs: include/uapi/linux/rtnetlink.h, if_link.h, if_addr.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyroute2.iproute.linux import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from agent.linux.messages import ATTRIBUTE, ask, attribute, attributes, dump
from agent.linux.vf_config import decode, encode
from agent.machine import Link

RTM_GETLINK, RTM_SETLINK = 18, 19
RTM_GETADDR = 22
RTM_GETROUTE = 26

# struct ifinfomsg: family, type, index, flags, which of the flags are to be changed.
IFINFOMSG = struct.Struct("=BxHiII")
IFF_UP = 1
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_TXQLEN, IFLA_VFINFO_LIST = 1, 3, 4, 13, 22
IFLA_EXT_MASK, IFLA_CARRIER, IFLA_PROP_LIST, IFLA_ALT_IFNAME, IFLA_PERM_ADDRESS = 29, 33, 52, 53, 54
# How many VFs there are; told before their list.
IFLA_NUM_VF = 21
RTEXT_FILTER_VF = 1
# Not the VFs' counters, as far as the kernel leaves them out: mlx5 asks its firmware for each of them, and with them an
# attribute's 64 kB are full at 220 VFs (seen on 6.1 with netdevsim), as without them at 334.
RTEXT_FILTER_SKIP_STATS = 8

# struct ifaddrmsg: family, prefix length, flags, scope, the netdev's index.
IFADDRMSG = struct.Struct("=BBBBI")
IFA_ADDRESS, IFA_LOCAL = 1, 2

# struct rtmsg, of which what is read here: family, length of the destination's prefix, ..., type, flags.
RTMSG = struct.Struct("=BB5xBI")
RTN_UNICAST = 1
RTA_OIF, RTA_GATEWAY, RTA_MULTIPATH, RTA_VIA = 4, 5, 9, 18
# struct rtnexthop: length, flags, hops, the netdev's index; its attributes follow.
RTNEXTHOP = struct.Struct("=HBBi")

U32 = struct.Struct("=I")


@contextmanager
def _asked(what: str) -> Iterator[None]:
    """Say what was refused: an OSError of the kernel's errno, whoever sent the request."""
    try:
        yield
    except NetlinkError as error:
        raise OSError(error.code, f"{what}: {os.strerror(error.code)}") from error
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}") from error


class LinuxNetlink:
    """rtnetlink in the host's network namespace; belongs to the thread that makes it."""

    def __init__(self) -> None:
        self._ip: Any = IPRoute()

    def links(self) -> list[Link]:
        """Dump every link."""
        with _asked("dump of links"):
            return [
                decode_link(body) for body in dump(socket.NETLINK_ROUTE, RTM_GETLINK, IFINFOMSG.pack(0, 0, 0, 0, 0))
            ]

    def link(self, name: str) -> Link | None:
        """Ask for one link."""
        body = IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + attribute(IFLA_IFNAME, name.encode() + b"\0")
        body += attribute(IFLA_EXT_MASK, U32.pack(RTEXT_FILTER_VF | RTEXT_FILTER_SKIP_STATS))
        try:
            with _asked(f"link {name}"):
                (told,) = ask(socket.NETLINK_ROUTE, RTM_GETLINK, body)
                return decode_link(told)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def set_link(
        self, ifindex: int, *, mtu: int | None = None, up: bool | None = None, txqueuelen: int | None = None
    ) -> None:
        """Set a link's values in one request."""
        flags, change = (IFF_UP if up else 0, IFF_UP if up is not None else 0)
        body = IFINFOMSG.pack(socket.AF_UNSPEC, 0, ifindex, flags, change)
        if mtu is not None:
            body += attribute(IFLA_MTU, U32.pack(mtu))
        if txqueuelen is not None:
            body += attribute(IFLA_TXQLEN, U32.pack(txqueuelen))
        given = {"mtu": mtu, "up": up, "txqueuelen": txqueuelen}
        with _asked(f"set { {name: value for name, value in given.items() if value is not None} }"):
            ask(socket.NETLINK_ROUTE, RTM_SETLINK, body)

    def add_altname(self, ifindex: int, name: str) -> None:
        """Add one property (RTM_NEWLINKPROP)."""
        with _asked(f"add the alternative name {name}"):
            self._ip.link("property_add", index=ifindex, altname=name)

    def remove_altname(self, ifindex: int, name: str) -> None:
        """Take one property away (RTM_DELLINKPROP)."""
        with _asked(f"remove the alternative name {name}"):
            self._ip.link("property_del", index=ifindex, altname=name)

    def rename(self, ifindex: int, name: str) -> None:
        """Set the name; the kernel takes one that is the netdev's own alternative one for taken, so that goes first."""
        with _asked(f"rename to {name}"):
            properties = self._ip.link("get", index=ifindex)[0].get("prop_list")
            taken = bool(properties) and name in properties.get_attrs("IFLA_ALT_IFNAME")
            if taken:
                self._ip.link("property_del", index=ifindex, altname=name)
            try:
                self._ip.link("set", index=ifindex, ifname=name)
            except NetlinkError:
                if taken:
                    self._ip.link("property_add", index=ifindex, altname=name)
                raise

    def set_vf(self, ifindex: int, index: int, **given: Any) -> None:
        """Set a VF's values through its PF."""
        body = IFINFOMSG.pack(socket.AF_UNSPEC, 0, ifindex, 0, 0) + attribute(IFLA_VFINFO_LIST, encode(index, given))
        with _asked(f"set VF {index} {given}"):
            ask(socket.NETLINK_ROUTE, RTM_SETLINK, body)

    def gateway_ifindexes(self) -> frozenset[int]:
        """Dump the routes of both families."""
        found: set[int] = set()
        with _asked("dump of routes"):
            for family in (socket.AF_INET, socket.AF_INET6):
                for body in dump(socket.NETLINK_ROUTE, RTM_GETROUTE, RTMSG.pack(family, 0, 0, 0)):
                    found |= _next_hops(body)
        return frozenset(found)

    def route_ifindex(self, address: str) -> int | None:
        """Ask the kernel for the route."""
        try:
            with _asked(f"route to {address}"):
                return next((route.get("oif") for route in self._ip.route("get", dst=address)), None)
        except OSError as error:
            if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                return None
            raise

    def addresses(self) -> dict[int, tuple[str, ...]]:
        """Dump the addresses of both families (RTM_GETADDR); IFA_LOCAL is our end of a point-to-point link."""
        found: dict[int, list[str]] = {}
        with _asked("dump of addresses"):
            for body in dump(socket.NETLINK_ROUTE, RTM_GETADDR, IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
                family, prefix, _, _, ifindex = IFADDRMSG.unpack_from(body)
                told = dict(attributes(body, IFADDRMSG.size))
                address = told.get(IFA_LOCAL) or told.get(IFA_ADDRESS)
                if address is not None and family in (socket.AF_INET, socket.AF_INET6):
                    found.setdefault(ifindex, []).append(f"{socket.inet_ntop(family, address)}/{prefix}")
        return {ifindex: tuple(addresses) for ifindex, addresses in found.items()}


def _next_hops(body: bytes) -> set[int]:
    """The netdevs of a route that is a default one or leads through a gateway."""
    _, length, kind, _ = RTMSG.unpack_from(body)
    default = length == 0 and kind == RTN_UNICAST
    told = dict(attributes(body, RTMSG.size))
    paths = list(_several(told[RTA_MULTIPATH])) if RTA_MULTIPATH in told else []
    if RTA_OIF in told:
        paths.append((U32.unpack(told[RTA_OIF])[0], told))
    return {ifindex for ifindex, path in paths if default or RTA_GATEWAY in path or RTA_VIA in path}


def _several(content: bytes) -> Iterator[tuple[int, dict[int, bytes]]]:
    offset = 0
    while offset + RTNEXTHOP.size <= len(content):
        length, _, _, ifindex = RTNEXTHOP.unpack_from(content, offset)
        if length < RTNEXTHOP.size:
            return
        yield ifindex, dict(attributes(content[offset : offset + length], RTNEXTHOP.size))
        offset += (length + 3) & ~3


def decode_link(body: bytes) -> Link:
    """A netdev from the body of the kernel's answer (RTM_NEWLINK)."""
    _, _, ifindex, flags, _ = IFINFOMSG.unpack_from(body)
    told = _told(body)
    properties = attributes(told.get(IFLA_PROP_LIST, b""))
    return Link(
        ifindex=ifindex,
        name=_text(told[IFLA_IFNAME]),
        mac=told.get(IFLA_ADDRESS, b"").hex(":"),
        permanent_mac=told.get(IFLA_PERM_ADDRESS, b"").hex(":"),
        mtu=U32.unpack(told[IFLA_MTU])[0],
        up=bool(flags & IFF_UP),
        carrier=told.get(IFLA_CARRIER) == b"\1",
        altnames=tuple(_text(value) for kind, value in properties if kind == IFLA_ALT_IFNAME),
        vfs=tuple(decode(entry) for _, entry in attributes(told.get(IFLA_VFINFO_LIST, b""))),
        txqueuelen=U32.unpack(told.get(IFLA_TXQLEN, bytes(4)))[0],
    )


def _told(body: bytes) -> dict[int, bytes]:
    told = attributes(body, IFINFOMSG.size)
    count = next((U32.unpack(value)[0] for kind, value in told if kind == IFLA_NUM_VF), 0)
    if not count:
        return dict(told)
    # The length of the list of VFs has 16 bits: of more than 64 kB it tells the rest (seen on 6.1, from 335 VFs on), and what
    # follows would be sought in its midst. Its entries have lengths of their own.
    end = IFINFOMSG.size
    found: dict[int, bytes] = {}
    for kind, value in told:
        start = end + ATTRIBUTE.size
        end = start + (len(value) + 3 & ~3)
        if kind == IFLA_VFINFO_LIST:
            end = start
            for _ in range(count):
                end += ATTRIBUTE.unpack_from(body, end)[0] + 3 & ~3
            return {**found, kind: body[start:end], **dict(attributes(body, end))}
        found[kind] = value
    return found


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")
