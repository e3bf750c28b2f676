"""Configuration spaces of PCI functions: a PCI Express capability behind a power management one, as on most NICs."""

EXPRESS = 0xA0
DEVICE_CONTROL = EXPRESS + 8
# Of Device Control (from 0 on), the bits that a write changes; 15 starts a reset and reads as 0.
WRITABLE = {DEVICE_CONTROL: 0xFF, DEVICE_CONTROL + 1: 0x7F}


def made(read_request_bits: int = 0b010) -> bytearray:
    """256 bytes. The bits are those of Device Control: 0 is 128 bytes, 5 is 4096."""
    space = bytearray(256)
    space[0x06] = 0x10
    space[0x34] = 0x40
    space[0x40:0x42] = bytes([0x01, EXPRESS])
    space[EXPRESS : EXPRESS + 2] = bytes([0x10, 0])
    space[DEVICE_CONTROL : DEVICE_CONTROL + 2] = (read_request_bits << 12 | 0x0810).to_bytes(2, "little")
    return space


def write(space: bytearray, offset: int, data: bytes) -> None:
    """Only what is writable changes, and nothing complains."""
    for at, value in enumerate(data, start=offset):
        mask = WRITABLE.get(at, 0)
        space[at] = space[at] & ~mask | value & mask
