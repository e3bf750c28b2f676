"""Details that only `inspect` shows: firmware versions and VPD."""

from __future__ import annotations

from agent.linux import ethtool_ioctl


class LinuxDetails:
    """Details that only `inspect` shows: firmware versions and VPD."""

    def firmware(self, netdev: str) -> str | None:
        """Use the ioctl SIOCETHTOOL, since ethtool's netlink family has no such message."""
        return ethtool_ioctl.firmware(netdev)
