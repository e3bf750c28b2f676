"""A cgroup that is a partition of cpusets, as its kernel shows it: NICs' interrupts leave its CPU at the kernel's event."""

import pytest

from agent.spec.ranges import parse_ranges
from lab import Node
from tests.lab.conftest import settled

GROUP = "/sys/fs/cgroup/of-a-test"
CPU = 1
WITHIN = 20
"""Seconds. Without the event, the agent reads everything again after a minute."""

pytestmark = pytest.mark.campaign


def affinities(node: Node) -> dict[str, str]:
    folders = " ".join(f"/sys/bus/pci/devices/{nic.pci}/msi_irqs" for nic in node.machine.nics)
    numbers = sorted(word for word in node.sh(f"ls {folders}").split() if word.isdigit())
    return {number: node.sh(f"cat /proc/irq/{number}/smp_affinity_list").strip() for number in numbers}


def moved(node: Node, make: str, condition: str) -> float:
    """Make a change, and wait for a condition on the node; the seconds that it took by the node's own clock."""
    clock = "cut -d' ' -f1 /proc/uptime"
    wait = f"timeout {WITHIN} sh -c 'until {condition}; do sleep 0.02; done'"
    began, ended = node.sh(f"{make}; {clock}; {wait}; {clock}").split()
    return float(ended) - float(began)


@pytest.mark.parametrize("kind", ["root", "isolated"])
def test_interrupts_leave_the_cpu_of_a_partition_and_come_back(
    node: Node, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settled(node)
    before = affinities(node)
    there = [number for number, cpus in before.items() if CPU in parse_ranges(cpus)]
    assert there
    files = " ".join(f"/proc/irq/{number}/smp_affinity_list" for number in there)
    node.sh(f"echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control; mkdir {GROUP}; echo {CPU} > {GROUP}/cpuset.cpus")
    left = moved(
        node, f"echo {kind} > {GROUP}/cpuset.cpus.partition", f"! cat {files} | grep --quiet --word-regexp {CPU}"
    )
    assert node.sh(f"cat {GROUP}/cpuset.cpus.partition").strip() == kind
    settled(node)
    assert not any(CPU in parse_ranges(cpus) for cpus in affinities(node).values())
    as_before = " ".join(before[number] for number in there)
    back = moved(node, f"rmdir {GROUP}", f'[ "$(echo $(cat {files}))" = "{as_before}" ]')
    settled(node)
    assert affinities(node) == before
    with capsys.disabled():
        print(f"\n{kind}: all interrupts have left the CPU after {left:.2f} s, and are back after {back:.2f} s")  # noqa: T201
