"""The attributes of a VF in its PF's netlink messages: IFLA_VF_INFO of include/uapi/linux/if_link.h.

Writes are made by pyroute2's messages. Reads have a decoder of their own, since each pass reads every VF of a PF
(docs/decisions/0022-rtnetlink-reads.md); their numbers are those of pyroute2's tables.
GUIDs follow the kernel's source; they were not run on InfiniBand.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from typing import Any

from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.messages import attributes, numbers
from agent.machine import VfInfo

_VF = numbers(ifinfmsg.vflist.vfinfo)
MAC, VLAN, VLAN_LIST = _VF["IFLA_VF_MAC"], _VF["IFLA_VF_VLAN"], _VF["IFLA_VF_VLAN_LIST"]
SPOOFCHK, TRUST, RSS_QUERY_EN = _VF["IFLA_VF_SPOOFCHK"], _VF["IFLA_VF_TRUST"], _VF["IFLA_VF_RSS_QUERY_EN"]
LINK_STATE, RATE = _VF["IFLA_VF_LINK_STATE"], _VF["IFLA_VF_RATE"]
NODE_GUID, PORT_GUID = _VF["IFLA_VF_IB_NODE_GUID"], _VF["IFLA_VF_IB_PORT_GUID"]

LINK_STATES = ("auto", "enable", "disable")
PROTOCOLS = {"802.1Q": 0x8100, "802.1ad": 0x88A8}
NOT_REPORTED = 0xFFFFFFFF
"""The value that rtnl_fill_vfinfo() sets before it calls the driver, which may leave it."""


_VLAN_INFO: Any = ifinfmsg.vflist.vfinfo.vf_vlist.ivvi


class VfMessage(ifinfmsg):
    """pyroute2's message for links, with IFLA_VF_VLAN_INFO in its full length.

    struct ifla_vf_vlan_info is padded to 16 bytes; pyroute2 0.9.7 writes 14. Kernels since CVE-2024-36017 (6.10, and 6.1 with
    its fix) answer EINVAL to that. vishvananda/netlink had the same fault (its issue 1003); pyroute2 has no report of it.
    """

    class vflist(ifinfmsg.vflist):
        """IFLA_VFINFO_LIST."""

        class vfinfo(ifinfmsg.vflist.vfinfo):
            """IFLA_VF_INFO."""

            class vf_vlist(ifinfmsg.vflist.vfinfo.vf_vlist):
                """IFLA_VF_VLAN_LIST."""

                class ivvi(_VLAN_INFO):  # type: ignore[misc]
                    """IFLA_VF_VLAN_INFO."""

                    fields = (*_VLAN_INFO.fields, ("__pad", "2x"))


# pyroute2 looks up a class's attributes once and keeps them in the class, where a subclass inherits them: after one message of
# type ifinfmsg, these would write its classes' attributes. Looked up here, each keeps its own.
for _class in (VfMessage, VfMessage.vflist, VfMessage.vflist.vfinfo, VfMessage.vflist.vfinfo.vf_vlist):
    _class().compile_nla_table()  # type: ignore[no-untyped-call]


# For each value that has an attribute of its own: the attribute, and pyroute2's name of the value in it.
_SINGLE = {
    "mac": ("IFLA_VF_MAC", "mac"),
    "trust": ("IFLA_VF_TRUST", "trust"),
    "spoofchk": ("IFLA_VF_SPOOFCHK", "spoofchk"),
    "link_state": ("IFLA_VF_LINK_STATE", "link_state"),
    "rss_query": ("IFLA_VF_RSS_QUERY_EN", "rss_query_en"),
    "node_guid": ("IFLA_VF_IB_NODE_GUID", "ib_node_guid"),
    "port_guid": ("IFLA_VF_IB_PORT_GUID", "ib_port_guid"),
}


def request(ifindex: int, index: int, given: Mapping[str, Any]) -> Any:
    """The message that sets the ``given`` values of VF ``index`` of the PF whose netdev has ``ifindex``."""
    given = {name: value for name, value in given.items() if value is not None}
    attrs: list[tuple[str, Any]] = []
    for name, (attribute, called) in _SINGLE.items():
        if name in given:
            value = LINK_STATES.index(given[name]) if name == "link_state" else given[name]
            attrs.append((attribute, {"vf": index, called: value}))
    if given.keys() & {"vlan", "qos", "vlan_protocol"}:
        attrs.append(_vlan(index, given.get("vlan", 0), given.get("qos", 0), given.get("vlan_protocol", "802.1Q")))
    if given.keys() & {"min_tx_rate", "max_tx_rate"}:
        rates = {name: given.get(name, 0) for name in ("min_tx_rate", "max_tx_rate")}
        attrs.append(("IFLA_VF_RATE", {"vf": index, **rates}))
    message: Any = VfMessage()  # type: ignore[no-untyped-call]
    message["index"] = ifindex
    message["attrs"] = [("IFLA_VFINFO_LIST", {"attrs": [("IFLA_VF_INFO", {"attrs": attrs})]})]
    return message


def _vlan(index: int, vlan: int, qos: int, protocol: str) -> tuple[str, Any]:
    value = {"vf": index, "vlan": vlan, "qos": qos}
    if protocol == "802.1Q":
        return ("IFLA_VF_VLAN", value)
    return ("IFLA_VF_VLAN_LIST", {"attrs": [("IFLA_VF_VLAN_INFO", {**value, "proto": PROTOCOLS[protocol]})]})


def decode(entry: bytes) -> VfInfo:
    """Decode one IFLA_VF_INFO. Each of its attributes is a struct that begins with the VF's index."""
    values = dict(attributes(entry))
    index, vlan, qos = _words(values.get(VLAN, bytes(12)), 3)
    rates = _words(values.get(RATE, bytes(12)), 3)
    (state,) = _words(values.get(LINK_STATE, bytes(8))[4:], 1)
    return VfInfo(
        index=index,
        mac=values[MAC][4:10].hex(":"),
        vlan=vlan,
        trust=_flag(values, TRUST),
        spoofchk=_flag(values, SPOOFCHK),
        qos=qos,
        vlan_protocol=_protocol(values.get(VLAN_LIST, b"")),
        link_state=LINK_STATES[state],
        min_tx_rate=rates[1],
        max_tx_rate=rates[2],
        rss_query=_flag(values, RSS_QUERY_EN),
        node_guid=_guid(values, NODE_GUID),
        port_guid=_guid(values, PORT_GUID),
    )


def _words(content: bytes, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"={count}I", content)


def _flag(values: Mapping[int, bytes], kind: int) -> bool | None:
    if kind not in values:
        return None
    _, value = _words(values[kind], 2)
    return None if value == NOT_REPORTED else bool(value)


def _guid(values: Mapping[int, bytes], kind: int) -> str | None:
    # struct ifla_vf_guid aligns its 64 bits, which are in the machine's own byte order.
    return values[kind][8:16][:: 1 if sys.byteorder == "big" else -1].hex(":") if kind in values else None


def _protocol(listed: bytes) -> str:
    number = next((struct.unpack_from(">H", info, 12)[0] for _, info in attributes(listed)), 0)
    return next((name for name, known in PROTOCOLS.items() if known == number), "802.1Q")
