"""The VF attributes that the agent sends for a VF, decoded by pyroute2 like a message of the kernel."""

import struct
import subprocess
import sys
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.messages import HEADER, IFINFOMSG, attributes
from agent.linux.vf_config import decode, request
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


def encoded(index: int, given: dict[str, Any]) -> bytes:
    """The message as it is sent."""
    message = request(5, index, given)
    message.encode()
    return bytes(message.data)


def inner(data: bytes) -> bytes:
    """The content of the one IFLA_VF_INFO in a message."""
    ((_, listed),) = attributes(data, HEADER.size + IFINFOMSG.size)
    ((_, value),) = attributes(listed)
    return value


def entry(data: bytes) -> Any:
    """The same, as pyroute2 reads it."""
    message: Any = ifinfmsg(data)
    message.decode()
    (info,) = message.get_attr("IFLA_VFINFO_LIST").get_attrs("IFLA_VF_INFO")
    return info


def test_every_vf_attribute_that_is_encoded_is_decoded_again() -> None:
    assert decode(inner(encoded(3, GIVEN))) == VfInfo(index=3, **GIVEN)


def test_pyroute2_reads_the_same() -> None:
    info = entry(encoded(3, GIVEN))
    vlan, rate = info.get_attr("IFLA_VF_VLAN"), info.get_attr("IFLA_VF_RATE")
    assert (info.get_attr("IFLA_VF_MAC")["vf"], info.get_attr("IFLA_VF_MAC")["mac"]) == (3, GIVEN["mac"])
    assert (vlan["vlan"], vlan["qos"], rate["min_tx_rate"], rate["max_tx_rate"]) == (100, 3, 10, 200)
    assert (info.get_attr("IFLA_VF_TRUST")["trust"], info.get_attr("IFLA_VF_SPOOFCHK")["spoofchk"]) == (1, 0)
    assert info.get_attr("IFLA_VF_LINK_STATE")["link_state"] == 2
    assert info.get_attr("IFLA_VF_IB_NODE_GUID")["ib_node_guid"] == GIVEN["node_guid"]
    assert info.get_attr("IFLA_VF_IB_PORT_GUID")["ib_port_guid"] == GIVEN["port_guid"]


def test_another_vlan_protocol_needs_the_whole_longer_attribute() -> None:
    written = entry(encoded(3, {"vlan": 100, "qos": 3, "vlan_protocol": "802.1ad"}))
    assert written.get_attr("IFLA_VF_VLAN") is None
    (vlan,) = written.get_attr("IFLA_VF_VLAN_LIST").get_attrs("IFLA_VF_VLAN_INFO")
    assert (vlan["vf"], vlan["vlan"], vlan["qos"], vlan["proto"]) == (3, 100, 3, 0x88A8)
    # struct ifla_vf_vlan_info is 16 bytes long, its attribute the third: within two others.
    assert struct.unpack_from("=H", inner(encoded(3, {"vlan": 100, "vlan_protocol": "802.1ad"})), 4) == (4 + 16,)


def test_a_message_of_a_link_before_it_changes_nothing() -> None:
    """In a process of its own: pyroute2 keeps what it looked up for as long as the process lasts."""
    program = """
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
before = ifinfmsg()
before["attrs"] = [("IFLA_MTU", 1500)]
before.encode()
from agent.linux.vf_config import request
message = request(5, 3, {"vlan": 100, "vlan_protocol": "802.1ad"})
message.encode()
print(bytes(message.data).hex())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert bytes.fromhex(ran.stdout) == encoded(3, {"vlan": 100, "vlan_protocol": "802.1ad"})
    assert struct.unpack_from("=H", inner(bytes.fromhex(ran.stdout)), 4) == (4 + 16,)


def test_mlx4_says_with_4095_that_a_vf_has_no_vlan() -> None:
    base = {"mac": "02:00:00:00:00:01", "qos": 0}
    assert [decode(inner(encoded(0, {**base, "vlan": vlan}))).vlan for vlan in (0, 1, 4094, 4095)] == [0, 1, 4094, 0]


def test_what_is_not_given_is_not_written() -> None:
    assert inner(encoded(0, {"trust": None, "vlan": None})) == inner(encoded(0, {})) == b""
    written = entry(encoded(0, {"trust": False}))
    assert [written.get_attr(f"IFLA_VF_{name}") for name in ("MAC", "VLAN", "RATE", "SPOOFCHK")] == [None] * 4


@pytest.mark.parametrize("name", ["trust", "spoofchk", "rss_query"])
def test_attributes_that_a_driver_does_not_report_are_unknown(name: str) -> None:
    base = {"mac": "02:00:00:00:00:01", "vlan": 0}
    assert getattr(decode(inner(encoded(0, {**base, name: 0xFFFFFFFF}))), name) is None
    assert getattr(decode(inner(encoded(0, base))), name) is None
