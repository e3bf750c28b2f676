"""udev's database: what udev knows of a netdev, and whether it has initialised it."""

from __future__ import annotations

import re

from agent.hardware.sysfs import read_or
from agent.machine import Files

UDEV = "/run/udev/data"
"""The folder of the database."""


def udev_entry(files: Files, ifindex: int) -> str:
    """A netdev's entry in udev's database; empty if there is none. Properties are lines ``E:NAME=value``."""
    return read_or(files, f"{UDEV}/n{ifindex}", "")


def initialised(files: Files, ifindex: int) -> bool:
    """Whether udev has initialised a netdev (its database has the time of that), or does not run on this machine.

    Before that, the netdev's names may still change. udev also makes an entry just before it renames a new netdev
    (rename_netif, src/udev/udev-event.c).
    """
    if re.search(r"^I:", udev_entry(files, ifindex), re.MULTILINE):
        return True
    # udev's database has an entry for each device of the node. To list it for every netdev would take too long.
    try:
        files.names(UDEV)
    except FileNotFoundError:
        return True
    return False
