"""A cgroup that is a partition of cpusets, as its kernel shows it: no interrupt of a NIC stays on its CPU."""

import pytest

from agent.spec.ranges import parse_ranges
from lab import Node
from tests.lab.conftest import settled

GROUP = "/sys/fs/cgroup/of-a-test"
CPU = 1

pytestmark = pytest.mark.campaign


def affinities(node: Node) -> dict[str, str]:
    folders = " ".join(f"/sys/bus/pci/devices/{nic.pci}/msi_irqs" for nic in node.machine.nics)
    numbers = sorted(word for word in node.sh(f"ls {folders}").split() if word.isdigit())
    return {number: node.sh(f"cat /proc/irq/{number}/smp_affinity_list").strip() for number in numbers}


@pytest.mark.parametrize("kind", ["root", "isolated"])
def test_interrupts_leave_the_cpu_of_a_partition_and_come_back(node: Node, kind: str) -> None:
    settled(node)
    before = affinities(node)
    assert any(CPU in parse_ranges(cpus) for cpus in before.values())
    node.sh(f"echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control; mkdir {GROUP}; echo {CPU} > {GROUP}/cpuset.cpus")
    node.sh(f"echo {kind} > {GROUP}/cpuset.cpus.partition")
    assert node.sh(f"cat {GROUP}/cpuset.cpus.partition").strip() == kind
    node.sh("trackbed apply", timeout=300)
    assert not any(CPU in parse_ranges(cpus) for cpus in affinities(node).values())
    settled(node)
    node.sh(f"rmdir {GROUP}; trackbed apply", timeout=300)
    assert affinities(node) == before
