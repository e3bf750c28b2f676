"""Netdevs of other network namespaces on top of one of the own namespace: a pod's macvlan is on top of a PF's netdev.

The own sysfs does not show them: the kernel removes the link ``upper_*`` when the upper netdev moves
(netdev_adjacent_del_links, net/core/dev.c; seen on 6.18). But it lists the netdevs of each namespace that has a number in the
own one (IFLA_IF_NETNSID), and with each the netdev below it and that one's namespace (IFLA_LINK, IFLA_LINK_NETNSID). A
namespace gets a number when a netdev is moved there, or has the other end of its pair (veth) there. One with nothing but a
macvlan that was made in it has none (seen on 6.18), so it is entered, and lists its netdevs itself.

Of a child of an IPoIB netdev the kernel does not say in which namespace its parent is: ipoib_link_ops has no get_link_net
(drivers/infiniband/ulp/ipoib/ipoib_netlink.c; not run). If the parent is not in the child's namespace, it counts as being here.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from struct import Struct

from attrs import frozen
from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_GETNSID
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.nsidmsg import nsidmsg

from agent.linux.messages import IFINFOMSG, ask, attribute, attributes, decoder, dump, layout, numbers
from agent.linux.namespaces import OWN, every_namespace, inside, opened
from agent.machine import ARPHRD_INFINIBAND, Namespace

RTGENMSG = layout(nsidmsg.fields)
_IFLA, _NETNSA = numbers(ifinfmsg), numbers(nsidmsg)
IFLA_IFNAME, IFLA_LINK, IFLA_LINKINFO = _IFLA["IFLA_IFNAME"], _IFLA["IFLA_LINK"], _IFLA["IFLA_LINKINFO"]
IFLA_LINK_NETNSID, IFLA_IF_NETNSID = _IFLA["IFLA_LINK_NETNSID"], _IFLA["IFLA_IF_NETNSID"]
IFLA_INFO_KIND = numbers(ifinfmsg.ifinfo)["IFLA_INFO_KIND"]
NETNSA_NSID, NETNSA_FD = _NETNSA["NETNSA_NSID"], _NETNSA["NETNSA_FD"]

# Of these, IFLA_LINK is the other end of the pair.
PAIRS = frozenset({b"veth", b"netkit", b"vxcan"})

# These are always on top of another netdev.
STACKED = frozenset({b"macvlan", b"macvtap", b"ipvlan", b"ipvtap", b"vlan", b"macsec"})

IPOIB = b"ipoib"

S32, U32 = Struct("=i"), Struct("=I")


@frozen
class Upper:
    """A netdev on top of another: the name, and the ifindex and namespace (as a number of the own one) of that one.

    ``namespace`` is None for a child of an IPoIB netdev.
    """

    name: str
    below: int
    namespace: int | None


def elsewhere() -> dict[int, tuple[str, ...]]:
    """The names of netdevs in other namespaces, by the ifindex of the netdev of this namespace that they are on top of."""
    names: dict[int, list[str]] = {}
    for upper in (*_in_numbered(), *_in_others()):
        names.setdefault(upper.below, []).append(upper.name)
    return {below: tuple(sorted(each)) for below, each in sorted(names.items())}


def _in_numbered() -> list[Upper]:
    """Those in the namespaces that have a number in the own one."""
    uppers = [upper for number in _numbered() for upper in _in(number)]
    if not uppers:
        return []
    # The kernel gives the own namespace a number while it lists these netdevs.
    own = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        number = _number(own)
    finally:
        os.close(own)
    return [upper for upper in uppers if upper.namespace in (number, None)]


def _in_others() -> Iterator[Upper]:
    """Those in the namespaces that have none."""
    looked = {os.stat(OWN).st_ino}  # noqa: PTH116
    for namespace in every_namespace():
        if namespace.inode in looked:
            continue
        try:
            with opened(namespace) as there:
                number = _number(there)
            uppers = _inside(namespace) if number < 0 else []
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it is gone, or belongs to another user namespace
        looked.add(namespace.inode)
        yield from uppers


def _inside(namespace: Namespace) -> list[Upper]:
    with inside(namespace) as own:
        uppers = _decoded(dump(socket.NETLINK_ROUTE, RTM_GETLINK, IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)))
        # Here, too, the kernel has given the number while it listed the netdevs.
        number = _number(own) if uppers else -1
    return [upper for upper in uppers if upper.namespace in (number, None)]


def _numbered() -> list[int]:
    """The numbers of the namespaces that have one in the own namespace."""
    return [nsid for body in dump(socket.NETLINK_ROUTE, RTM_GETNSID, RTGENMSG.pack(0)) for nsid in decode_number(body)]


def _number(descriptor: int) -> int:
    """The number that the thread's namespace has for another one, or for itself; -1 if there is none."""
    body = RTGENMSG.pack(0) + attribute(NETNSA_FD, U32.pack(descriptor))
    return next((nsid for each in ask(socket.NETLINK_ROUTE, RTM_GETNSID, body) for nsid in decode_number(each)), -1)


def _in(number: int) -> list[Upper]:
    body = IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + attribute(IFLA_IF_NETNSID, S32.pack(number))
    try:
        return _decoded(dump(socket.NETLINK_ROUTE, RTM_GETLINK, body))
    except OSError as error:
        # EINVAL: it is gone (rtnl_get_net_ns_capable, net/core/rtnetlink.c).
        if error.errno == errno.EINVAL:
            return []
        raise


def _decoded(links: Sequence[bytes]) -> list[Upper]:
    """The netdevs of a namespace that are on top of one of another."""
    uppers = [upper for link in links for upper in decode_upper(link)]
    heads = [IFINFOMSG.unpack_from(link) for link in links] if any(upper.namespace is None for upper in uppers) else []
    parents = {index for _, type, index, _, _ in heads if type == ARPHRD_INFINIBAND}
    return [upper for upper in uppers if upper.namespace is not None or upper.below not in parents]


@decoder
def decode_number(body: bytes) -> tuple[int, ...]:
    """The number in an answer about a namespace (RTM_NEWNSID); empty without one."""
    return tuple(S32.unpack(value)[0] for kind, value in attributes(body, RTGENMSG.size) if kind == NETNSA_NSID)


@decoder
def decode_upper(body: bytes) -> tuple[Upper, ...]:
    """The netdev of an answer (RTM_NEWLINK), if it is on top of one of another namespace; else empty."""
    values = dict(attributes(body, IFINFOMSG.size))
    kind = dict(attributes(values.get(IFLA_LINKINFO, b""))).get(IFLA_INFO_KIND, b"").rstrip(b"\0")
    name = os.fsdecode(values[IFLA_IFNAME].rstrip(b"\0"))
    if kind == IPOIB and IFLA_LINK in values and IFLA_LINK_NETNSID not in values:
        return (Upper(name, U32.unpack(values[IFLA_LINK])[0], None),)
    if kind in PAIRS or IFLA_LINK_NETNSID not in values:
        return ()
    index = IFINFOMSG.unpack_from(body)[2]
    below = U32.unpack(values[IFLA_LINK])[0] if IFLA_LINK in values else index
    # A tunnel on top of nothing (vxlan) has its own index there. A macvlan may have the same index as the netdev below it, and
    # before Linux 5.10 the kernel leaves that out (nla_put_iflink, net/core/rtnetlink.c).
    if below == index and kind not in STACKED:
        return ()
    return (Upper(name, below, S32.unpack(values[IFLA_LINK_NETNSID])[0]),)
