"""The ConnectX-7 of HGX B200 that connect the host to NVLink switches: their PCI IDs are those of the fabric's NICs."""

from typing import Any

import pytest
from attrs import evolve

from agent.engine.converge import Pass
from agent.hardware.functions import Asked, discover
from agent.state.scope import own
from cli.as_inventory import derive_inventory
from tests.sim.kernel import PCI, Kernel
from tests.sim.passes import nic, settle, spec_of

RAILS = ("0000:18:00.0", "0000:40:00.0")
BRIDGE = "0000:3a:00.0"
"""It has an address between those of the rails, so that these would get other numbers with it."""


def vpd(submodel: str) -> bytes:
    field = f"MLX:MN=MLNX:CSKU=V2:UUID=V3:PCI=V0:MODL=CX75{submodel}".encode()
    content = b"SN\x02ABVA" + bytes([len(field)]) + field + b"RV\x01\x00"
    return b"\x82\x04\x00CX-7\x90" + len(content).to_bytes(2, "little") + content + b"\x78"


def add(kernel: Kernel, pci: str, bridge: bool, number: int) -> None:
    kernel.add_nic(
        pci, f"ibp{number}s0", f"00:00:10:86:fe:80:00:00:00:00:00:00:02:00:5e:03:00:12:34:0{number}", total_vfs=0
    )
    for file, text in (("class", "0x020700"), ("vendor", "0x15b3"), ("device", "0x1021")):
        kernel.tree.put(f"{PCI}/{pci}/{file}", text)
    kernel.config[f"{PCI}/{pci}/vpd"] = bytearray(vpd(":SMDL=SW_MNG" if bridge else "5206A"))
    kernel.rdma.add(pci, f"mlx5_{number}", None, link_layer="InfiniBand")


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    for number, pci in enumerate((RAILS[0], BRIDGE, RAILS[1])):
        add(kernel, pci, pci == BRIDGE, number)
    return kernel


def each(most: int) -> dict[str, Any]:
    return {"name": "rail{index}", "select": {"vendor": "15b3", "device": "1021", "each": True, "max": most}}


EACH = each(2)


def names(result: Pass) -> dict[str, str]:
    return {address: nic.nic.name for address, nic in result.want.nics.items()}


def readings(kernel: Kernel) -> list[str]:
    return [path.split("/")[-2] for path in kernel.read_in_part if path.endswith("/vpd")]


def test_an_entry_for_each_nic_of_a_kind_leaves_the_bridge_out(kernel: Kernel) -> None:
    assert names(settle(kernel, spec_of(EACH))) == {RAILS[0]: "rail0", RAILS[1]: "rail1"}
    alone = nic("bridge", BRIDGE)
    assert names(settle(kernel, spec_of(EACH, alone))) == {RAILS[0]: "rail0", RAILS[1]: "rail1", BRIDGE: "bridge"}


def test_the_product_data_are_read_once_a_function_and_only_for_such_an_entry(kernel: Kernel) -> None:
    for pci, vendor, kind in (("0000:61:00.0", "0x8086", "0x020700"), ("0000:62:00.0", "0x15b3", "0x020000")):
        kernel.add_nic(pci, f"eth{pci[6]}", f"02:00:00:00:0{pci[6]}:00")
        kernel.tree.put(f"{PCI}/{pci}/vendor", vendor)
        kernel.tree.put(f"{PCI}/{pci}/class", kind)
    settle(kernel, spec_of(nic("rail0", RAILS[0])))
    assert readings(kernel) == []
    result = settle(kernel, spec_of(EACH))
    assert readings(kernel) == [RAILS[0], BRIDGE, RAILS[1]]
    # A full reading, and one of a netdev that changed.
    result = settle(kernel, spec_of(EACH), result)
    result = settle(kernel, spec_of(EACH), result, frozenset({own(RAILS[0])}))
    assert names(result) == {RAILS[0]: "rail0", RAILS[1]: "rail1"}
    assert len(readings(kernel)) == 3
    # Another card in the bridge's slot.
    kernel.remove_nic(BRIDGE)
    result = settle(kernel, spec_of(EACH), result, frozenset({BRIDGE}))
    add(kernel, BRIDGE, bridge=False, number=1)
    assert names(settle(kernel, spec_of(each(3)), result, frozenset({BRIDGE}))) == {
        RAILS[0]: "rail0",
        BRIDGE: "rail1",
        RAILS[1]: "rail2",
    }


def test_a_bridge_whose_product_data_cannot_be_read_now_is_read_again(kernel: Kernel) -> None:
    kernel.unreadable.add(f"{PCI}/{BRIDGE}/vpd")
    result = settle(kernel, spec_of(EACH))
    assert next(c.reason for c in result.conditions if c.type == "NicsPresent") == "TooManyNics"
    kernel.unreadable.clear()
    result = settle(kernel, spec_of(EACH), result)
    assert names(result) == {RAILS[0]: "rail0", RAILS[1]: "rail1"}
    kernel.unreadable.add(f"{PCI}/{BRIDGE}/vpd")
    assert names(settle(kernel, spec_of(EACH), result)) == {RAILS[0]: "rail0", RAILS[1]: "rail1"}


def test_a_bridge_that_hangs_is_not_read_and_stays_known(kernel: Kernel) -> None:
    known = discover(kernel.machine(), Asked(nvlink_bridges=True))
    kernel.read_in_part.clear()
    hangs = evolve(kernel.machine(), hung=frozenset({BRIDGE}))
    for before, bridge in (((), None), (known, True)):
        functions = discover(hangs, Asked(nvlink_bridges=True, known=before))
        assert {f.address: f.nvlink_bridge for f in functions} == {RAILS[0]: False, BRIDGE: bridge, RAILS[1]: False}
    assert readings(kernel) == list(RAILS)


def test_a_bridge_is_in_an_inventory_if_it_is_asked_for_by_name(kernel: Kernel) -> None:
    assert f'"pci": "{BRIDGE}"' in derive_inventory(kernel.machine(), "h1", "n1", [BRIDGE]).text
