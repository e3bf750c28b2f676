"""rtnetlink in the host's network namespace.

pyroute2 makes every write and every rare request. What each pass reads (links, routes, addresses) is decoded by the struct
module, with the numbers and layouts of pyroute2's tables (docs/decisions/0022-rtnetlink-reads.md).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from attrs import evolve
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NLMSG_ERROR, rtnl
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP, ifinfmsg
from pyroute2.netlink.rtnl.iprsocket import IPRSocket

from agent.linux import connections, ethtool_ioctl, queues, routing, uppers, vf_config
from agent.linux.messages import (
    ATTRIBUTE,
    IFINFOMSG,
    NLA_TYPE_MASK,
    RTEXT_FILTER_VF,
    ask,
    asked_links,
    attribute,
    attributes,
    decoder,
    dump,
    ignoring,
    numbers,
    text,
    u32,
)
from agent.linux.sockets import close_with
from agent.machine import IFNAMSIZ, Connection, Link, QueueIrq, QueueUser, Route, Rule

_IFLA = numbers(ifinfmsg)
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU = _IFLA["IFLA_ADDRESS"], _IFLA["IFLA_IFNAME"], _IFLA["IFLA_MTU"]
IFLA_TXQLEN, IFLA_CARRIER, IFLA_PERM_ADDRESS = _IFLA["IFLA_TXQLEN"], _IFLA["IFLA_CARRIER"], _IFLA["IFLA_PERM_ADDRESS"]
IFLA_PROP_LIST, IFLA_ALT_IFNAME = _IFLA["IFLA_PROP_LIST"], _IFLA["IFLA_ALT_IFNAME"]
IFLA_LINKINFO, IFLA_INFO_SLAVE_KIND = _IFLA["IFLA_LINKINFO"], numbers(ifinfmsg.ifinfo)["IFLA_INFO_SLAVE_KIND"]
IFLA_XDP, IFLA_XDP_ATTACHED = _IFLA["IFLA_XDP"], numbers(ifinfmsg.xdp)["IFLA_XDP_ATTACHED"]
# XDP_ATTACHED_NONE and _SKB, include/uapi/linux/if_link.h: the driver has no program.
NO_XDP = (b"\0", b"\2")
IFLA_CARRIER_DOWN_COUNT, IFLA_MAX_MTU = _IFLA["IFLA_CARRIER_DOWN_COUNT"], _IFLA["IFLA_MAX_MTU"]
IFLA_VF_INFO = numbers(ifinfmsg.vflist)["IFLA_VF_INFO"]
IFLA_NUM_VF, IFLA_VFINFO_LIST = _IFLA["IFLA_NUM_VF"], _IFLA["IFLA_VFINFO_LIST"]


@contextmanager
def _naming_errors(what: str) -> Iterator[None]:
    """Turn a refused request into an OSError with the kernel's errno that names the request, and the kernel's reason if any."""
    try:
        yield
    except NetlinkError as error:
        # Without a reason of the kernel's, pyroute2 has the errno's text in its place.
        reasons = dict.fromkeys((os.strerror(error.code), error.args[1]))
        raise OSError(error.code, f"{what}: {': '.join(reasons)}") from error
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}") from error


def _said(**given: Any) -> str:
    """The values of a request, as errors name them: ``mtu 9000, up True``."""
    return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)


class LinuxNetlink:
    """rtnetlink in the host's network namespace, for one thread.

    :param each_alone: some driver hangs, so no request may ask the drivers of several netdevs.
    """

    def __init__(self, each_alone: bool = False) -> None:
        self._each_alone = each_alone
        # Not IPRoute: it runs an event loop for each request, so that a request takes 1.2 ms instead of 0.2 ms.
        self._socket: Any = IPRSocket(groups=0, ext_ack=True)
        close_with(self, self._socket)
        self._sequence = 0

    def link(self, name: str) -> Link | None:
        with ignoring(errno.ENODEV):
            with _naming_errors(f"link {name}"):
                link = _with_vfs(name, self._each_alone)
            # Linux 5.6 and later answer with IFLA_PERM_ADDRESS if the netdev has such an address. Older ones never do.
            return (
                link if link.permanent_mac else evolve(link, permanent_mac=ethtool_ioctl.permanent_address(link.name))
            )
        return None

    def set_link(
        self, ifindex: int, *, mtu: int | None = None, up: bool | None = None, txqueuelen: int | None = None
    ) -> None:
        attrs = [(name, value) for name, value in (("IFLA_MTU", mtu), ("IFLA_TXQLEN", txqueuelen)) if value is not None]
        flags = {} if up is None else {"flags": IFF_UP if up else 0, "change": IFF_UP}
        self._change_link(f"set {_said(mtu=mtu, up=up, txqueuelen=txqueuelen)}", ifindex, attrs, **flags)

    def queue_irqs(self, ifindex: int) -> Mapping[int, QueueIrq]:
        with _naming_errors("interrupts of queues"):
            return queues.queue_irqs(ifindex)

    def queue_users(self, ifindex: int) -> tuple[QueueUser, ...]:
        with _naming_errors("users of queues"):
            return queues.queue_users(ifindex, connections.xdp_sockets())

    def napis(self, ifindex: int) -> Mapping[int, Mapping[str, int]]:
        with _naming_errors("NAPI instances"):
            return queues.napis(ifindex)

    def set_napi(self, napi: int, given: Mapping[str, int]) -> None:
        with _naming_errors(f"set {_said(**given)} of NAPI {napi}"):
            queues.set_napi(napi, given)

    def add_altname(self, ifindex: int, name: str) -> None:
        self._change_link(f"add the alternative name {name}", ifindex, [_altname(name)], rtnl.RTM_NEWLINKPROP)

    def remove_altname(self, ifindex: int, name: str) -> None:
        self._change_link(f"remove the alternative name {name}", ifindex, [_altname(name)], rtnl.RTM_DELLINKPROP)

    def rename(self, ifindex: int, name: str) -> None:
        """Set the name. The kernel refuses a name that is an alternative name of this netdev, so that one is removed first.

        udev may add it again in between, if it is late with an earlier name. Then it is removed once more.
        """
        for last in (False, True):
            with _naming_errors(f"rename to {name}"):
                (answer,) = ask(socket.NETLINK_ROUTE, rtnl.RTM_GETLINK, asked_links(ifindex=ifindex))
            taken = name in decode_link(answer).altnames
            if taken:
                self.remove_altname(ifindex, name)
            try:
                self._change_link(f"rename to {name}", ifindex, [("IFLA_IFNAME", name)])
                return
            except OSError as error:
                if taken:
                    with suppress(FileExistsError):
                        self.add_altname(ifindex, name)
                if last or not taken or error.errno != errno.EEXIST:
                    raise

    def set_vf(self, ifindex: int, index: int, **given: Any) -> None:
        self._request(f"set {_said(**given)} of VF {index}", rtnl.RTM_SETLINK, vf_config.request(ifindex, index, given))

    def _change_link(self, what: str, ifindex: int, attrs: Any, kind: int = rtnl.RTM_SETLINK, **fields: int) -> None:
        message: Any = ifinfmsg()
        message.update(index=ifindex, attrs=attrs, **fields)
        self._request(what, kind, message)

    def _request(self, what: str, kind: int, message: Any, flags: int = 0) -> None:
        """Send a pyroute2 message, and wait for its acknowledgement.

        :param what: names the request in the error.
        :raises OSError: the kernel's refusal.
        """
        self._sequence += 1
        with _naming_errors(what):
            self._socket.put(
                message, msg_type=kind, msg_flags=NLM_F_REQUEST | NLM_F_ACK | flags, msg_seq=self._sequence
            )
            while True:
                for answer in self._socket.get():
                    header = answer["header"]
                    if header["sequence_number"] != self._sequence:
                        continue  # the answer to an earlier request, which was interrupted
                    if header["error"] is not None:
                        raise header["error"]
                    if header["type"] == NLMSG_ERROR:
                        return

    def gateway_ifindexes(self, without: Collection[int] = ()) -> frozenset[int]:
        """Dump the routes of both families, and the nexthop objects if a route names one instead of its netdevs."""
        routes = [routing.next_hops(body) for body in self._routes() if routing.table_of(body) not in without]
        objects = self._nexthops() if any(given is not None for _, _, given in routes) else {}
        return frozenset(
            ifindex
            for default, hops, given in routes
            for ifindex, gateway in (hops if given is None else objects.get(given, ()))
            if default or gateway
        )

    def _nexthops(self) -> Mapping[int, routing.Hops]:
        with _naming_errors("dump of nexthop objects"):
            body = routing.NHMSG.pack(socket.AF_UNSPEC, 0, 0)
            return routing.hops_of(dump(socket.NETLINK_ROUTE, routing.RTM_GETNEXTHOP, body))

    def _routes(self) -> Iterator[bytes]:
        with _naming_errors("dump of routes"):
            for family in routing.FAMILIES:
                yield from dump(socket.NETLINK_ROUTE, rtnl.RTM_GETROUTE, routing.RTMSG.pack(family, *bytes(8)))

    def uppers_elsewhere(self) -> dict[int, tuple[str, ...]]:
        with _naming_errors("dump of the netdevs in other network namespaces"):
            return uppers.elsewhere()

    def connections(self) -> tuple[Connection, ...]:
        with _naming_errors("list of TCP connections (by the kernel's module tcp_diag)"):
            return tuple(connections.established())

    def route_ifindex(self, address: str, source: str | None = None) -> int | None:
        # The last two are the answers of a blackhole and of a prohibit route (fib_props, net/ipv4/fib_semantics.c).
        unreachable = ignoring(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES)
        with unreachable, _naming_errors(f"route to {address}"):
            routes = ask(socket.NETLINK_ROUTE, rtnl.RTM_GETROUTE, routing.asked_route(address, source))
            return next(map(routing.decode_oif, routes), None)
        return None

    def addresses(self, duplicate: bool = False) -> dict[int, tuple[str, ...]]:
        by_ifindex: dict[int, list[str]] = {}
        with _naming_errors("dump of addresses"):
            for body in dump(
                socket.NETLINK_ROUTE, rtnl.RTM_GETADDR, routing.IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            ):
                decoded = routing.decode_address(body)
                if decoded is not None and decoded[2] is duplicate:
                    by_ifindex.setdefault(decoded[0], []).append(decoded[1])
        return {ifindex: tuple(addresses) for ifindex, addresses in by_ifindex.items()}

    def add_address(self, ifindex: int, address: str) -> None:
        self._request(
            f"add the address {address}",
            rtnl.RTM_NEWADDR,
            routing.address_message(ifindex, address),
            NLM_F_CREATE | NLM_F_EXCL,
        )

    def remove_address(self, ifindex: int, address: str) -> None:
        self._request(f"remove the address {address}", rtnl.RTM_DELADDR, routing.address_message(ifindex, address))

    def routes(self, tables: Collection[int]) -> tuple[Route, ...]:
        decoded = (routing.decode_route(body) for body in self._routes())
        return tuple(route for route in decoded if route is not None and route.table in tables)

    def add_route(self, route: Route) -> None:
        self._request(
            f"add the route to {route.destination} in table {route.table}",
            rtnl.RTM_NEWROUTE,
            routing.route_message(route),
            NLM_F_CREATE | NLM_F_REPLACE,
        )

    def remove_route(self, route: Route) -> None:
        self._request(
            f"remove the route to {route.destination} from table {route.table}",
            rtnl.RTM_DELROUTE,
            routing.route_message(route),
        )

    def rules(self) -> tuple[Rule, ...]:
        with _naming_errors("dump of rules"):
            bodies = [
                body
                for family in routing.FAMILIES
                for body in dump(socket.NETLINK_ROUTE, rtnl.RTM_GETRULE, routing.FIBMSG.pack(family, *bytes(8)))
            ]
        return tuple(rule for rule in map(routing.decode_rule, bodies) if rule is not None)

    def add_rule(self, rule: Rule) -> None:
        self._request(
            f"add the rule for {rule.source}", rtnl.RTM_NEWRULE, routing.rule_message(rule), NLM_F_CREATE | NLM_F_EXCL
        )

    def remove_rule(self, rule: Rule) -> None:
        self._request(f"remove the rule for {rule.source}", rtnl.RTM_DELRULE, routing.rule_message(rule))


def _with_vfs(name: str, alone: bool) -> Link:
    """A link with its VFs.

    For each link that the kernel describes, it calls that link's driver (rtnl_fill_ifinfo, net/core/rtnetlink.c):
    ndo_get_phys_port_id, ndo_get_phys_port_name, ndo_get_port_parent_id and ndo_get_stats64; ndo_get_vf_config, ndo_get_vf_guid
    and ndo_get_vf_port, if VFs are asked for; and fill_info of a stacked link's kind.

    Linux 5.5 to 6.14 make no room in an answer for the GUIDs of an InfiniBand PF's VFs (rtnl_vfinfo_size,
    net/core/rtnetlink.c), and so refuse it from about 16 VFs on. A dump has up to 32 kB for each link (netlink_dump,
    net/netlink/af_netlink.c), but calls all drivers. If one hangs in it, the device that was asked for is blamed. The next
    worker asks for each link ``alone``, and so finds the one that hangs; until it answers, such a PF reports no VF.
    """
    # For a longer IFLA_IFNAME the kernel answers ERANGE (ifla_policy).
    kind = IFLA_IFNAME if len(os.fsencode(name)) < IFNAMSIZ else IFLA_ALT_IFNAME
    asked, named = asked_links(RTEXT_FILTER_VF), attribute(kind, os.fsencode(name) + b"\0")
    try:
        (answer,) = ask(socket.NETLINK_ROUTE, rtnl.RTM_GETLINK, asked + named)
        return decode_link(answer)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
    if alone:
        (answer,) = ask(socket.NETLINK_ROUTE, rtnl.RTM_GETLINK, asked_links() + named)
        return decode_link(answer)
    for answer in dump(socket.NETLINK_ROUTE, rtnl.RTM_GETLINK, asked):
        link = decode_link(answer)
        if name in (link.name, *link.altnames):
            return link
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


def _altname(name: str) -> tuple[str, Any]:
    return ("IFLA_PROP_LIST", {"attrs": [("IFLA_ALT_IFNAME", name)]})


@decoder
def decode_link(body: bytes) -> Link:
    """A netdev from the body of the kernel's answer (RTM_NEWLINK)."""
    _, _, ifindex, flags, _ = IFINFOMSG.unpack_from(body)
    values = _link_attributes(body)
    properties = attributes(values.get(IFLA_PROP_LIST, b""))
    return Link(
        ifindex=ifindex,
        name=text(values[IFLA_IFNAME]),
        mac=values.get(IFLA_ADDRESS, b"").hex(":"),
        permanent_mac=values.get(IFLA_PERM_ADDRESS, b"").hex(":"),
        mtu=u32(values[IFLA_MTU]),
        max_mtu=u32(values.get(IFLA_MAX_MTU, bytes(4))),
        up=bool(flags & IFF_UP),
        carrier=values.get(IFLA_CARRIER) == b"\1",
        altnames=tuple(text(value) for kind, value in properties if kind == IFLA_ALT_IFNAME),
        vfs=tuple(vf_config.decode(entry) for _, entry in attributes(values.get(IFLA_VFINFO_LIST, b""))),
        txqueuelen=u32(values.get(IFLA_TXQLEN, bytes(4))),
        carrier_downs=u32(values.get(IFLA_CARRIER_DOWN_COUNT, bytes(4))),
        member_of=text(dict(attributes(values.get(IFLA_LINKINFO, b""))).get(IFLA_INFO_SLAVE_KIND, b"")),
        xdp=dict(attributes(values.get(IFLA_XDP, b""))).get(IFLA_XDP_ATTACHED, NO_XDP[0]) not in NO_XDP,
    )


def _link_attributes(body: bytes) -> dict[int, bytes]:
    values = attributes(body, IFINFOMSG.size)
    count = next((u32(value) for kind, value in values if kind == IFLA_NUM_VF), 0)
    if not count:
        return dict(values)
    # The length of the list of VFs has 16 bits, so it is wrong if the list has more than 64 kB (seen on 6.1, from 335 VFs on).
    # The end of the list is found by its entries, which have lengths of their own.
    end = IFINFOMSG.size
    by_kind: dict[int, bytes] = {}
    for kind, value in values:
        start = end + ATTRIBUTE.size
        end = start + (len(value) + 3 & ~3)
        if kind == IFLA_VFINFO_LIST:
            end = _end_of_vfs(body, start, count)
            return {**by_kind, kind: body[start:end], **dict(attributes(body, end))}
        by_kind[kind] = value
    return by_kind


def _end_of_vfs(body: bytes, start: int, most: int) -> int:
    """The end of a list of VFs that begins at ``start``.

    The kernel leaves out a VF of which the PF's driver says nothing, as ice does while it resets the VF (rtnl_fill_vfinfo,
    net/core/rtnetlink.c; ice_get_vf_cfg). What follows the list never looks like an entry: IFLA_ADDRESS, which has the same
    number, comes before the list.
    """
    end = start
    for _ in range(most):
        if end + ATTRIBUTE.size > len(body):
            break
        size, kind = ATTRIBUTE.unpack_from(body, end)
        if kind & NLA_TYPE_MASK != IFLA_VF_INFO:
            break
        if size < ATTRIBUTE.size:
            raise ValueError(f"the entry of a VF has {size} bytes")
        end += size + 3 & ~3
    return end
