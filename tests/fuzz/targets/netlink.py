"""Messages of rtnetlink, ethtool's notifications and Data Center Bridging."""

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from pyroute2.netlink.rtnl import RTM_DELROUTE, RTM_NEWADDR, RTM_NEWLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux import connections, namespaces, queues, rdma, routing, uppers
from agent.linux.dcb import (
    APP,
    ATTR_IEEE,
    ATTR_IEEE_APP,
    ATTR_IEEE_APP_TABLE,
    ATTR_IEEE_PFC,
    DCBMSG,
    decode,
    refusal_in,
)
from agent.linux.events import GENLMSG, ethtool_events, link_events, routing_events
from agent.linux.messages import HEADER, IFINFOMSG, U32, answers, attribute, numbers
from agent.linux.netlink import (
    IFLA_ALT_IFNAME,
    IFLA_IFNAME,
    IFLA_MTU,
    IFLA_NUM_VF,
    IFLA_PROP_LIST,
    IFLA_VFINFO_LIST,
    decode_link,
)
from tests.fuzz.targets import choose, chosen

VF = numbers(ifinfmsg.vflist.vfinfo)


def _event(read: Callable[[bytes, bool], object], elsewhere: bool = False) -> Callable[[bytes], object]:
    # An event has no parser's errors: it comes from the kernel, and what is no event is none.
    return lambda data: list(read(data, elsewhere))  # type: ignore[call-overload]


def _answer(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def checked(data: bytes) -> None:
        with suppress(OSError):
            read(data)

    return checked


PARSERS: Sequence[Callable[[bytes], object]] = (
    *(_event(link_events), _event(link_events, True), _event(routing_events), _event(ethtool_events)),
    *(
        _answer(decode_link),
        _answer(routing.decode_address),
        _answer(routing.decode_route),
        _answer(routing.decode_rule),
    ),
    *(_answer(routing.next_hops), _answer(decode), _answer(refusal_in), _answer(answers)),
    *(_answer(routing.decode_nexthop), _answer(uppers.decode_upper), _answer(namespaces.decode_number)),
    *(_answer(connections.decode_connection), _answer(rdma.decode_resources)),
    *(_answer(connections.decode_xdp_socket), _answer(queues.decode_napi)),
)


def check(data: bytes) -> None:
    """Read one message."""
    choose(data, PARSERS)


def seeds() -> Sequence[bytes]:
    """A message for each parser."""
    two = struct.pack("=II", 0, 1)
    vf = b"".join(
        (
            attribute(VF["IFLA_VF_MAC"], U32.pack(0) + bytes(32)),
            attribute(VF["IFLA_VF_VLAN"], struct.pack("=III", 0, 5, 1)),
            *(attribute(kind, two) for kind in (VF["IFLA_VF_TRUST"], VF["IFLA_VF_SPOOFCHK"], VF["IFLA_VF_LINK_STATE"])),
            attribute(VF["IFLA_VF_RATE"], struct.pack("=III", 0, 10, 100)),
            attribute(VF["IFLA_VF_VLAN_LIST"], attribute(1, struct.pack("=III", 0, 5, 1) + b"\x88\xa8\0\0")),
            attribute(VF["IFLA_VF_IB_NODE_GUID"], bytes(8) + b"12345678"),
        )
    )
    link = IFINFOMSG.pack(0, 1, 7, 1, 0) + b"".join(
        (
            attribute(IFLA_IFNAME, b"ens1\0"),
            attribute(IFLA_MTU, U32.pack(1500)),
            attribute(IFLA_PROP_LIST, attribute(IFLA_ALT_IFNAME, b"rail0\0")),
            attribute(IFLA_NUM_VF, U32.pack(2)),
            attribute(IFLA_VFINFO_LIST, attribute(1, vf) * 2),
        )
    )
    address = routing.IFADDRMSG.pack(socket.AF_INET, 24, 0, 0, 7) + attribute(routing.IFA_LOCAL, b"\x0a\1\0\1")
    hop = routing.RTNEXTHOP.pack(16, 0, 0, 7) + attribute(routing.RTA_GATEWAY, b"\x0a\1\0\2")
    route = routing.RTMSG.pack(socket.AF_INET, 16, 0, 0, 252, 4, 0, routing.RTN_UNICAST, 0)
    route += attribute(routing.RTA_DST, b"\x0a\2\0\0") + attribute(routing.RTA_OIF, U32.pack(7))
    route += attribute(routing.RTA_TABLE, U32.pack(1000)) + attribute(routing.RTA_MULTIPATH, hop * 2)
    rule = routing.FIBMSG.pack(socket.AF_INET, 0, 32, 0, 252, 0, 0, 1, 0)
    rule += attribute(routing.FRA_SRC, b"\x0a\1\0\1") + attribute(routing.FRA_PRIORITY, U32.pack(1000))
    nexthop = routing.NHMSG.pack(socket.AF_INET, 0, 0) + attribute(routing.NHA_ID, U32.pack(7))
    nexthop += attribute(routing.NHA_OIF, U32.pack(3)) + attribute(
        routing.NHA_GROUP, routing.NEXTHOP_GRP.pack(8, 0, 0, 0)
    )
    dcb = attribute(ATTR_IEEE_PFC, bytes(136)) + attribute(
        ATTR_IEEE_APP_TABLE, attribute(ATTR_IEEE_APP, APP.pack(5, 3, 26))
    )
    ieee = DCBMSG.pack(0, 21, 0) + attribute(ATTR_IEEE, dcb)
    owned = attribute(rdma.ATTR_RES_LQPN, U32.pack(13)) + attribute(rdma.ATTR_RES_TYPE, b"\2")
    owned += attribute(rdma.ATTR_RES_KERN_NAME, b"nvme_rdma\0")
    owned += attribute(rdma.ATTR_RES_DST_ADDR, struct.pack("=H", socket.AF_INET) + bytes(126))
    bodies = {
        **{number: _message(RTM_NEWLINK, link) for number in (0, 1)},
        2: _message(RTM_NEWADDR, address) + _message(RTM_DELROUTE, route),
        3: HEADER.pack(0, 20, 0, 0, 0) + GENLMSG.pack(1, 1, 0) + attribute(1, attribute(1, U32.pack(7))),
        **{4: link, 5: address, 6: route, 7: rule, 8: route, 9: dcb, 10: ieee},
        11: _message(RTM_NEWLINK, link) * 2 + _message(3, bytes(4)),
        12: nexthop,
        13: IFINFOMSG.pack(0, 1, 7, 1, 0)
        + attribute(IFLA_IFNAME, b"net1\0")
        + attribute(uppers.IFLA_LINK, U32.pack(3))
        + attribute(uppers.IFLA_LINK_NETNSID, U32.pack(2))
        + attribute(uppers.IFLA_LINKINFO, attribute(uppers.IFLA_INFO_KIND, b"macvlan\0")),
        14: namespaces.RTGENMSG.pack(0) + attribute(namespaces.NETNSA_NSID, U32.pack(2)),
        15: connections.ANSWER.pack(socket.AF_INET6, 1, 22, 6443, bytes(16), bytes(16), bytes(4), bytes(4)),
        17: connections.XDP_ANSWER.pack(44, 3, 4711) + attribute(1, struct.pack("=II", 3, 1)),
        18: queues.GENL.pack(11, 1, 0) + attribute(2, U32.pack(257)) + attribute(6, U32.pack(20000)),
        16: attribute(rdma.ATTR_RES_CM_ID, attribute(rdma.ATTR_RES_CM_ID + 1, owned) * 2),
    }
    return [chosen(number, body) for number, body in bodies.items()]


def _message(kind: int, body: bytes) -> bytes:
    padded = body + bytes(-len(body) % 4)
    return HEADER.pack(HEADER.size + len(padded), kind, 0, 0, 0) + padded
