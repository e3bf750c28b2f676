"""Which queue an interrupt serves: what the kernel knows, and otherwise what the interrupt's name says."""

import pytest

from agent.hardware.interrupts import Irq, function_irqs
from agent.machine import QueueIrq
from agent.report.verdict import is_ready
from tests.sim.kernel import Kernel
from tests.sim.kinds.test_placement import ONE, cpus_of
from tests.sim.passes import condition, settle
from tests.sim.two_nics import PF0, two_nics


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics(cpus=8)
    settle(kernel, ONE)  # a netdev that comes up requests interrupts anew
    return kernel


def requested(kernel: Kernel, names: list[str], *queues: tuple[int | None, int | None] | None) -> tuple[Irq, ...]:
    """PF0's interrupts have these names, and its driver tells the kernel these queues of theirs (rx, tx)."""
    kernel.interrupts.free(PF0)
    kernel.interrupts.request_all(PF0, names)
    kernel.linked[PF0] = tuple(each and QueueIrq(*each) for each in queues)
    return function_irqs(kernel.machine(), PF0)


def test_interrupts_whose_names_say_nothing_are_placed_as_the_kernel_knows_them(kernel: Kernel) -> None:
    irqs = requested(kernel, ["acme"] * 4, None, (0, 0), (1, 1), (2, 2))
    assert [irq.name for irq in irqs] == ["management-0", "queue-0", "queue-1", "queue-2"]
    done = settle(kernel, ONE)
    assert is_ready(done.conditions)
    assert condition(done, "QueueInterrupts").reason == "Recognised"
    management, *queues = cpus_of(kernel)
    assert management == "0-3"
    assert len({*queues}) == 3, "each on a CPU of its own"


@pytest.mark.parametrize(
    ("names", "queues", "irqs"),
    [
        (["-TxRx-1", "-TxRx-0"], [(0, 0), (1, 1)], [("txrx-0", True), ("txrx-1", True)]),
        (
            ["", "-TxRx-0", "-TxRx-1"],
            [None, (0, 0), None],
            [("management-0", False), ("txrx-0", True), ("txrx-1", False)],
        ),
    ],
)
def test_the_kernel_is_right_and_where_it_knows_nothing_the_name(
    kernel: Kernel, names: list[str], queues: list[tuple[int, int] | None], irqs: list[tuple[str, bool]]
) -> None:
    found = requested(kernel, [f"enp33s0{name}" for name in names], *queues)
    assert [(irq.name, irq.linked) for irq in found] == irqs


def test_a_receive_and_a_transmit_interrupt_of_one_number_share_a_cpu(kernel: Kernel) -> None:
    irqs = requested(kernel, ["acme"] * 4, (0, None), (None, 0), (1, None), (None, 1))
    assert [irq.name for irq in irqs] == ["rx-0", "tx-0", "rx-1", "tx-1"]
    settle(kernel, ONE)
    first, second, third, fourth = cpus_of(kernel)
    assert (first, third) == (second, fourth)
    assert first != third


def test_a_netdev_in_another_namespace_has_the_queues_of_its_names(kernel: Kernel) -> None:
    names = ["enp33s0", "enp33s0-TxRx-0", "enp33s0-TxRx-1"]
    here = requested(kernel, names, None, (0, 0), (1, 1))
    kernel.move_away(PF0)
    assert [irq.name for irq in function_irqs(kernel.machine(), PF0)] == [irq.name for irq in here]
