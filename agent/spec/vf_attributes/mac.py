"""The address of a VF's netdev."""

from agent.spec.validators import unicast_mac
from agent.spec.vf_attributes import VfAttribute

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
)
