"""Details that only `inspect` shows: firmware versions and VPD."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from array import array

# include/uapi/linux/sockios.h and ethtool.h: struct ethtool_drvinfo is cmd, driver[32], version[32], fw_version[32], ...
SIOCETHTOOL = 0x8946
ETHTOOL_GDRVINFO = 0x3
DRVINFO_SIZE = 196
DRVINFO_FIRMWARE = slice(68, 100)


class LinuxDetails:
    """Details that only `inspect` shows: firmware versions and VPD."""

    def firmware(self, netdev: str) -> str | None:
        """Use the ioctl SIOCETHTOOL, since ethtool's netlink family has no such message.

        It works on any socket (sock_do_ioctl). The agent's unit allows netlink sockets, but no IP sockets.
        """
        buffer = array("B", ETHTOOL_GDRVINFO.to_bytes(4, sys.byteorder).ljust(DRVINFO_SIZE, b"\0"))
        request = struct.pack("16sP16x", os.fsencode(netdev), buffer.buffer_info()[0])
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as control:
                fcntl.ioctl(control, SIOCETHTOOL, request)
        except OSError:
            return None
        version = buffer.tobytes()[DRVINFO_FIRMWARE].partition(b"\0")[0].decode(errors="replace").strip()
        return None if version in ("", "N/A") else version
