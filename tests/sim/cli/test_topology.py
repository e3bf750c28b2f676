"""`trackbed topology`: devices and queues at their place, on a simulated machine."""

import re

import click
import pytest

from agent.machine import QueueIrq
from cli.commands import topology
from cli.topology import EVERYWHERE, arrange, render
from tests.sim.kernel import Kernel
from tests.sim.passes import rail0
from tests.sim.two_nics import NAME0, NAME1, PF0, PF1, two_nics

CPU = "/sys/devices/system/cpu"
GPU = "/sys/bus/pci/devices/0000:65:00.0"
RED, YELLOW = 31, 33


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
    kernel.interrupts.request(address, number, action)
    kernel.tree.put(f"/proc/irq/{number}/effective_affinity_list", cpu)


def lines(kernel: Kernel, width: int = 100) -> list[str]:
    return [line for line, _ in render(arrange(kernel.machine(), rail0()), width)]


def test_queues_are_shown_at_their_cpu(kernel: Kernel) -> None:
    assert [line for line in lines(kernel) if line.startswith("      ")] == [
        f"      CPU 0: {NAME0} txrx-0, {NAME0} txrx-1",
        f"      CPU 1: {NAME1} txrx-0!",
        "      CPU 2",
        "      CPU 3",
    ]


def test_it_is_said_whether_the_kernel_or_names_tell_the_queues(kernel: Kernel) -> None:
    kernel.linked[PF0] = (QueueIrq(0, 0), QueueIrq(1, 1))
    told = [line.partition(" queues by ")[2] for line in lines(kernel) if "    NIC " in line]
    assert told == ["the kernel", "names"]


def test_the_load_of_a_core_is_compared_with_the_even_share_of_its_numa_node(kernel: Kernel) -> None:
    def loads() -> list[str]:
        return [load for line, load in render(arrange(kernel.machine()), 100) if "CPU " in line]

    assert loads() == ["even", "even", "none", "none"]
    for number in range(60, 64):
        arrives(kernel, PF0, number, f"{NAME0}-TxRx-{number}", "0")
    # Six and one: four would be even.
    assert loads() == ["double", "even", "none", "none"]


def test_colours_show_load_and_misplaced_queues(kernel: Kernel) -> None:
    for number in range(60, 64):
        arrives(kernel, PF0, number, f"{NAME0}-TxRx-{number}", "0")
    painted = [line for line in topology.lines(arrange(kernel.machine()), 100) if "CPU " in click.unstyle(line)]
    colours = [re.match(r"\x1b\[(\d+)m", line) for line in painted if "cache" not in line]
    assert [colour and int(colour[1]) for colour in colours] == [YELLOW, RED, None, None]


def test_queues_that_do_not_fit_into_a_line_are_counted(kernel: Kernel) -> None:
    assert f"      CPU 0: {NAME0} txrx-0 and 1 more" in lines(kernel, width=40)


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        ("0x10de", "0x030200"),
        pytest.param("0x1002", "0x120000", id="cloudstack-11701"),
        pytest.param("0x1002", "0x038000", id="cloudstack-12957"),
        pytest.param("0x1002", "0x030000", id="mori-381"),
    ],
)
def test_a_gpu_and_a_device_without_a_node_are_shown(kernel: Kernel, vendor: str, kind: str) -> None:
    for file, text in (("vendor", vendor), ("device", "0x2330"), ("class", kind), ("numa_node", "-1")):
        kernel.tree.put(f"{GPU}/{file}", text)
    assert lines(kernel)[-2:] == ["no NUMA node", "    GPU 0000:65:00.0"]
    kernel.tree.link(f"{GPU}/driver", "../../../bus/pci/drivers/nvidia")
    assert lines(kernel)[-1] == "    GPU 0000:65:00.0 (nvidia)"
    assert arrange(kernel.machine())[-1].number == EVERYWHERE
