"""rtnetlink through pyroute2."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyroute2.iproute.linux import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from agent.linux.vf_config import configure, decode
from agent.machine import Link, VfInfo

IFF_UP = 1
RTN_UNICAST = 1
RTEXT_FILTER_VF = 1


@contextmanager
def as_oserror(what: str) -> Iterator[None]:
    """Turn a refusal over netlink into the OSError of its errno."""
    try:
        yield
    except NetlinkError as error:
        raise OSError(error.code, f"{what}: {os.strerror(error.code)}") from error


class LinuxNetlink:
    """rtnetlink through pyroute2; belongs to the thread that makes it."""

    def __init__(self) -> None:
        self._ip: Any = IPRoute()

    def links(self) -> list[Link]:
        """Dump every link."""
        with as_oserror("dump of links"):
            return [_link(message) for message in self._ip.link("dump")]

    def link(self, name: str) -> Link | None:
        """Ask for one link."""
        try:
            with as_oserror(f"link {name}"):
                return _link(self._ip.link("get", ifname=name, ext_mask=RTEXT_FILTER_VF)[0])
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def set_link(
        self, ifindex: int, *, mtu: int | None = None, up: bool | None = None, txqueuelen: int | None = None
    ) -> None:
        """Set a link's values."""
        given: dict[str, Any] = {}
        if mtu is not None:
            given["mtu"] = mtu
        if up is not None:
            given["state"] = "up" if up else "down"
        if txqueuelen is not None:
            given["txqlen"] = txqueuelen
        with as_oserror(f"set {given}"):
            self._ip.link("set", index=ifindex, **given)

    def add_altname(self, ifindex: int, name: str) -> None:
        """Add one property (RTM_NEWLINKPROP)."""
        with as_oserror(f"add the alternative name {name}"):
            self._ip.link("property_add", index=ifindex, altname=name)

    def rename(self, ifindex: int, name: str) -> None:
        """Set the name; the kernel takes one that is the netdev's own alternative one for taken, so that goes first."""
        with as_oserror(f"rename to {name}"):
            taken = name in _link(self._ip.link("get", index=ifindex)[0]).altnames
            if taken:
                self._ip.link("property_del", index=ifindex, altname=name)
            try:
                self._ip.link("set", index=ifindex, ifname=name)
            except NetlinkError:
                if taken:
                    self._ip.link("property_add", index=ifindex, altname=name)
                raise

    def set_vf(self, ifindex: int, index: int, **given: Any) -> None:
        """Set a VF's values through its PF, in a request made by hand: see :mod:`agent.linux.vf_config`."""
        configure(ifindex, index, given)

    def gateway_ifindexes(self) -> frozenset[int]:
        """Dump the routes of both families."""
        found: set[int] = set()
        with as_oserror("dump of routes"):
            for family in (socket.AF_INET, socket.AF_INET6):
                for route in self._ip.route("dump", family=family):
                    found |= _next_hops(route)
        return frozenset(found)

    def route_ifindex(self, address: str) -> int | None:
        """Ask the kernel for the route."""
        try:
            with as_oserror(f"route to {address}"):
                return next((route.get("oif") for route in self._ip.route("get", dst=address)), None)
        except OSError as error:
            if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                return None
            raise

    def addresses(self) -> dict[int, tuple[str, ...]]:
        """Dump the addresses of both families (RTM_GETADDR); IFA_LOCAL is our end of a point-to-point link."""
        found: dict[int, list[str]] = {}
        with as_oserror("dump of addresses"):
            for message in self._ip.addr("dump"):
                address = message.get("local") or message.get("address")
                found.setdefault(message["index"], []).append(f"{address}/{message['prefixlen']}")
        return {ifindex: tuple(addresses) for ifindex, addresses in found.items()}


def _next_hops(route: Any) -> set[int]:
    paths = route.get("multipath") or [{"oif": route.get("oif"), "gateway": route.get("gateway") or route.get("via")}]
    default = route["dst_len"] == 0 and route["type"] == RTN_UNICAST
    return {path["oif"] for path in paths if path.get("oif") and (default or path.get("gateway"))}


def _link(message: Any) -> Link:
    properties = message.get("prop_list") or {}
    altnames = properties.get_attrs("IFLA_ALT_IFNAME") if hasattr(properties, "get_attrs") else ()
    mac = message.get("address") or ""
    return Link(
        ifindex=message["index"],
        name=message.get("ifname"),
        mac=mac,
        permanent_mac=message.get("perm_address") or "",
        mtu=message.get("mtu") or 0,
        up=bool(message["flags"] & IFF_UP),
        carrier=bool(message.get("carrier")),
        altnames=tuple(altnames),
        vfs=tuple(_vfs(message)),
        txqueuelen=message.get("txqlen") or 0,
    )


def _vfs(message: Any) -> Iterator[VfInfo]:
    listed = message.get("vfinfo_list")
    return (decode(entry) for entry in (listed.get_attrs("IFLA_VF_INFO") if listed else ()))
