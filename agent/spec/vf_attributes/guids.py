"""The GUIDs of an InfiniBand VF. Linux reports them since 5.5. From the kernel's source and vendor documents: not run."""

import re
import sys

from agent.spec.validators import Matches
from agent.spec.vf_attributes import VfAttribute


def _possible(guid: str) -> None:
    if set(guid) <= {"0", ":"} or set(guid) <= {"f", ":"}:
        raise ValueError(f"{guid} is not a GUID that a port can have; give another")


_GUID = Matches(
    re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){7}"), "write it as 00:11:22:33:44:55:66:77, in lower case", _possible
)


def _read(content: bytes) -> str:
    # struct ifla_vf_guid aligns its 64 bits, which are in the machine's own byte order.
    return content[8:16][:: 1 if sys.byteorder == "big" else -1].hex(":")


ATTRIBUTES = tuple(
    VfAttribute(
        name=f"{owner}_guid",
        type=str,
        meaning=f'InfiniBand: the GUID of the VF\'s {owner}, as `"00:11:22:33:44:55:66:77"`; only in a group with a single '
        "index. From vendor documents: not run on InfiniBand",
        default="derived from the PF's port GUID and the index",
        order=90,
        validator=_GUID,
        of_one_vf=True,
        remakes_netdev=owner == "node",
        netlink=f"IFLA_VF_IB_{owner.upper()}_GUID",
        read=_read,
        key=f"ib_{owner}_guid",
        show=lambda vf, owner=owner: tuple(  # type: ignore[misc]
            f"{owner} GUID {guid}" for guid in (getattr(vf, f"{owner}_guid"),) if guid
        ),
    )
    for owner in ("node", "port")
)
GUIDS = tuple(attribute.name for attribute in ATTRIBUTES)
