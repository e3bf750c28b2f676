"""GUIDs of InfiniBand: that of a PF's port, and those that its VFs get.

A ConnectX VF has no GUID until its PF gives it one, and loses it with each reload of the PF's driver (mlx5_ib's ib_virt.c).
From the driver's source and vendor documents: not run on InfiniBand.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from agent.machine import Link

# IPoIB's hardware address: 4 octets of flags and queue pair, 8 of the subnet's prefix, 8 of the port's GUID (RFC 4391, 9.1.1).
ADDRESS_OCTETS = 20
GUID_LENGTH = len("00:00:00:00:00:00:00:00")


def port_guid(link: Link | None) -> str:
    """The GUID of the port that a netdev is on; empty if that is not an InfiniBand port."""
    address = (link.permanent_mac or link.mac) if link else ""
    return address[-GUID_LENGTH:] if address.count(":") == ADDRESS_OCTETS - 1 else ""


@lru_cache(maxsize=16384)
def derived_guid(guid: str, index: int) -> str:
    """A GUID for VF ``index`` of a PF whose port has ``guid``: locally administered, and the same after every reload.

    It has the PF's last four octets, the VF's index (12 bits) and a hash of the first four octets (18 bits). So two VFs never
    have the same one if their PFs' GUIDs begin with the same four octets, as those of one vendor do. If they do not, and a
    hash is equal by chance, the two NICs are left alone (AddressGivenTwice) where both are on one node.
    """
    octets = bytes.fromhex(guid.replace(":", ""))
    prefix = hashlib.sha256(octets[:4]).digest()
    first, third = prefix[0] & 0xFC | 0x02, prefix[2] & 0xF0 | index >> 8
    return bytes([first, prefix[1], third, index & 0xFF, *octets[4:]]).hex(":")
