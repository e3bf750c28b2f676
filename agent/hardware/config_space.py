"""A PCI function's configuration space: its list of capabilities, and the PCI Express capability.

From the PCI Express Base Specification and the kernel's include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

import errno
import os

from agent.hardware.functions import device_path
from agent.machine import Files

STATUS = 0x06
STATUS_CAPABILITIES = 0x10
FIRST_CAPABILITY = 0x34
CAPABILITY_EXPRESS = 0x10
DEVICE_CONTROL = 0x08
"""Offset of the Device Control register in the PCI Express capability."""

READ_REQUEST_SHIFT = 12
READ_REQUEST = 0b111 << READ_REQUEST_SHIFT
SMALLEST = 128


def device_control(files: Files, address: str) -> tuple[int, int] | None:
    """The offset of a function's Device Control register and its value; None without a PCI Express capability.

    :raises PermissionError: without CAP_SYS_ADMIN the kernel shows only the first 64 bytes, and so no capabilities
        (pci_read_config, drivers/pci/pci-sysfs.c).
    :raises OSError: the function is gone, or its configuration space cannot be read.
    """
    path = f"{device_path(address)}/config"
    space = files.read_at(path, 0, 256)
    if len(space) < 256:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if not space[STATUS] & STATUS_CAPABILITIES:
        return None
    seen: set[int] = set()
    at = space[FIRST_CAPABILITY] & ~3
    while 0x40 <= at <= 256 - DEVICE_CONTROL - 2 and at not in seen:
        if space[at] == CAPABILITY_EXPRESS:
            offset = at + DEVICE_CONTROL
            return offset, int.from_bytes(space[offset : offset + 2], "little")
        seen.add(at)
        at = space[at + 1] & ~3
    return None


def max_read_request(control: int) -> int:
    """The largest read request in bytes, from the value of a Device Control register."""
    return SMALLEST << ((control & READ_REQUEST) >> READ_REQUEST_SHIFT)


def with_max_read_request(control: int, size: int) -> int:
    """The value of a Device Control register with another largest read request (128 to 4096 bytes).

    Bit 15 resets the function. It always reads as 0, so writing back what was read does not set it.
    """
    return control & ~READ_REQUEST | (size // SMALLEST).bit_length() - 1 << READ_REQUEST_SHIFT
