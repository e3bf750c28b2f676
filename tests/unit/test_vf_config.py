"""What a PF is told of a VF, read back by pyroute2 as the kernel's own message would be."""

import struct
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.messages import HEADER, attribute, attributes
from agent.linux.netlink import IFINFOMSG, IFLA_VFINFO_LIST
from agent.linux.vf_config import decode, encode
from agent.machine import VfInfo

GIVEN = {
    "mac": "02:00:00:00:00:01",
    "vlan": 100,
    "qos": 3,
    "trust": True,
    "spoofchk": False,
    "link_state": "disable",
    "min_tx_rate": 10,
    "max_tx_rate": 200,
    "rss_query": True,
    "node_guid": "00:11:22:33:44:55:66:77",
    "port_guid": "00:11:22:33:44:55:66:78",
}


def inner(content: bytes) -> bytes:
    """The content of the one IFLA_VF_INFO in a list."""
    ((_, found),) = attributes(content)
    return found


def entry(content: bytes) -> Any:
    """The same, as pyroute2 reads it."""
    body = IFINFOMSG.pack(0, 5, 0, 0, 0) + attribute(IFLA_VFINFO_LIST, content)
    message = ifinfmsg(HEADER.pack(HEADER.size + len(body), 16, 0, 1, 0) + body)
    message.decode()
    # pyroute2 reads 32 bytes of a GUID's 8: the kernel, too, puts the VLANs after them.
    (found,) = message.get_attr("IFLA_VFINFO_LIST").get_attrs("IFLA_VF_INFO")
    return found


def test_all_that_is_written_is_read_back() -> None:
    assert decode(inner(encode(3, GIVEN))) == VfInfo(index=3, **GIVEN)  # type: ignore[arg-type]


def test_pyroute2_reads_the_same() -> None:
    told = entry(encode(3, GIVEN))
    vlan, rate = told.get_attr("IFLA_VF_VLAN"), told.get_attr("IFLA_VF_RATE")
    assert (told.get_attr("IFLA_VF_MAC")["vf"], told.get_attr("IFLA_VF_MAC")["mac"]) == (3, GIVEN["mac"])
    assert (vlan["vlan"], vlan["qos"], rate["min_tx_rate"], rate["max_tx_rate"]) == (100, 3, 10, 200)
    assert (told.get_attr("IFLA_VF_TRUST")["trust"], told.get_attr("IFLA_VF_SPOOFCHK")["spoofchk"]) == (1, 0)
    assert told.get_attr("IFLA_VF_LINK_STATE")["link_state"] == 2
    assert told.get_attr("IFLA_VF_IB_NODE_GUID")["ib_node_guid"] == GIVEN["node_guid"]
    assert told.get_attr("IFLA_VF_IB_PORT_GUID")["ib_port_guid"] == GIVEN["port_guid"]


def test_another_protocol_needs_the_longer_attribute_whole() -> None:
    written = entry(encode(3, {"vlan": 100, "qos": 3, "vlan_protocol": "802.1ad"}))
    assert written.get_attr("IFLA_VF_VLAN") is None
    (vlan,) = written.get_attr("IFLA_VF_VLAN_LIST").get_attrs("IFLA_VF_VLAN_INFO")
    assert (vlan["vf"], vlan["vlan"], vlan["qos"], vlan["proto"]) == (3, 100, 3, 0x88A8)
    # struct ifla_vf_vlan_info is 16 bytes long, its attribute the third: within two others.
    assert struct.unpack_from("=H", encode(3, {"vlan": 100, "vlan_protocol": "802.1ad"}), 8) == (4 + 16,)


def test_what_is_not_given_is_not_written() -> None:
    assert encode(0, {"trust": None, "vlan": None}) == encode(0, {})
    written = entry(encode(0, {"trust": False}))
    assert [written.get_attr(f"IFLA_VF_{name}") for name in ("MAC", "VLAN", "RATE", "SPOOFCHK")] == [None] * 4


@pytest.mark.parametrize("name", ["trust", "spoofchk", "rss_query"])
def test_what_a_driver_does_not_tell_is_unknown(name: str) -> None:
    base = {"mac": "02:00:00:00:00:01", "vlan": 0}
    assert getattr(decode(inner(encode(0, {**base, name: 0xFFFFFFFF}))), name) is None
    assert getattr(decode(inner(encode(0, base))), name) is None
