"""The attributes of a VF that are a record and no more, a row each; those with code have files of their own."""

from typing import Literal

from agent.spec.validators import unicast_mac
from agent.spec.vf_attributes import VfAttribute, switch, word

# Their places are the kernel's numbers.
LINK_STATES = ("auto", "enable", "disable")
_number = word(1)


def _switch(name: str, key: str, order: int, meaning: str) -> VfAttribute:
    netlink = f"IFLA_VF_{key.upper()}"
    return VfAttribute(name=name, type=bool, meaning=meaning, order=order, netlink=netlink, read=switch, key=key)


ATTRIBUTES = (
    VfAttribute(
        name="mac",
        type=str,
        meaning="MAC address; only in a group with a single index",
        default="derived from the PF's permanent address and the index",
        order=10,
        validator=unicast_mac,
        of_one_vf=True,
        netlink="IFLA_VF_MAC",
        read=lambda content: content[4:10].hex(":"),
        key="mac",
        # A VF's driver takes another MAC only when it is bound again.
        remakes_netdev=True,
        show=lambda vf: (vf.mac,),
    ),
    _switch("trust", "trust", 30, "the VF may change its address and be promiscuous"),
    _switch("spoofchk", "spoofchk", 40, "the PF drops frames of the VF whose source is not its address"),
    _switch("rss_query", "rss_query_en", 50, "the VF may ask for the RSS table and key"),
    VfAttribute(
        name="link_state",
        type=Literal["auto", "enable", "disable"],
        meaning='the link that the VF sees: `"auto"` (the PF\'s), `"enable"`, `"disable"`; on InfiniBand the link policy',
        order=60,
        netlink="IFLA_VF_LINK_STATE",
        read=lambda content: LINK_STATES[_number(content)],
        # The kernel reports it also if the driver does not support it (rtnl_fill_vfinfo, net/core/rtnetlink.c).
        unreported="auto",
        key="link_state",
        encode=LINK_STATES.index,
        show=lambda vf: (f"link {vf.link_state}",) if vf.link_state != "auto" else (),
    ),
)
