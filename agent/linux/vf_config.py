"""What a PF is told, and tells, of a VF: IFLA_VF_INFO of include/uapi/linux/if_link.h.

pyroute2 0.9.7 reads it well, but what it writes as IFLA_VF_VLAN_INFO is two bytes short of struct ifla_vf_vlan_info: Linux 6.10
and the stable kernels of its time check that and answer EINVAL (seen on 6.1). So requests are made here, which costs a
tenth, too. GUIDs: from the kernel's source, not run on InfiniBand.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from agent.machine import VfInfo

RTM_SETLINK = 19
NLM_F_REQUEST, NLM_F_ACK = 1, 4
# struct nlmsghdr (length, type, flags, sequence, port) and struct ifinfomsg (family, type, index, flags, change).
NLMSGHDR = struct.Struct("=IHHII")
IFINFOMSG = struct.Struct("=BxHiII")
NLMSG_ERROR = struct.Struct("=i")
VFINFO_LIST = 22
VF_INFO = 1
MAC, VLAN, SPOOFCHK, LINK_STATE, RATE, RSS_QUERY_EN, TRUST, NODE_GUID, PORT_GUID, VLAN_LIST = (
    1,
    2,
    4,
    5,
    6,
    7,
    9,
    10,
    11,
    12,
)
VLAN_INFO = 1
LINK_STATES = ("auto", "enable", "disable")
PROTOCOLS = {"802.1Q": 0x8100, "802.1ad": 0x88A8}
UNTOLD = 0xFFFFFFFF


def configure(ifindex: int, index: int, given: Mapping[str, Any]) -> None:
    """Set what is ``given`` (as in `Netlink.set_vf`; None is not given) of VF ``index`` through its PF.

    :raises OSError: as the kernel answered.
    """
    content = IFINFOMSG.pack(socket.AF_UNSPEC, 0, ifindex, 0, 0) + _attribute(VFINFO_LIST, encode(index, given))
    header = NLMSGHDR.pack(NLMSGHDR.size + len(content), RTM_SETLINK, NLM_F_REQUEST | NLM_F_ACK, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as netlink:
        netlink.sendto(header + content, (0, 0))
        # An NLMSG_ERROR, with 0 for success, is the only answer to this request.
        (error,) = NLMSG_ERROR.unpack_from(netlink.recv(1 << 16), NLMSGHDR.size)
    if error:
        raise OSError(-error, f"set VF {index} {dict(given)}: {os.strerror(-error)}")


def encode(index: int, given: Mapping[str, Any]) -> bytes:
    """The content of an IFLA_VFINFO_LIST that sets what is ``given``."""
    given = {name: value for name, value in given.items() if value is not None}
    inner = b""
    for name, (kind, pack) in SIMPLE.items():
        if name in given:
            inner += _attribute(kind, struct.pack("=I", index) + pack(given[name]))
    if given.keys() & {"vlan", "qos", "vlan_protocol"}:
        inner += _vlan(index, given.get("vlan", 0), given.get("qos", 0), given.get("vlan_protocol", "802.1Q"))
    if given.keys() & {"min_tx_rate", "max_tx_rate"}:
        rates = struct.pack("=III", index, given.get("min_tx_rate", 0), given.get("max_tx_rate", 0))
        inner += _attribute(RATE, rates)
    return _attribute(VF_INFO, inner)


def _vlan(index: int, vlan: int, qos: int, protocol: str) -> bytes:
    told = struct.pack("=III", index, vlan, qos)
    if protocol == "802.1Q":
        return _attribute(VLAN, told)
    return _attribute(VLAN_LIST, _attribute(VLAN_INFO, told + struct.pack(">H2x", PROTOCOLS[protocol])))


def _attribute(kind: int, content: bytes) -> bytes:
    length = 4 + len(content)
    return struct.pack("=HH", length, kind) + content + bytes(-length % 4)


def _number(value: int) -> bytes:
    return struct.pack("=I", value)


def _mac(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", "")).ljust(32, b"\0")


def _guid(value: str) -> bytes:
    # struct ifla_vf_guid aligns its 64 bits, which are in the machine's own order.
    return bytes(4) + struct.pack("=Q", int(value.replace(":", ""), 16))


SIMPLE: dict[str, tuple[int, Callable[[Any], bytes]]] = {
    "mac": (MAC, _mac),
    "trust": (TRUST, _number),
    "spoofchk": (SPOOFCHK, _number),
    "link_state": (LINK_STATE, lambda state: _number(LINK_STATES.index(state))),
    "rss_query": (RSS_QUERY_EN, _number),
    "node_guid": (NODE_GUID, _guid),
    "port_guid": (PORT_GUID, _guid),
}


def decode(entry: Any) -> VfInfo:
    """One IFLA_VF_INFO as pyroute2 has read it."""
    mac, vlan, rate = entry.get_attr("IFLA_VF_MAC"), entry.get_attr("IFLA_VF_VLAN"), entry.get_attr("IFLA_VF_RATE")
    link_state = entry.get_attr("IFLA_VF_LINK_STATE")
    return VfInfo(
        index=mac["vf"],
        mac=mac["mac"],
        vlan=vlan["vlan"],
        trust=_told(entry, "TRUST", "trust"),
        spoofchk=_told(entry, "SPOOFCHK", "spoofchk"),
        qos=vlan["qos"],
        vlan_protocol=_protocol(entry.get_attr("IFLA_VF_VLAN_LIST")),
        link_state=LINK_STATES[link_state["link_state"]] if link_state else "auto",
        min_tx_rate=rate["min_tx_rate"] if rate else 0,
        max_tx_rate=rate["max_tx_rate"] if rate else 0,
        rss_query=_told(entry, "RSS_QUERY_EN", "rss_query_en"),
        node_guid=_told_guid(entry, "node_guid"),
        port_guid=_told_guid(entry, "port_guid"),
    )


def _told(entry: Any, attribute: str, name: str) -> bool | None:
    value = entry.get_attr(f"IFLA_VF_{attribute}")
    # rtnl_fill_vfinfo() presets -1 for what the driver does not fill in.
    return None if value is None or value[name] == UNTOLD else bool(value[name])


def _told_guid(entry: Any, name: str) -> str | None:
    value = entry.get_attr(f"IFLA_VF_IB_{name.upper()}")
    return None if value is None else str(value[f"ib_{name}"])


def _protocol(listed: Any) -> str:
    told = listed.get_attr("IFLA_VF_VLAN_INFO")["proto"] if listed else 0
    return next((name for name, number in PROTOCOLS.items() if number == told), "802.1Q")
