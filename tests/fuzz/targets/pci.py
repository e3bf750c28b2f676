"""A card's bytes: its configuration space and its Vital Product Data."""

import struct
from collections.abc import Sequence
from contextlib import suppress

from agent.hardware.config_space import device_control, max_read_request
from agent.hardware.vpd import device_serial_number, is_nvlink_bridge, product_name, vpd_serial_number
from tests.fuzz.targets import choose, chosen
from tests.sim.kernel import Kernel

ADDRESS = "0000:21:00.0"
FILE = f"/sys/bus/pci/devices/{ADDRESS}/config"
KERNEL = Kernel()
KERNEL.add_nic(ADDRESS, "ens1", "02:00:00:00:01:00", node=0)


def _config(data: bytes) -> None:
    if (serial := device_serial_number(data)) is not None:
        serial.encode()
    KERNEL.config[FILE] = bytearray(data)
    KERNEL.read_in_part.clear()  # the simulation notes each read
    with suppress(OSError):
        offset = device_control(KERNEL.machine().files, ADDRESS)
        assert offset is None or max_read_request(offset[1]) >= 128


def _vpd(data: bytes) -> None:
    (product_name(data) + (vpd_serial_number(data) or "")).encode()
    is_nvlink_bridge(data)


def check(data: bytes) -> None:
    """Read one or the other."""
    choose(data, (_config, _vpd))


def seeds() -> Sequence[bytes]:
    """A space with both lists of capabilities, and Vital Product Data."""
    space = bytearray(4096)
    space[0x06], space[0x34], space[0x40], space[0x41], space[0x50] = 0x10, 0x40, 0x05, 0x50, 0x10
    struct.pack_into("<I", space, 0x100, 0x140 << 20 | 1 << 16 | 1)
    struct.pack_into("<III", space, 0x140, 1 << 16 | 3, 0xFF123456, 0xB83FD2FF)
    vpd = b"\x82\x0a\x00ConnectX-7\x90\x11\x00PN\x05MCX75SN\x06MT2231\x78"
    return [chosen(0, bytes(space)), chosen(1, vpd)]
