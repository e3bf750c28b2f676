"""Which physical function a NIC's selector means, by each of its keys."""

import struct

import pytest

from agent.hardware.functions import PCI
from agent.report.verdict import is_ready
from tests.sim.kernel import Kernel
from tests.sim.kinds.test_sriov import MAC, NAME, OTHER, OTHER_MAC, PF, group, made, spec
from tests.sim.passes import settle, spec_of

DSN = bytes(256) + struct.pack("<III", 0x00010003, 0xFF123456, 0xB83FD2FF) + bytes(64)
VPD = b"\x90\x0d\x00SN\x0aMT2231X001\x78"

SELECTORS = [
    {"pci": PF},
    {"mac": MAC},
    {"netdev": NAME},
    {"netdev": "an-altname"},
    {"serial": "b8-3f-d2-ff-ff-12-34-56"},
    {"serial": "MT2231X001"},
    {"vendor": "8086", "netdev": NAME},
    {"device": "10c9", "mac": MAC},
    {"driver": "igb", "serial": "MT2231X001"},
]


@pytest.fixture
def two() -> Kernel:
    kernel = made()
    kernel.add_nic(OTHER, "enp65s0", OTHER_MAC)
    kernel.netlink.add_altname(kernel.netdev(PF).ifindex, "an-altname")
    kernel.give_serials(PF, DSN, VPD)
    return kernel


def reasons(kernel: Kernel, *selectors: object) -> list[str]:
    nics = [{"name": f"rail{place}", "select": select} for place, select in enumerate(selectors)]
    result = settle(kernel, spec_of(*nics))
    assert is_ready(result.conditions) is all(c.status == "True" for c in result.conditions)
    return [c.reason for c in result.conditions if c.type == "NicsPresent"]


@pytest.mark.parametrize("select", SELECTORS, ids=str)
def test_each_key_selects_and_two_entries_for_one_nic_are_named(two: Kernel, select: dict[str, str]) -> None:
    assert reasons(two, select) == ["AllPresent"]
    assert reasons(two, {"pci": OTHER}, select) == ["AllPresent"]
    another = {"mac": MAC} if "pci" in select else {"pci": PF}
    for pair in ((another, select), (select, another)):
        two.writes.clear()
        assert reasons(two, *pair) == ["NicClaimedTwice"]
        assert not two.writes, "neither is believed"


@pytest.mark.parametrize(
    "select",
    [
        {"pci": "0000:99:00.0"},
        {"mac": "02:00:00:00:09:09"},
        {"netdev": "no-such"},
        {"serial": "b8-3f-d2-ff-ff-12-34-57"},
        {"vendor": "15b3"},
        {"device": "1021"},
        {"driver": "mlx5_core"},
        {"serial": "MT2231X001", "pci": OTHER},
    ],
    ids=str,
)
def test_a_selector_that_matches_nothing_is_not_ready(two: Kernel, select: dict[str, str]) -> None:
    assert reasons(two, select) == ["NicMissing"]


@pytest.mark.parametrize(
    "select", [{"vendor": "8086"}, {"device": "10c9"}, {"driver": "igb"}, {"serial": "MT2231X001"}], ids=str
)
def test_a_selector_that_matches_several_is_not_ready(two: Kernel, select: dict[str, str]) -> None:
    two.give_serials(OTHER, DSN, VPD)
    assert reasons(two, select) == ["NicAmbiguous"]


def test_serial_numbers_are_read_only_if_a_selector_asks_for_one(two: Kernel) -> None:
    settle(two, spec(group()))
    assert f"{PCI}/{PF}/vpd" not in two.read_in_part
    settle(two, spec(group(), select={"serial": "MT2231X001"}))
    assert f"{PCI}/{PF}/vpd" in two.read_in_part


def test_a_nic_selected_by_its_serial_number_that_comes_back_is_known_again(two: Kernel) -> None:
    wanted = spec(group(), select={"serial": "MT2231X001"})
    result = settle(two, wanted)
    two.remove_nic(PF)
    result = settle(two, wanted, result, frozenset({PF}))
    assert not is_ready(result.conditions)
    two.add_nic(PF, NAME, MAC)
    two.give_serials(PF, DSN, VPD)
    result = settle(two, wanted, result, frozenset({PF}))
    assert is_ready(result.conditions)


@pytest.mark.parametrize("has_driver", [True, False])
@pytest.mark.parametrize("kind", ["0x020000", "0x00ff00"])
def test_a_nic_whose_pci_class_does_not_say_so_is_found(two: Kernel, kind: str, has_driver: bool) -> None:
    address = "0000:00:06.0"
    two.add_erdma(address)
    two.tree.put(f"{PCI}/{address}/class", kind)
    if not has_driver:
        two.tree.unlink(f"{PCI}/{address}/driver")
    assert reasons(two, {"pci": address}) == ["AllPresent"]
    assert reasons(two, {"vendor": "1ded", "device": "107f"}) == ["AllPresent"]
    assert reasons(two, {"driver": "erdma"}) == ["AllPresent" if has_driver else "NicMissing"]


@pytest.mark.parametrize("made", ["net", "infiniband"])
def test_a_function_with_a_netdev_or_an_rdma_device_is_a_nic(two: Kernel, made: str) -> None:
    two.tree.put(f"{PCI}/{OTHER}/class", "0x120000")
    two.tree.remove(f"{PCI}/{OTHER}/net")
    assert reasons(two, {"pci": OTHER}) == ["NicMissing"]
    two.tree.folder(f"{PCI}/{OTHER}/{made}/device0")
    assert reasons(two, {"pci": OTHER}) == ["AllPresent"]


def test_an_unclassified_function_of_no_known_family_is_no_nic(two: Kernel) -> None:
    two.tree.put(f"{PCI}/{OTHER}/class", "0x00ff00")
    two.tree.remove(f"{PCI}/{OTHER}/net")
    assert reasons(two, {"pci": OTHER}) == ["NicMissing"]
