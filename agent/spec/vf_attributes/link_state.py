"""The link that a VF sees."""

from typing import Literal

from agent.spec.vf_attributes import VfAttribute, word

# Their places are the kernel's numbers.
STATES = ("auto", "enable", "disable")
_number = word(1)

ATTRIBUTES = (
    VfAttribute(
        name="link_state",
        type=Literal["auto", "enable", "disable"],
        meaning='the link that the VF sees: `"auto"` (the PF\'s), `"enable"`, `"disable"`; on InfiniBand the link policy',
        order=60,
        netlink="IFLA_VF_LINK_STATE",
        read=lambda content: STATES[_number(content)],
        # The kernel reports it also if the driver does not support it (rtnl_fill_vfinfo, net/core/rtnetlink.c).
        unreported="auto",
        key="link_state",
        encode=STATES.index,
        show=lambda vf: (f"link {vf.link_state}",) if vf.link_state != "auto" else (),
    ),
)
