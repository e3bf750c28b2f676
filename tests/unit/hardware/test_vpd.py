"""Serial numbers and product names parsed from a card's bytes."""

import struct

import pytest

from agent.hardware.vpd import device_serial_number, is_nvlink_bridge, product_name, vpd_serial_number


def config(*capabilities: tuple[int, int, bytes]) -> bytes:
    """A configuration space with extended capabilities: id, offset, content; each points to the next."""
    space = bytearray(4096)
    for place, (number, offset, content) in enumerate(capabilities):
        following = capabilities[place + 1][1] if place + 1 < len(capabilities) else 0
        struct.pack_into("<I", space, offset, following << 20 | 1 << 16 | number)
        space[offset + 4 : offset + 4 + len(content)] = content
    return bytes(space)


SERIAL = struct.pack("<II", 0xFF123456, 0xB83FD2FF)
VPD = (
    b"\x82\x0a\x00ConnectX-7"
    b"\x90\x1b\x00PN\x05MCX75SN\x0aMT2231X001RV\x03\xab\x00\x00"
    b"\x91\x04\x00V1\x01x"
    b"\x78"
)  # fmt: skip


def test_the_device_serial_number_is_written_as_lspci_does() -> None:
    assert device_serial_number(config((0x0001, 0x100, b""), (0x0003, 0x140, SERIAL))) == "b8-3f-d2-ff-ff-12-34-56"


@pytest.mark.parametrize(
    "space",
    [
        b"",
        bytes(256),
        bytes(4096),
        config((0x0001, 0x100, b""), (0x000E, 0x150, b"")),
        # A chain that bites its tail, and one that leads out of the space.
        config((0x0001, 0x100, b""), (0x0002, 0x140, b""), (0x0004, 0x100, b"")),
        config((0x0001, 0xFF8, SERIAL)),
        b"\xff" * 4096,
    ],
)
def test_no_device_serial_number(space: bytes) -> None:
    assert device_serial_number(space) is None


def test_the_serial_number_is_read_from_the_vpd() -> None:
    assert vpd_serial_number(VPD) == "MT2231X001"


@pytest.mark.parametrize("vpd", [b"", b"\xff" * 64, VPD[:13], b"\x90\x05\x00PN\x02ab\x78", b"\x90\x03\x00SN\x00"])
def test_no_serial_number_in_the_vpd(vpd: bytes) -> None:
    assert vpd_serial_number(vpd) is None


def test_the_product_name_is_the_identifier_string_of_the_vpd() -> None:
    name = "NVIDIA ConnectX-7 HHHL Adapter card, 400GbE / NDR IB (default mode), Single-port OSFP, PCIe 5.0 x16, " * 2
    tag = b"\x82" + len(name).to_bytes(2, "little")
    assert product_name(tag + name.encode() + b"\x90\x02\x00PN\x78") == name.strip()
    assert product_name(tag + b"cut sho") == "cut sho"
    assert product_name(b"") == product_name(b"\xff" * 64) == product_name(b"\x90\x02\x00PN") == ""


@pytest.mark.parametrize(
    ("field", "bridge"),
    [
        (b"MLX:MODL=CX75:SMDL=SW_MNG", True),
        (b"MLX:SMDL=SW_MNG:MODL=CX75\0", True),
        (b"MLX:MODL=CX755206A", False),
        (b"MLX:SMDL=SW_MNG2", False),
        (b"MLX:XSMDL=SW_MNG", False),
    ],
)
def test_an_nvlink_bridge_is_known_by_its_submodel(field: bytes, bridge: bool) -> None:
    content = b"PN\x02abVA" + bytes([len(field)]) + field
    assert is_nvlink_bridge(b"\x90" + len(content).to_bytes(2, "little") + content + b"\x78") is bridge
    assert not is_nvlink_bridge(field)
