"""The VLAN that a PF puts a VF in. The kernel sets its number, priority and protocol together."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from agent.spec.validators import Within
from agent.spec.vf_attributes import Refusal, Together, Values, VfAttribute, word

PROTOCOLS = {"802.1Q": 0x8100, "802.1ad": 0x88A8}
VGT = 4095
"""The VLAN that mlx4 reports of a VF without one (mlx4_set_vf_vlan, drivers/net/ethernet/mellanox/mlx4/cmd.c)."""

_number = word(1)


def _message(index: int, values: Values) -> tuple[str, Values]:
    numbers = {"vf": index, "vlan": values["vlan"], "qos": values["qos"]}
    if values["vlan_protocol"] == "802.1Q":
        return "IFLA_VF_VLAN", numbers
    protocol = {**numbers, "proto": PROTOCOLS[values["vlan_protocol"]]}
    return "IFLA_VF_VLAN_LIST", {"attrs": [("IFLA_VF_VLAN_INFO", protocol)]}


_TOGETHER = Together({"vlan": 0, "qos": 0, "vlan_protocol": "802.1Q"}, _message)


def _protocol(listed: bytes) -> str:
    # struct ifla_vf_vlan_info, behind the header of its attribute: three numbers of 32 bits, and the protocol.
    number = struct.unpack_from(">H", listed, 4 + 12)[0] if len(listed) >= 4 + 14 else 0
    return next((name for name, known in PROTOCOLS.items() if known == number), "802.1Q")


def _needs_vlan(name: str) -> Callable[[Any], str]:
    def check(vf: Any) -> str:
        lacking = getattr(vf, name) is not None and vf.vlan is None
        return f"{name} needs vlan, which is not given; give it, too" if lacking else ""

    return check


def _unknown_protocol(refusal: Refusal) -> tuple[int, str] | None:
    text = f"the driver of {refusal.netdev} does not support this vlan_protocol"
    return (errno.EOPNOTSUPP, text) if refusal.errno == errno.EPROTONOSUPPORT else None


def _shown(vf: Any) -> tuple[str, ...]:
    priority = f" qos {vf.qos}" if vf.qos else ""
    protocol = f" {vf.vlan_protocol}" if vf.vlan_protocol != "802.1Q" else ""
    return (f"vlan {vf.vlan}{priority}{protocol}",)


_of_vlan = partial(VfAttribute, together=_TOGETHER, explain=_unknown_protocol)
ATTRIBUTES = (
    _of_vlan(
        name="vlan",
        type=int,
        meaning="the VLAN of the VF; the PF adds and removes the tag",
        unit="0 to 4094; 0 is untagged",
        order=20,
        validator=Within(0, 4094, "(0 is untagged)"),
        netlink="IFLA_VF_VLAN",
        read=lambda content: _number(content) % VGT,
        unreported=0,
        show=_shown,
    ),
    _of_vlan(
        name="qos",
        type=int,
        meaning="priority in the tag of that VLAN; needs `vlan`",
        unit="0 to 7",
        default="left alone; 0 with `vlan` 0",
        order=21,
        validator=Within(0, 7, "(VLAN priority)"),
        check=_needs_vlan("qos"),
        netlink="IFLA_VF_VLAN",
        read=word(2),
        unreported=0,
        show=lambda vf: (),
    ),
    _of_vlan(
        name="vlan_protocol",
        type=Literal["802.1Q", "802.1ad"],
        meaning='`"802.1Q"` or `"802.1ad"`; needs `vlan`',
        default="left alone; without effect with `vlan` 0",
        order=22,
        check=_needs_vlan("vlan_protocol"),
        netlink="IFLA_VF_VLAN_LIST",
        read=_protocol,
        unreported="802.1Q",
        show=lambda vf: (),
    ),
)
