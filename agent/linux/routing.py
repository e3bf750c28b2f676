"""The messages of rtnetlink about IP addresses, routes and rules: pyroute2 writes them, and this module decodes them.

It handles only unicast routes with one next hop, and rules that select by nothing but the source address.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from ipaddress import ip_interface, ip_network
from typing import Any

from pyroute2.netlink.rtnl import rt_scope, rt_type
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.rtmsg import nh, rtmsg

from agent.linux.messages import U32, attribute, attributes, decoder, layout, numbers, u32
from agent.machine import Route, Rule

IFADDRMSG, RTMSG, FIBMSG = layout(ifaddrmsg.fields), layout(rtmsg.fields), layout(fibmsg.fields)
# struct rtnexthop begins with its length; its attributes follow.
RTNEXTHOP = layout((("length", "H"), *nh.fields))

_IFA, _RTA = numbers(ifaddrmsg), numbers(rtmsg)
IFA_ADDRESS, IFA_LOCAL = _IFA["IFA_ADDRESS"], _IFA["IFA_LOCAL"]
RTA_DST, RTA_SRC, RTA_OIF = (_RTA[f"RTA_{name}"] for name in ("DST", "SRC", "OIF"))
RTA_GATEWAY, RTA_PREFSRC = (_RTA[f"RTA_{name}"] for name in ("GATEWAY", "PREFSRC"))
RTA_MULTIPATH, RTA_TABLE, RTA_VIA = (_RTA[f"RTA_{name}"] for name in ("MULTIPATH", "TABLE", "VIA"))
RTN_UNICAST = rt_type["unicast"]
# pyroute2's fibmsg numbers its attributes itself, since the kernel's have gaps.
_FRA = {name: number for number, name, _ in fibmsg.nla_map}
FRA_SRC, FRA_PRIORITY = _FRA["FRA_SRC"], _FRA["FRA_PRIORITY"]
# What the kernel reports of every rule; for a rule without suppression, a suppression of -1.
_OF_ANY_RULE = {_FRA[f"FRA_{name}"] for name in ("PRIORITY", "TABLE", "PROTOCOL", "SUPPRESS_PREFIXLEN", "PAD")}

# include/uapi/linux: if_addr.h, rtnetlink.h, fib_rules.h; pyroute2 has no names for them.
IFA_F_NODAD = 2
IFA_F_DADFAILED = 8
RTPROT_STATIC = 4
RT_TABLE_COMPAT = 252
FR_ACT_TO_TBL = 1

# include/uapi/linux/nexthop.h and rtnetlink.h; pyroute2 has no names for them.
RTM_GETNEXTHOP = 106
RTA_NH_ID = 30
NHMSG = struct.Struct("=BBxxI")
NEXTHOP_GRP = struct.Struct("=IBBH")
NHA_ID, NHA_GROUP, NHA_OIF, NHA_GATEWAY = 1, 2, 5, 6

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def family(address: str) -> int:
    """The address family of an IP address or network."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def bits(address: str) -> int:
    """The length of an IP address in bits."""
    return 128 if ":" in address else 32


# --- written ----------------------------------------------------------------------------------------------


def address_message(ifindex: int, address: str) -> Any:
    """An address of a netdev. An IPv6 address is usable at once: the kernel does not check for duplicates (DAD)."""
    interface = ip_interface(address)
    message: Any = ifaddrmsg()
    message["family"], message["prefixlen"], message["index"] = family(address), interface.network.prefixlen, ifindex
    message["attrs"] = [("IFA_LOCAL", str(interface.ip)), ("IFA_ADDRESS", str(interface.ip))]
    if interface.version == 6:
        message["flags"] = IFA_F_NODAD
    return message


def route_message(route: Route) -> Any:
    """A route of a table."""
    destination = ip_network(route.destination)
    message: Any = rtmsg()
    message["family"], message["dst_len"] = family(route.destination), destination.prefixlen
    message["table"], message["proto"], message["type"] = RT_TABLE_COMPAT, RTPROT_STATIC, RTN_UNICAST
    message["scope"] = rt_scope["universe" if route.gateway or destination.version == 6 else "link"]
    attrs: list[tuple[str, Any]] = [("RTA_TABLE", route.table), ("RTA_OIF", route.ifindex)]
    if destination.prefixlen:
        attrs.append(("RTA_DST", str(destination.network_address)))
    attrs += [
        (name, value)
        for name, value in (("RTA_GATEWAY", route.gateway), ("RTA_PREFSRC", route.source))
        if value is not None
    ]
    message["attrs"] = attrs
    return message


def rule_message(rule: Rule) -> Any:
    """A rule."""
    message: Any = fibmsg()
    message["family"], message["src_len"] = family(rule.source), bits(rule.source)
    message["table"], message["action"] = RT_TABLE_COMPAT, FR_ACT_TO_TBL
    message["attrs"] = [("FRA_SRC", rule.source), ("FRA_TABLE", rule.table), ("FRA_PRIORITY", rule.priority)]
    return message


# --- read -------------------------------------------------------------------------------------------------


def asked_route(destination: str, source: str | None) -> bytes:
    """The body of a request for the route to an address, if the packet has this source."""
    of = family(destination)
    sent = b"" if source is None else attribute(RTA_SRC, socket.inet_pton(of, source))
    lengths = bits(destination), 0 if source is None else bits(source)
    return RTMSG.pack(of, *lengths, *bytes(6)) + attribute(RTA_DST, socket.inet_pton(of, destination)) + sent


@decoder
def decode_address(body: bytes) -> tuple[int, str, bool] | None:
    """The ifindex and the address (RTM_NEWADDR) with its prefix length; None for other families.

    The third value: duplicate address detection failed (IFA_F_DADFAILED; addrconf_dad_stop, net/ipv6/addrconf.c). IFA_LOCAL is
    the local end of a point-to-point link.
    """
    family, prefix, flags, _, ifindex = IFADDRMSG.unpack_from(body)
    values = dict(attributes(body, IFADDRMSG.size))
    address = values.get(IFA_LOCAL) or values.get(IFA_ADDRESS)
    if address is None or family not in FAMILIES:
        return None
    return ifindex, f"{socket.inet_ntop(family, address)}/{prefix}", bool(flags & IFA_F_DADFAILED)


@decoder
def decode_route(body: bytes) -> Route | None:
    """A route (RTM_NEWROUTE); None if it is not unicast, or has several next hops."""
    family, length, *_, kind, _ = RTMSG.unpack_from(body)
    values = dict(attributes(body, RTMSG.size))
    if kind != RTN_UNICAST or RTA_OIF not in values:
        return None
    destination = socket.inet_ntop(family, values.get(RTA_DST, bytes(4 if family == socket.AF_INET else 16)))
    gateway, source = (
        socket.inet_ntop(family, values[name]) if name in values else None for name in (RTA_GATEWAY, RTA_PREFSRC)
    )
    return Route(f"{destination}/{length}", table_of(body), u32(values[RTA_OIF]), gateway, source)


@decoder
def decode_oif(body: bytes) -> int | None:
    """The netdev of a route (RTM_NEWROUTE); None if it names none."""
    oif = dict(attributes(body, RTMSG.size)).get(RTA_OIF)
    return None if oif is None else u32(oif)


@decoder
def decode_rule(body: bytes) -> Rule | None:
    """A rule (RTM_NEWRULE); None if it has any selector beside the source address, or does not name a table."""
    family, no_destination, length, service, *_, action, flags = FIBMSG.unpack_from(body)
    values = dict(attributes(body, FIBMSG.size))
    selects_more = no_destination or service or flags or values.keys() - {FRA_SRC, *_OF_ANY_RULE}
    if action != FR_ACT_TO_TBL or selects_more or FRA_SRC not in values or length != 8 * len(values[FRA_SRC]):
        return None
    priority = u32(values.get(FRA_PRIORITY, bytes(4)))
    return Rule(socket.inet_ntop(family, values[FRA_SRC]), table_of(body), priority)


def table_of(body: bytes) -> int:
    """The table of a route or a rule: the attribute, since the header has only 8 bits for it; without one, the header's.

    Both have the same header, and RTA_TABLE and FRA_TABLE are the same number.
    """
    given = (value for kind, value in attributes(body, RTMSG.size) if kind == RTA_TABLE and len(value) == U32.size)
    return next((u32(value) for value in given), body[4])


Hops = frozenset[tuple[int, bool]]
"""Next hops: the netdev of each, and whether it has a gateway."""


@decoder
def next_hops(body: bytes) -> tuple[bool, Hops, int | None]:
    """Whether a route is a default route, its next hops, and the nexthop object (ip-nexthop(8)) that has them instead.

    A route by an object names the netdevs itself only while the sysctl net.ipv4.nexthop_compat_mode is on (fib_dump_info,
    net/ipv4/fib_semantics.c; rt6_fill_node, net/ipv6/route.c).
    """
    _, length, *_, kind, _ = RTMSG.unpack_from(body)
    values = dict(attributes(body, RTMSG.size))
    paths = list(_paths(values[RTA_MULTIPATH])) if RTA_MULTIPATH in values else []
    if RTA_OIF in values:
        paths.append((u32(values[RTA_OIF]), values))
    hops = frozenset((ifindex, RTA_GATEWAY in path or RTA_VIA in path) for ifindex, path in paths)
    given = None if hops or RTA_NH_ID not in values else u32(values[RTA_NH_ID])
    return length == 0 and kind == RTN_UNICAST, hops, given


@decoder
def decode_nexthop(body: bytes) -> tuple[int, Hops, tuple[int, ...]]:
    """A nexthop object (RTM_NEWNEXTHOP): its number, its next hop, and of a group the numbers of its members."""
    values = dict(attributes(body, NHMSG.size))
    members = (member for member, *_ in NEXTHOP_GRP.iter_unpack(values.get(NHA_GROUP, b"")))
    hops = {(u32(values[NHA_OIF]), NHA_GATEWAY in values)} if NHA_OIF in values else set()
    return u32(values[NHA_ID]), frozenset(hops), tuple(members)


def hops_of(bodies: list[bytes]) -> Mapping[int, Hops]:
    """The next hops of each nexthop object, by its number. The members of a group are no groups (net/ipv4/nexthop.c)."""
    decoded = [decode_nexthop(body) for body in bodies]
    own = {number: hops for number, hops, _ in decoded}
    return {
        number: hops.union(*(own.get(member, frozenset()) for member in members)) for number, hops, members in decoded
    }


def _paths(content: bytes) -> Iterator[tuple[int, dict[int, bytes]]]:
    offset = 0
    while offset + RTNEXTHOP.size <= len(content):
        length, _, _, ifindex = RTNEXTHOP.unpack_from(content, offset)
        if length < RTNEXTHOP.size:
            return
        yield ifindex, dict(attributes(content[offset : offset + length], RTNEXTHOP.size))
        offset += (length + 3) & ~3
