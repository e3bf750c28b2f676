"""Netdevs of other network namespaces on top of one of the own namespace: a pod's macvlan is on top of a PF's netdev.

The own sysfs does not show them: the kernel removes the link ``upper_*`` when the upper netdev moves
(netdev_adjacent_del_links, net/core/dev.c; seen on 6.18). So each other namespace is entered, and lists its netdevs, and with
each the netdev below it and that one's namespace (IFLA_LINK, IFLA_LINK_NETNSID).

The kernel would also list them here (IFLA_TARGET_NETNSID). But then it gives the own namespace a number of itself, with which
kernels before 88b126b39f97 mark each own event: Open vSwitch and `ip monitor` take these for events of another namespace.

Of a child of an IPoIB netdev the kernel does not say in which namespace its parent is: ipoib_link_ops has no get_link_net
(drivers/infiniband/ulp/ipoib/ipoib_netlink.c; not run). If the parent is not in the child's namespace, it counts as being here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

from attrs import frozen
from pyroute2.netlink.rtnl import RTM_GETLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.messages import IFINFOMSG, S32, asked_links, attributes, decoder, dump, numbers, text, u32
from agent.linux.namespaces import OWN, every_namespace, inside, number
from agent.machine import ARPHRD_INFINIBAND, Namespace

_IFLA = numbers(ifinfmsg)
IFLA_IFNAME, IFLA_LINK, IFLA_LINKINFO = _IFLA["IFLA_IFNAME"], _IFLA["IFLA_LINK"], _IFLA["IFLA_LINKINFO"]
IFLA_LINK_NETNSID = _IFLA["IFLA_LINK_NETNSID"]
IFLA_INFO_KIND = numbers(ifinfmsg.ifinfo)["IFLA_INFO_KIND"]

# Of these, IFLA_LINK is the other end of the pair.
PAIRS = frozenset({b"veth", b"netkit", b"vxcan"})

# These are always on top of another netdev.
STACKED = frozenset({b"macvlan", b"macvtap", b"ipvlan", b"ipvtap", b"vlan", b"macsec"})

IPOIB = b"ipoib"


@frozen
class Upper:
    """A netdev on top of another: the name, and the ifindex and namespace (as a number of the upper's) of that one.

    ``namespace`` is None for a child of an IPoIB netdev.
    """

    name: str
    below: int
    namespace: int | None


def elsewhere() -> dict[int, tuple[str, ...]]:
    """The names of netdevs in other namespaces, by the ifindex of the netdev of this namespace that they are on top of."""
    names: dict[int, list[str]] = {}
    for upper in _in_others():
        names.setdefault(upper.below, []).append(upper.name)
    return {below: tuple(sorted(each)) for below, each in sorted(names.items())}


def _in_others() -> Iterator[Upper]:
    looked = {os.stat(OWN).st_ino}  # noqa: PTH116
    for namespace in every_namespace():
        if namespace.inode in looked:
            continue
        try:
            uppers = _inside(namespace)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it is gone, or belongs to another user namespace
        looked.add(namespace.inode)
        yield from uppers


def _inside(namespace: Namespace) -> list[Upper]:
    with inside(namespace) as own:
        uppers = _decoded(dump(socket.NETLINK_ROUTE, RTM_GETLINK, asked_links()))
        # The kernel has given the own namespace a number there while it listed the netdevs.
        here = number(own) if uppers else None
    return [upper for upper in uppers if upper.namespace in (here, None)]


def _decoded(links: Sequence[bytes]) -> list[Upper]:
    """The netdevs of a namespace that are on top of one of another."""
    uppers = [upper for link in links for upper in decode_upper(link)]
    heads = [IFINFOMSG.unpack_from(link) for link in links] if any(upper.namespace is None for upper in uppers) else []
    parents = {index for _, type, index, _, _ in heads if type == ARPHRD_INFINIBAND}
    return [upper for upper in uppers if upper.namespace is not None or upper.below not in parents]


@decoder
def decode_upper(body: bytes) -> tuple[Upper, ...]:
    """The netdev of an answer (RTM_NEWLINK), if it is on top of one of another namespace; else empty."""
    values = dict(attributes(body, IFINFOMSG.size))
    kind = dict(attributes(values.get(IFLA_LINKINFO, b""))).get(IFLA_INFO_KIND, b"").rstrip(b"\0")
    name = text(values[IFLA_IFNAME])
    if kind == IPOIB and IFLA_LINK in values and IFLA_LINK_NETNSID not in values:
        return (Upper(name, u32(values[IFLA_LINK]), None),)
    if kind in PAIRS or IFLA_LINK_NETNSID not in values:
        return ()
    index = IFINFOMSG.unpack_from(body)[2]
    below = u32(values[IFLA_LINK]) if IFLA_LINK in values else index
    # A tunnel on top of nothing (vxlan) has its own index there. A macvlan may have the same index as the netdev below it, and
    # before Linux 5.10 the kernel leaves that out (nla_put_iflink, net/core/rtnetlink.c).
    if below == index and kind not in STACKED:
        return ()
    return (Upper(name, below, S32.unpack(values[IFLA_LINK_NETNSID])[0]),)
