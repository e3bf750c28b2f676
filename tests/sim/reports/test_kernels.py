"""The agent reads what the kernel answers before and after certain commits of it."""

import struct

import pytest

from agent.hardware.load import interrupts_of
from agent.hardware.topology import CPU, read_topology
from agent.linux import dcb
from agent.linux.messages import attribute
from agent.linux.routing import FIBMSG, FR_ACT_TO_TBL, decode_rule
from agent.machine import Rule
from tests.sim.passes import condition, rail0, settle
from tests.sim.two_nics import NAME0, PF0, two_nics


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["core_cpus_list", "thread_siblings_list"], id="both-names"),
        pytest.param(["thread_siblings_list"], id="linux-2e4c54dac7b3"),
    ],
)
def test_the_threads_of_a_core_are_known_by_the_older_name_of_their_file(names: list[str]) -> None:
    kernel = two_nics(cpus=4)
    for cpu in range(4):
        folder = f"{CPU}/cpu{cpu}/topology"
        kernel.tree.remove(f"{folder}/core_cpus_list")
        for name in names:
            kernel.tree.put(f"{folder}/{name}", f"{cpu % 2},{cpu % 2 + 2}")
    assert [cpu.core for cpu in read_topology(kernel.machine()).cpus.values()] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("rate", "speed", "reason"),
    [
        pytest.param("10 Gb/sec (4X SDR)", "800000", "AllActive", id="linux-cb06b6b3f6cb"),
        pytest.param("20 Gb/sec (8X SDR)", "1600000", "AllActive", id="eight-lanes"),
        pytest.param("5 Gb/sec (2X SDR)", "400000", "PortNotReady", id="slower-than-asked"),
        pytest.param("10 Gb/sec (4X SDR)", "10000", "PortNotReady", id="ten-gigabits"),
        pytest.param("1600 Gb/sec (8X XDR)", "-1", "AllActive", id="linux-703289ce43f7"),
    ],
)
def test_a_roce_port_with_lanes_of_200_gigabits_has_the_rate_of_its_netdev(rate: str, speed: str, reason: str) -> None:
    """The kernel has no word for such lanes, and prints the word of the slowest (ib_get_width_and_speed, verbs.c)."""
    kernel = two_nics()
    kernel.rdma.add(PF0, "bnxt_re0", NAME0, rate=rate)
    kernel.tree.put(f"/sys/class/net/{NAME0}/speed", speed)
    assert condition(settle(kernel, rail0(rdma={"rate": 800})), "RdmaPorts").reason == reason


def test_interrupts_are_counted_in_the_wider_columns_of_linux_7_2() -> None:
    header = f"{'':12}CPU0       CPU2       CPU1023    \n"
    row = "  24:          1          0 4294967295  IR-PCI-MSIX-0000:21:00.0    1  -edge      ens1-TxRx-0\n"
    assert interrupts_of(header + row + " NMI:          5          5          5   Non-maskable\n") == {
        24: {0: 1, 1023: 4294967295}
    }


@pytest.mark.parametrize(
    ("more", "ours"),
    [
        pytest.param(b"", True, id="plain"),
        pytest.param(attribute(27, b"\x0a") + attribute(32, b"\x3f"), False, id="linux-ca4edd969a94"),
    ],
)
def test_a_rule_with_a_selector_that_is_newer_than_the_agent_is_none_of_its_own(more: bytes, ours: bool) -> None:
    source = attribute(2, bytes([10, 0, 0, 1])) + attribute(6, struct.pack("=I", 1000))
    body = FIBMSG.pack(2, 0, 32, 0, 100, 0, 0, FR_ACT_TO_TBL, 0) + source + more
    assert decode_rule(body) == (Rule("10.0.0.1", 100, 1000) if ours else None)


def test_priorities_by_pcp_are_none_by_dscp() -> None:
    """Linux 6.2 has them in the same table, in attributes of another type, with the selector 255 (dcbnl.h)."""
    table = bytes.fromhex("14000380 0800010005031a00 08000200ff030300")
    assert dcb.decode(table).dscp == {(26, 3)}
