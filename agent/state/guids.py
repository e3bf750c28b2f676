"""GUIDs of InfiniBand: that of a PF's port, and those that its VFs get.

A ConnectX VF has no GUID until its PF gives it one, and loses it with each reload of the PF's driver (mlx5_ib's ib_virt.c).
From the driver's source and vendor documents: not run on InfiniBand.
"""

from __future__ import annotations

from functools import lru_cache

from agent.machine import Link
from agent.sha256 import digest

# IPoIB's hardware address: 4 octets of flags and queue pair, 8 of the subnet's prefix, 8 of the port's GUID (RFC 4391, 9.1.1).
ADDRESS_OCTETS = 20
GUID_LENGTH = len("00:00:00:00:00:00:00:00")


def port_guid(link: Link | None) -> str:
    """The GUID of the port that a netdev is on; empty if that is no InfiniBand port, or has no GUID (0)."""
    address = (link.permanent_mac or link.mac) if link else ""
    guid = address[-GUID_LENGTH:]
    return guid if address.count(":") == ADDRESS_OCTETS - 1 and guid.strip("0:") else ""


@lru_cache(maxsize=16384)
def derived_guid(guid: str, index: int) -> str:
    """The GUID that VF ``index`` gets from its PF, whose port has ``guid``. It is the same after every reload of the driver.

    It is locally administered. Its first four octets have 18 bits of a hash of the PF's first four, and the VF's index in 12
    bits; its last four octets are the PF's. So the VFs of PFs of one vendor, whose GUIDs begin with the same octets, never
    have the same GUID. VFs of two vendors have, if the hashes are equal by chance: then neither NIC is changed, if both are
    on one node (AddressGivenTwice).
    """
    octets = bytes.fromhex(guid.replace(":", ""))
    hashed = digest(octets[:4])
    # 0xFC | 0x02: the last two bits of the first octet say "locally administered" and "not multicast".
    first, third = hashed[0] & 0xFC | 0x02, hashed[2] & 0xF0 | index >> 8
    return bytes([first, hashed[1], third, index & 0xFF, *octets[4:]]).hex(":")
