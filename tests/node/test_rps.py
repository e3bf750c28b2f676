"""Receive packet steering, by the queues' rps_cpus."""

from collections.abc import Iterator

import pytest

from agent.spec.ranges import format_ranges, parse_ranges
from tests.node.cpus import Cpus
from tests.node.evidence import Finding, Nic, Node, equal, judge

pytestmark = pytest.mark.rps


@pytest.fixture(scope="module")
def steering(node: Node) -> None:
    """For the checks of the NICs' netdevs; others are steered by patterns of their own."""
    if not node.spec.rps.enable:
        pytest.skip(f"{node.name}: its spec leaves receive packet steering alone")


def expected(cpus: Cpus, numa_node: int, queues: int, served_by: int) -> frozenset[int]:
    """None where each local CPU can have a queue; else the local CPUs near the one that takes the interrupt, without it."""
    local = cpus.local(numa_node)
    if queues >= len(local):
        return frozenset()
    others = local - {served_by}
    return others & cpus.sharing_cache(served_by) or others


@pytest.fixture(scope="module")
def masks(node: Node) -> dict[str, dict[int, frozenset[int]]]:
    """The CPUs of each receive queue, by netdev: hexadecimal, in groups of 32 bits."""
    masks: dict[str, dict[int, frozenset[int]]] = {}
    for line in node.run("grep -s . /sys/class/net/*/queues/rx-*/rps_cpus").splitlines():
        path, _, mask = line.partition(":")
        _, _, _, _, netdev, _, queue, _ = path.split("/")
        bits = int(mask.replace(",", ""), 16)
        steered = frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)
        masks.setdefault(netdev, {})[int(queue.removeprefix("rx-"))] = steered
    return masks


@pytest.mark.usefixtures("steering")
def test_each_queue_is_steered_as_its_interrupt_asks(
    node: Node, nics: tuple[Nic, ...], masks: dict[str, dict[int, frozenset[int]]]
) -> None:
    def findings() -> Iterator[Finding]:
        for nic in nics:
            for pci, netdev, label in nic.functions():
                # A netdev that is down has requested no interrupts.
                interrupts = [i for i in node.interrupts.get(pci, []) if i.queue is not None]
                served_by = {i.queue: parse_ranges(i.affinity) for i in interrupts}
                queues = masks.get(netdev, {})
                for queue, steered in sorted(queues.items()):
                    # An interrupt that is not pinned asks for no certain mask; test_irq judges that.
                    if node.spec.irqs.pin and len(cpus := served_by.get(queue, ())) == 1:
                        want = expected(node.cpus, nic.numa_node, len(queues), cpus[0])
                        mask = format_ranges(steered) or "none"
                        yield equal(label, f"rps_cpus of rx-{queue}", format_ranges(want) or "none", mask)

    judge(node, findings(), "no receive queue has a pinned interrupt")


@pytest.mark.usefixtures("steering")
def test_steering_stays_on_usable_cpus(
    node: Node, nics: tuple[Nic, ...], masks: dict[str, dict[int, frozenset[int]]]
) -> None:
    """Local ones that are neither isolated nor excluded, whatever serves the interrupt."""

    def findings() -> Iterator[Finding]:
        for nic in nics:
            local = node.cpus.local(nic.numa_node)
            for _, netdev, label in nic.functions():
                for queue, steered in sorted(masks.get(netdev, {}).items()):
                    mask = format_ranges(steered) or "none"
                    yield Finding(
                        label, f"rps_cpus of rx-{queue}", f"within {format_ranges(local)}", mask, steered <= local
                    )

    judge(node, findings(), "no netdev of its spec has a receive queue")


def test_netdevs_of_others_are_steered_by_the_first_pattern_that_matches(
    node: Node, masks: dict[str, dict[int, frozenset[int]]]
) -> None:
    def findings() -> Iterator[Finding]:
        own = {netdev for nic in (node.nics() if node.spec.nics else ()) for _, netdev, _ in nic.functions()}
        for netdev, queues in sorted(masks.items()):
            rule = next((rule for rule in node.spec.rps.netdevs if rule.matches(netdev)), None)
            if rule is None or netdev in own:
                continue
            named = frozenset(parse_ranges(rule.cpus or "")) & frozenset(node.cpus.core)
            given = named - node.cpus.owned or named
            usable = node.cpus.usable - node.cpus.owned
            want = given if rule.cpus else frozenset() if len(queues) >= len(usable) else usable
            for queue, steered in sorted(queues.items()):
                mask = format_ranges(steered) or "none"
                yield equal(netdev, f"rps_cpus of rx-{queue}", format_ranges(want) or "none", mask)

    judge(node, findings(), "no netdev matches a pattern of its spec's rps.netdevs")
