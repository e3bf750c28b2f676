"""What a PF is told of a VF, read back by pyroute2 as the kernel's own message would be."""

import struct
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.vf_config import IFINFOMSG, NLMSGHDR, VFINFO_LIST, decode, encode
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


def entry(content: bytes) -> Any:
    body = IFINFOMSG.pack(0, 1, 5, 0, 0) + struct.pack("=HH", 4 + len(content), VFINFO_LIST) + content
    message = ifinfmsg(NLMSGHDR.pack(NLMSGHDR.size + len(body), 16, 0, 1, 0) + body)
    message.decode()
    # pyroute2 reads 32 bytes of a GUID's 8: the kernel, too, puts the VLANs after them.
    (found,) = message.get_attr("IFLA_VFINFO_LIST").get_attrs("IFLA_VF_INFO")
    return found


def test_all_that_is_written_is_read_back() -> None:
    told = decode(entry(encode(3, GIVEN)))
    assert told == VfInfo(index=3, **GIVEN)  # type: ignore[arg-type]


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
    assert getattr(decode(entry(encode(0, {**base, name: 0xFFFFFFFF}))), name) is None
    assert getattr(decode(entry(encode(0, base))), name) is None
