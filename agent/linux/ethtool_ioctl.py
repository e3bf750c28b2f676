"""The ioctl SIOCETHTOOL, for what netlink does not have: a driver's firmware version, and on old kernels the permanent address.

It works on any socket (sock_do_ioctl). The agent's unit allows netlink sockets, but no IP sockets.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from array import array

# include/uapi/linux/sockios.h and ethtool.h: struct ethtool_drvinfo is cmd, driver[32], version[32], fw_version[32], and so on.
SIOCETHTOOL = 0x8946
GDRVINFO = 0x3
DRVINFO_SIZE = 196
DRVINFO_FIRMWARE = slice(68, 100)

# struct ethtool_perm_addr is cmd, size, data[size]. The caller sets the size of its buffer, and the kernel that of the address.
GPERMADDR = 0x20
LONGEST_ADDRESS = 32  # MAX_ADDR_LEN, include/linux/netdevice.h


def firmware(netdev: str) -> str | None:
    """The firmware's version as the driver reports it; None if that is unknown."""
    answer = _asked(netdev, struct.pack("=I", GDRVINFO).ljust(DRVINFO_SIZE, b"\0"))
    version = answer[DRVINFO_FIRMWARE].partition(b"\0")[0].decode(errors="replace").strip()
    return None if version in ("", "N/A") else version


def permanent_address(netdev: str) -> str:
    """The permanent hardware address, as :attr:`agent.machine.Link.permanent_mac`; empty if it has none."""
    answer = _asked(netdev, struct.pack("=II", GPERMADDR, LONGEST_ADDRESS) + bytes(LONGEST_ADDRESS))
    address = answer[8 : 8 + int.from_bytes(answer[4:8], sys.byteorder)]
    return address.hex(":") if any(address) else ""


def _asked(netdev: str, request: bytes) -> bytes:
    """The kernel's answer, which has the request's size; empty if it refuses."""
    buffer = array("B", request)
    pointer = struct.pack("16sP16x", os.fsencode(netdev), buffer.buffer_info()[0])
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as control:
            fcntl.ioctl(control, SIOCETHTOOL, pointer)
    except OSError:
        return b""
    return buffer.tobytes()
