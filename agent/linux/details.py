"""What drivers and libraries tell only when asked in their own ways."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from array import array
from pathlib import Path

# include/uapi/linux/sockios.h and ethtool.h: struct ethtool_drvinfo is cmd, driver[32], version[32], fw_version[32], ...
SIOCETHTOOL = 0x8946
ETHTOOL_GDRVINFO = 0x3
DRVINFO_SIZE = 196
DRVINFO_FIRMWARE = slice(68, 100)


class LinuxDetails:
    """What drivers and libraries tell only when asked in their own ways."""

    def firmware(self, netdev: str) -> str | None:
        """Ask by SIOCETHTOOL, since ethtool's netlink has no such message.

        Any socket takes it (sock_do_ioctl); the agent's unit allows those of netlink, not of IP.
        """
        buffer = array("B", ETHTOOL_GDRVINFO.to_bytes(4, sys.byteorder).ljust(DRVINFO_SIZE, b"\0"))
        request = struct.pack("16sP16x", netdev.encode(), buffer.buffer_info()[0])
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as control:
                fcntl.ioctl(control, SIOCETHTOOL, request)
        except OSError:
            return None
        version = buffer.tobytes()[DRVINFO_FIRMWARE].partition(b"\0")[0].decode(errors="replace").strip()
        return None if version in ("", "N/A") else version

    def vpd(self, address: str) -> bytes:
        """Read sysfs's `vpd`, which ends where the device's end tag is."""
        try:
            return Path(f"/sys/bus/pci/devices/{address}/vpd").read_bytes()
        except OSError:
            return b""
