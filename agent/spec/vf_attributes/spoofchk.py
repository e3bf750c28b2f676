"""Whether the PF drops the frames of a VF that have another source address than its own."""

from agent.spec.vf_attributes import VfAttribute, switch

ATTRIBUTES = (
    VfAttribute(
        name="spoofchk",
        type=bool,
        meaning="the PF drops frames of the VF whose source is not its address",
        order=40,
        netlink="IFLA_VF_SPOOFCHK",
        read=switch,
        key="spoofchk",
    ),
)
