"""What PCI devices say of themselves in the configuration space and in the Vital Product Data (VPD): serial numbers, names.

From the PCI specifications, not run on a card that has either (QEMU's igb has neither).
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator

from agent.machine import Files

# No configuration space (4096 bytes) and no Vital Product Data (32768) is larger.
LARGEST = 1 << 15

# PCI Express Base Specification, "Extended Capabilities": they begin at this offset, which only root may read.
EXTENDED = 0x100
DEVICE_SERIAL_NUMBER = 0x0003
# PCI Local Bus Specification 3.0, appendix I: large resource tags of the VPD.
VPD_IDENTIFIER = 0x82
VPD_READ_ONLY = 0x90

SILENT = "it does not answer on PCI: its registers read as ones"


def device_serial_number(config: bytes) -> str | None:
    """The Device Serial Number capability, in the form of lspci (``b8-3f-d2-ff-ff-12-34-56``); None without one."""
    offset, seen = EXTENDED, set[int]()
    while EXTENDED <= offset <= len(config) - 12 and offset not in seen:
        seen.add(offset)
        header, low, high = struct.unpack_from("<III", config, offset)
        if header & 0xFFFF == DEVICE_SERIAL_NUMBER:
            number: int = high << 32 | low
            return number.to_bytes(8, "big").hex("-")
        offset = header >> 20
    return None


def product_name(vpd: bytes) -> str:
    """The product's name: the identifier string that the Vital Product Data begins with; empty without one."""
    tag, content = next(_resources(vpd), (0, b""))
    return content.decode("ascii", "replace").strip("\0 ") if tag == VPD_IDENTIFIER else ""


def vpd_serial_number(vpd: bytes) -> str | None:
    """The field SN of the Vital Product Data; None without one."""
    serials = (value.decode("ascii", "replace").strip("\0 ") for keyword, value in _fields(vpd) if keyword == b"SN")
    return next(serials, None) or None


def is_nvlink_bridge(vpd: bytes) -> bool:
    """Whether a ConnectX only connects the host to NVLink switches (HGX B200), for the fabric manager.

    Its PCI IDs are those of a NIC. Only the vendor's field tells them apart, in which it has the submodel SW_MNG (by NVIDIA's
    documents and Bottlerocket's source; not run on such a server).
    """
    return any(b"SMDL=SW_MNG" in value.rstrip(b"\0 ").split(b":") for _, value in _fields(vpd))


def _fields(vpd: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The read-only fields: keyword and value, with the length in a byte between them."""
    for tag, content in _resources(vpd):
        offset = 0
        while tag == VPD_READ_ONLY and offset + 3 <= len(content):
            length = content[offset + 2]
            yield content[offset : offset + 2], content[offset + 3 : offset + 3 + length]
            offset += 3 + length


def _resources(vpd: bytes) -> Iterator[tuple[int, bytes]]:
    """The large resources, as tag and content; the length is two bytes between them. A small resource (the end tag) ends."""
    offset = 0
    while offset + 3 <= len(vpd) and vpd[offset] & 0x80:
        length = int.from_bytes(vpd[offset + 1 : offset + 3], "little")
        yield vpd[offset], vpd[offset + 3 : offset + 3 + length]
        offset += 3 + length


def silence(files: Files, path: str) -> str:
    """Why a device does not answer on PCI. If it fell off the bus, the kernel keeps it, and each register reads as ones."""
    try:
        return SILENT if files.read_at(f"{path}/config", 0, 4) == b"\xff" * 4 else ""
    except OSError as error:
        return "" if error.errno == errno.ENOENT else str(error)


def serial_numbers(files: Files, path: str, vpd: bytes | None) -> tuple[tuple[str, ...], bool]:
    """The serial numbers of a function's configuration space and of its Vital Product Data, as far as it has them.

    :returns: with them, whether there may be another one, which could not be read.
    """
    config = _data(files, f"{path}/config")
    serials = (device_serial_number(config or b""), vpd_serial_number(vpd or b""))
    return tuple(serial for serial in serials if serial), None in (config, vpd)


def product_data(files: Files, path: str) -> bytes | None:
    """A function's Vital Product Data; empty if it has none, None if that cannot be read now."""
    return _data(files, f"{path}/vpd")


def _data(files: Files, path: str) -> bytes | None:
    """The content of a file, which not every card has; None if it cannot be read now."""
    try:
        return files.read_at(path, 0, LARGEST)
    except OSError as error:
        # ENODEV: the card has Vital Product Data that the kernel does not read (vpd_read, drivers/pci/vpd.c).
        return b"" if error.errno in (errno.ENOENT, errno.ENODEV) else None
