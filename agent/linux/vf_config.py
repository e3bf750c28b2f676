"""What a PF is told, and tells, of a VF: IFLA_VF_INFO of include/uapi/linux/if_link.h.

What pyroute2 0.9.7 writes as IFLA_VF_VLAN_INFO is two bytes short of struct ifla_vf_vlan_info: Linux 6.10 and the stable
kernels of its time check that and answer EINVAL (seen on 6.1). So messages are made and read here, which costs a tenth, too.
GUIDs: from the kernel's source, not run on InfiniBand.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from agent.linux.messages import attribute, attributes
from agent.machine import VfInfo

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


def encode(index: int, given: Mapping[str, Any]) -> bytes:
    """The content of an IFLA_VFINFO_LIST that sets what is ``given``."""
    given = {name: value for name, value in given.items() if value is not None}
    inner = b""
    for name, (kind, pack) in SIMPLE.items():
        if name in given:
            inner += attribute(kind, struct.pack("=I", index) + pack(given[name]))
    if given.keys() & {"vlan", "qos", "vlan_protocol"}:
        inner += _vlan(index, given.get("vlan", 0), given.get("qos", 0), given.get("vlan_protocol", "802.1Q"))
    if given.keys() & {"min_tx_rate", "max_tx_rate"}:
        rates = struct.pack("=III", index, given.get("min_tx_rate", 0), given.get("max_tx_rate", 0))
        inner += attribute(RATE, rates)
    return attribute(VF_INFO, inner)


def _vlan(index: int, vlan: int, qos: int, protocol: str) -> bytes:
    told = struct.pack("=III", index, vlan, qos)
    if protocol == "802.1Q":
        return attribute(VLAN, told)
    return attribute(VLAN_LIST, attribute(VLAN_INFO, told + struct.pack(">H2x", PROTOCOLS[protocol])))


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


def decode(entry: bytes) -> VfInfo:
    """The content of one IFLA_VF_INFO; each of its attributes is a struct that begins with the VF's index."""
    told = dict(attributes(entry))
    index, vlan, qos = _words(told.get(VLAN, bytes(12)), 3)
    rates = _words(told.get(RATE, bytes(12)), 3)
    (state,) = _words(told.get(LINK_STATE, bytes(8))[4:], 1)
    return VfInfo(
        index=index,
        mac=told[MAC][4:10].hex(":"),
        vlan=vlan,
        trust=_told(told, TRUST),
        spoofchk=_told(told, SPOOFCHK),
        qos=qos,
        vlan_protocol=_protocol(told.get(VLAN_LIST, b"")),
        link_state=LINK_STATES[state],
        min_tx_rate=rates[1],
        max_tx_rate=rates[2],
        rss_query=_told(told, RSS_QUERY_EN),
        node_guid=_told_guid(told, NODE_GUID),
        port_guid=_told_guid(told, PORT_GUID),
    )


def _words(content: bytes, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"={count}I", content)


def _told(told: Mapping[int, bytes], kind: int) -> bool | None:
    if kind not in told:
        return None
    _, value = _words(told[kind], 2)
    # rtnl_fill_vfinfo() presets -1 for what the driver does not fill in.
    return None if value == UNTOLD else bool(value)


def _told_guid(told: Mapping[int, bytes], kind: int) -> str | None:
    return told[kind][8:16][:: 1 if sys.byteorder == "big" else -1].hex(":") if kind in told else None


def _protocol(listed: bytes) -> str:
    number = next((struct.unpack_from(">H", info, 12)[0] for _, info in attributes(listed)), 0)
    return next((name for name, known in PROTOCOLS.items() if known == number), "802.1Q")
