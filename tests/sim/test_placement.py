"""Where interrupts go when numbers and CPUs change, on the simulated kernel."""

import errno
import os

import pytest

from agent.converge import Failures, Pass, converge
from agent.nics import targets
from agent.preview import preview
from agent.spec import NodeSpec, from_mapping
from tests.sim.kernel import Kernel

PF0, PF1 = "0000:21:00.0", "0000:41:00.0"


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel(cpus=8)
    kernel.add_nic(PF0, "enp33s0", "02:00:00:00:01:00", node=0)
    kernel.add_nic(PF1, "enp65s0", "02:00:00:00:01:01", node=1)
    return kernel


def spec(count: int = 5) -> NodeSpec:
    nics = [{"name": f"rail{number}", "select": {"pci": pci}} for number, pci in enumerate((PF0, PF1))]
    return from_mapping({"node_name": "n1", "nics": [{**nic, "vfs": {"count": count}} for nic in nics]})


def settle(kernel: Kernel) -> Pass:
    return converge(kernel.machine(), spec(), None, None, Failures(), lambda: 0.0)


def affinities(kernel: Kernel) -> dict[tuple[str, str], str]:
    """By function and by what the driver calls the interrupt."""
    found = {}
    for pf in (PF0, PF1):
        for pci in targets(kernel, pf).values():
            for number in kernel.names(f"/sys/bus/pci/devices/{pci}/msi_irqs"):
                name = kernel.read(f"/sys/kernel/irq/{number}/actions")
                found[pci, name] = kernel.read(f"/proc/irq/{number}/smp_affinity_list")
    return found


def test_renumbered_interrupts_move_nothing(kernel: Kernel) -> None:
    settle(kernel)
    before = affinities(kernel)
    kernel.renumber_irqs()
    assert affinities(kernel) == before
    assert not preview(kernel.machine(), spec()).changes


def test_a_cpu_off_and_on_again_gets_its_interrupts_back(kernel: Kernel) -> None:
    settle(kernel)
    before = affinities(kernel)
    kernel.set_online("0-1,3-7")
    settle(kernel)
    meanwhile = affinities(kernel)
    assert "2" not in meanwhile.values()
    queues = {key for key, cpus in before.items() if "-" in key[1]}
    assert {key for key in queues if meanwhile[key] != before[key]} == {key for key in queues if before[key] == "2"}
    kernel.set_online("0-7")
    settle(kernel)
    assert affinities(kernel) == before


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EIO])
def test_an_interrupt_that_the_kernel_manages_is_unsupported_and_left_alone(kernel: Kernel, refusal: int) -> None:
    def fault(operation: str, where: str, value: str) -> OSError | None:
        return OSError(refusal, os.strerror(refusal), where) if where.startswith("/proc/irq") else None

    kernel.fault = fault
    failures = Failures()
    found = converge(kernel.machine(), spec(), None, None, failures, lambda: 0.0)
    refused = [outcome for outcome in found.outcomes if outcome.change.kind == "irqs"]
    assert {outcome.result for outcome in refused} == {"unsupported"}
    assert {outcome.error for outcome in refused} == {"the kernel manages this interrupt's affinity"}
    kernel.writes.clear()
    converge(kernel.machine(), spec(), found.have, None, failures, lambda: 100.0)
    assert kernel.writes == []
