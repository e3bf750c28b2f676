"""Whether a VF may change its address and be promiscuous."""

from agent.spec.vf_attributes import VfAttribute, switch

ATTRIBUTES = (
    VfAttribute(
        name="trust",
        type=bool,
        meaning="the VF may change its address and be promiscuous",
        order=30,
        netlink="IFLA_VF_TRUST",
        read=switch,
        key="trust",
    ),
)
