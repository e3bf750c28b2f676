"""A PCI function's configuration space: where its capabilities are, and the fields of PCI Express.

From the PCI Express Base Specification and the kernel's include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

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
    """Where a function's Device Control register is, and its value; None if it has no PCI Express capability.

    :raises OSError: the function is gone, or its configuration space cannot be read (as who is not root).
    """
    path = f"{device_path(address)}/config"
    space = files.read_at(path, 0, 256)
    if len(space) < 256 or not space[STATUS] & STATUS_CAPABILITIES:
        return None
    seen: set[int] = set()
    at = space[FIRST_CAPABILITY] & ~3
    while 0x40 <= at <= 256 - DEVICE_CONTROL - 2 and at not in seen:
        if space[at] == CAPABILITY_EXPRESS:
            found = at + DEVICE_CONTROL
            return found, int.from_bytes(space[found : found + 2], "little")
        seen.add(at)
        at = space[at + 1] & ~3
    return None


def max_read_request(control: int) -> int:
    """The most bytes that a function asks for in one read, of its Device Control register."""
    return SMALLEST << ((control & READ_REQUEST) >> READ_REQUEST_SHIFT)


def with_max_read_request(control: int, size: int) -> int:
    """A Device Control register with another largest read request, of 128 to 4096 bytes.

    Bit 15 starts a reset of the function; it reads as 0, and so is written as 0.
    """
    return control & ~READ_REQUEST | (size // SMALLEST).bit_length() - 1 << READ_REQUEST_SHIFT
