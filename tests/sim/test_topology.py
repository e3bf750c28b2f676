"""`trackbed topology`: devices and queues at their place, on a simulated machine."""

from __future__ import annotations

import pytest

from agent.spec.node import from_mapping
from agent.tools.topology import EVERYWHERE, arrange, render
from tests.sim.kernel import Kernel
from tests.sim.two_nics import NAME0, NAME1, PF0, PF1, two_nics

CPU = "/sys/devices/system/cpu"
GPU = "/sys/bus/pci/devices/0000:65:00.0"


@pytest.fixture
def kernel() -> Kernel:
    """Two sockets of one NUMA node each, with two CPUs and a NIC; the second NIC's queue is on a CPU of the first socket."""
    kernel = two_nics()
    for cpu in range(4):
        kernel.tree.put(f"{CPU}/cpu{cpu}/topology/physical_package_id", str(cpu // 2))
    arrives(kernel, PF0, 50, f"{NAME0}-TxRx-0", "0")
    arrives(kernel, PF0, 51, f"{NAME0}-TxRx-1", "0")
    arrives(kernel, PF1, 52, f"{NAME1}-TxRx-0", "1")
    return kernel


def arrives(kernel: Kernel, address: str, number: int, action: str, cpu: str) -> None:
    kernel.request_irq(address, number, action)
    kernel.tree.put(f"/proc/irq/{number}/effective_affinity_list", cpu)


def lines(kernel: Kernel, width: int = 100) -> list[str]:
    spec = from_mapping({"node_name": "n1", "nics": [{"name": "rail0", "select": {"pci": PF0}}]})
    return [line for line, _ in render(arrange(kernel.machine(), spec), width)]


def test_devices_and_queues_are_shown_at_their_place(kernel: Kernel) -> None:
    assert lines(kernel) == [
        "socket 0",
        "  NUMA node 0",
        f"    NIC {PF0} {NAME0} (igb) NIC rail0 of the spec",
        "    last-level cache of CPUs 0-1",
        f"      CPU 0: {NAME0} txrx-0, {NAME0} txrx-1",
        f"      CPU 1: {NAME1} txrx-0!",
        "socket 1",
        "  NUMA node 1",
        f"    NIC {PF1} {NAME1} (igb)",
        "    last-level cache of CPUs 2-3",
        "      CPU 2",
        "      CPU 3",
    ]


def test_a_core_says_how_many_queues_it_serves(kernel: Kernel) -> None:
    assert [queues for _, queues in render(arrange(kernel.machine()), 100) if queues] == [2, 1]


def test_what_does_not_fit_is_counted(kernel: Kernel) -> None:
    assert f"      CPU 0: {NAME0} txrx-0 and 1 more" in lines(kernel, width=40)


def test_a_gpu_and_a_device_without_a_node_are_shown(kernel: Kernel) -> None:
    for file, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200"), ("numa_node", "-1")):
        kernel.tree.put(f"{GPU}/{file}", text)
    found = lines(kernel)
    assert found[-2:] == ["no NUMA node", "    GPU 0000:65:00.0"]
    assert arrange(kernel.machine())[-1].number == EVERYWHERE
