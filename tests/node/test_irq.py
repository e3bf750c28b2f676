"""Which CPU serves which queue, by /proc/interrupts and /proc/irq."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from agent.spec.ranges import format_ranges, parse_ranges
from tests.node.evidence import Finding, Interrupt, Nic, Node, judge, one_of

pytestmark = pytest.mark.irq

NO_QUEUES = "no netdev of its spec is up"

Served = tuple[Nic, str, Interrupt]


@pytest.fixture(scope="module", autouse=True)
def pinned(node: Node) -> None:
    if not node.spec.irqs.pin:
        pytest.skip(f"{node.name}: its spec does not pin interrupts")


@pytest.fixture(scope="module")
def interrupts(node: Node, nics: tuple[Nic, ...]) -> list[Served]:
    """Those of each netdev that is up, PFs and VFs, with the NIC and the label that messages name."""
    return [
        (nic, label, interrupt)
        for nic in nics
        for pci, netdev, label in nic.functions()
        if "UP" in node.links[netdev]["flags"]
        for interrupt in node.interrupts.get(pci, [])
    ]


def test_each_netdev_that_is_up_has_a_queue_interrupt(node: Node, nics: tuple[Nic, ...]) -> None:
    """Else the other checks of this group would look at nothing."""
    findings = [
        Finding(
            label,
            "queue interrupts",
            "some",
            ", ".join(i.name for i in interrupts) or "none",
            any(i.queue is not None for i in interrupts),
        )
        for nic in nics
        for pci, netdev, label in nic.functions()
        if "UP" in node.links[netdev]["flags"]
        for interrupts in [node.interrupts.get(pci, [])]
    ]
    judge(node, findings, NO_QUEUES)


def test_each_queue_is_pinned_to_one_local_cpu(node: Node, interrupts: list[Served]) -> None:
    """One of the NIC's NUMA node that is neither isolated nor excluded."""

    def findings() -> Iterator[Finding]:
        for nic, label, interrupt in interrupts:
            if interrupt.queue is not None:
                local = node.cpus.local(nic.numa_node)
                cpus = parse_ranges(interrupt.affinity)
                ok = len(cpus) == 1 and local.issuperset(cpus)
                yield Finding(label, f"CPU of {interrupt.name}", one_of(local), interrupt.affinity, ok)

    judge(node, findings(), NO_QUEUES)


def test_interrupts_arrive_where_they_are_pinned(node: Node, interrupts: list[Served]) -> None:
    """By effective_affinity_list.

    Some interrupt controllers move an interrupt only when it comes next: one that did not come for a while may lag.
    """

    def lags(interrupt: Interrupt) -> bool:
        return not set(parse_ranges(interrupt.effective)) <= set(parse_ranges(interrupt.affinity))

    before = [(label, i) for _, label, i in interrupts if i.queue is not None]
    now: dict[int, Interrupt] = {}
    if any(lags(i) for _, i in before):
        time.sleep(5)
        now = {i.number: i for of_function in node.read_interrupts().values() for i in of_function}

    def findings() -> Iterator[Finding]:
        for label, earlier in before:
            i = now.get(earlier.number, earlier)
            ok = not lags(i) or i.count == earlier.count
            yield Finding(label, f"effective CPU of {i.name}", i.affinity, i.effective, ok)

    judge(node, findings(), NO_QUEUES)


def test_other_interrupts_stay_on_usable_cpus(node: Node, interrupts: list[Served]) -> None:
    """Mailbox and event interrupts: any local CPU that is neither isolated nor excluded."""

    def findings() -> Iterator[Finding]:
        for nic, label, interrupt in interrupts:
            if interrupt.queue is None:
                local = node.cpus.local(nic.numa_node)
                ok = local.issuperset(parse_ranges(interrupt.affinity))
                yield Finding(
                    label, f"CPUs of {interrupt.name}", f"within {format_ranges(local)}", interrupt.affinity, ok
                )

    judge(node, findings(), "no function of its spec has an interrupt without a queue")


def test_queues_are_spread_evenly(node: Node, interrupts: list[Served]) -> None:
    """No core serves two queues more than another local one; a queue's receive and transmit interrupts are one queue."""
    queues: dict[tuple[str, int], tuple[Nic, str]] = {}
    for nic, label, interrupt in interrupts:
        cpus = parse_ranges(interrupt.affinity)
        if interrupt.queue is not None and len(cpus) == 1:
            queues.setdefault((label, interrupt.queue), (nic, node.cpus.core[cpus[0]]))
    load = Counter(core for _, core in queues.values())

    def findings() -> Iterator[Finding]:
        for (label, queue), (nic, core) in queues.items():
            least = min(load[node.cpus.core[cpu]] for cpu in node.cpus.local(nic.numa_node))
            what = f"queues on the core of queue {queue}"
            yield Finding(label, what, f"at most {least + 1}", load[core], load[core] <= least + 1)

    judge(node, findings(), NO_QUEUES)


def test_a_queue_keeps_to_one_cpu(node: Node, interrupts: list[Served]) -> None:
    """Its receive and transmit interrupts go to the same."""
    cpus: dict[tuple[str, int], set[str]] = {}
    for _, label, interrupt in interrupts:
        if interrupt.queue is not None:
            cpus.setdefault((label, interrupt.queue), set()).add(interrupt.affinity)
    findings = [
        Finding(label, f"CPUs of queue {queue}", "one", " and ".join(sorted(used)), len(used) == 1)
        for (label, queue), used in cpus.items()
    ]
    judge(node, findings, NO_QUEUES)
