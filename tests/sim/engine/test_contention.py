"""Another program undoes a change again and again: the agent stops, names programs that may do it, and tries again later."""

import pytest

from agent.engine.contention import LIMIT, PAUSE, WINDOW, Contention
from agent.engine.converge import Pass
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.report.records import Outcome
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel
from tests.sim.passes import applied, condition, nic, settle, spec_of

PF = "0000:21:00.0"
SPEC = spec_of(nic("rail0", PF, mtu=9000, vfs={"count": 2}), irqs={"irqbalance": "untouched"})


class Node:
    """A machine with an agent, and a clock that the test sets."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.kernel.add_nic(PF, "enp33s0", "02:00:00:00:01:00")
        self.failures = Failures()
        self.now = 1000.0
        self.last = self.look()

    def look(self, spec: NodeSpec = SPEC) -> Pass:
        self.last = settle(self.kernel, spec, now=self.now, failures=self.failures)
        return self.last

    def mtu(self) -> int:
        return self.kernel.netdev(PF).mtu

    def another_program_sets_the_mtu(self) -> None:
        self.kernel.netlink.set_link(self.kernel.netdev(PF).ifindex, mtu=1500)

    def queue_irq(self) -> int:
        return next(
            int(number)
            for number in self.kernel.files.names(f"/sys/bus/pci/devices/{PF}/msi_irqs")
            if "TxRx" in self.kernel.files.read(f"/sys/kernel/irq/{number}/actions")
        )

    def move_irq(self) -> None:
        self.kernel.files.write(f"/proc/irq/{self.queue_irq()}/smp_affinity_list", "3")


@pytest.fixture
def node() -> Node:
    return Node()


def blocked(result: Pass) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.result == "blocked"]


def contend(node: Node, rounds: int = LIMIT, every: float = 10.0) -> Pass:
    # The first write of all does not count: it undid nothing.
    for _ in range(rounds):
        node.now += every
        node.another_program_sets_the_mtu()
        node.look()
    return node.last


def test_a_change_that_is_undone_too_often_is_left_alone_and_the_node_is_not_ready(node: Node) -> None:
    assert condition(node.last, "Uncontended").status == "True"
    result = contend(node)
    assert node.mtu() == 1500
    assert not is_ready(result.conditions)
    assert (condition(result, "Uncontended").status, condition(result, "Uncontended").reason) == ("False", "Contended")
    (outcome,) = blocked(result)
    assert [fault.target for fault in condition(result, "Uncontended").faults] == [outcome.change.target]
    assert outcome.change.field == "mtu"
    assert f"put back {LIMIT} times within 10 minutes" in outcome.error
    assert "it may be a driver, a script or a person" in condition(result, "Uncontended").message


@pytest.mark.parametrize(("rounds", "every"), [(LIMIT - 1, 10.0), (LIMIT * 3, WINDOW / (LIMIT - 1))])
def test_a_change_that_is_undone_less_often_than_the_limit_or_seldom_is_still_written(
    node: Node, rounds: int, every: float
) -> None:
    assert is_ready(contend(node, rounds, every).conditions)
    assert node.mtu() == 9000


def test_values_that_the_agent_itself_exchanges_are_not_contended(node: Node) -> None:
    nic = {"name": "rail0", "select": {"pci": PF}, "mtu": 8000, "vfs": {"count": 2}}
    other = spec_of(nic, irqs={"irqbalance": "untouched"})
    for _ in range(2 * LIMIT):
        node.now += 10.0
        assert is_ready(node.look(other).conditions)
        assert is_ready(node.look().conditions)
    assert node.mtu() == 9000


def test_the_values_that_the_kernel_resets_with_each_pod_are_not_contended(node: Node) -> None:
    kernel = node.kernel
    vf = vf_addresses(kernel.files, PF)[1]
    name = kernel.netdev(vf).name
    for _ in range(2 * LIMIT):
        node.now += 10.0
        actions = kernel.ethtool.actions(kernel.netdev(vf).ifindex)
        kernel.move_away(vf)
        kernel.interrupts.free(vf)
        kernel.interrupts.request_all(vf, actions)
        in_pod = node.look()
        assert applied(in_pod)
        assert {outcome.change.kind for outcome in in_pod.outcomes} == {"irqs"}
        assert is_ready(in_pod.conditions)
        kernel.come_back(vf, name)
        assert not kernel.netdev(vf).up
        assert is_ready(node.look().conditions)
        assert kernel.netdev(vf).up


def test_changes_that_nobody_undoes_are_still_written(node: Node) -> None:
    contend(node)
    node.kernel.files.write(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "0")
    result = node.look()
    assert node.kernel.files.read(f"/sys/bus/pci/devices/{PF}/sriov_numvfs") == "2"
    assert len(blocked(result)) == 1


def test_after_the_pause_one_write_is_tried_and_if_undone_the_next_pause_begins(node: Node) -> None:
    contend(node)
    node.now += PAUSE - 100
    node.look()
    assert node.mtu() == 1500
    node.now += 200
    assert is_ready(node.look().conditions)
    assert node.mtu() == 9000
    node.now += 10
    node.another_program_sets_the_mtu()
    assert condition(node.look(), "Uncontended").status == "False"
    assert node.mtu() == 1500


def test_after_forget_the_count_starts_at_zero(node: Node) -> None:
    contend(node)
    node.failures.forget()
    assert is_ready(node.look().conditions)
    assert node.mtu() == 9000


def test_contention_ends_when_the_value_is_as_wanted(node: Node) -> None:
    contend(node)
    node.kernel.netlink.set_link(node.kernel.netdev(PF).ifindex, mtu=9000)
    assert is_ready(node.look().conditions)
    node.now += 10
    node.another_program_sets_the_mtu()
    assert is_ready(node.look().conditions)


def test_an_interrupt_that_its_driver_puts_where_it_wants_it_is_left_there_and_the_node_is_ready(node: Node) -> None:
    """gve, ionic, sfc and others set the affinity whenever they request an interrupt, and show it in affinity_hint."""
    number = node.queue_irq()
    for _ in range(LIMIT + 1):
        node.now += 10
        node.kernel.interrupts.hint(number, 3)
        result = node.look()
    assert node.kernel.files.read(f"/proc/irq/{number}/smp_affinity_list") == "3"
    assert is_ready(result.conditions)
    (outcome,) = blocked(result)
    assert outcome.error.startswith(f"put back {LIMIT} times ") and "driver igb" in outcome.error
    assert condition(result, "Converged").reason == "OptionalDiffers"
    node.kernel.host.processes.add("irqbalance")
    node.failures.forget()
    for _ in range(LIMIT + 1):
        node.now += 10
        node.kernel.interrupts.hint(number, 3)
        result = node.look()
    assert "irqbalance runs" in condition(result, "Uncontended").message


def test_changes_that_follow_from_a_driver_reload_do_not_count(node: Node) -> None:
    """The driver is loaded again twice as often as the limit. Each time VFs are created and interrupts pinned again."""
    counted = set()
    for _ in range(LIMIT * 2):
        node.now += WINDOW / LIMIT
        node.kernel.reload_driver(PF)
        result = node.look()
        counted |= {outcome.change.kind for outcome in result.outcomes if outcome.result == "applied"}
        assert is_ready(result.conditions), result.conditions
    assert {"links", "vfs", "irqs"} <= counted


def test_interrupts_that_are_pinned_again_after_a_link_change_do_not_count(node: Node) -> None:
    for _ in range(LIMIT - 1):
        node.now += 10
        node.kernel.netlink.set_link(node.kernel.netdev(PF).ifindex, up=False)
        applied = [outcome.change.kind for outcome in node.look().outcomes]
        assert {"links", "irqs"} <= set(applied)
    node.now += 10
    node.move_irq()
    assert is_ready(node.look().conditions)


def test_a_vf_that_never_keeps_its_mac_is_bound_again_only_up_to_the_limit(node: Node) -> None:
    """Some drivers give each new netdev a random MAC when their PF does not answer."""
    vf = node.kernel.files.target(f"/sys/bus/pci/devices/{PF}/virtfn0").rpartition("/")[2]
    result, rebound = node.last, 0
    for number in range(LIMIT * 4):
        node.now += 10
        node.kernel.unbind(vf)
        node.kernel.netlink.set_vf(node.kernel.netdev(PF).ifindex, 0, mac=f"02:aa:00:00:00:{number:02x}")
        node.kernel.files.write("/sys/bus/pci/drivers_probe", vf)
        result = node.look()
        rebound += sum(o.result == "applied" and o.change.kind == "bindings" for o in result.outcomes)
    assert rebound <= LIMIT * 2
    assert condition(result, "Uncontended").status == "False"
    assert not is_ready(result.conditions)


def test_with_limit_0_a_change_is_always_written(node: Node) -> None:
    node.failures = Failures(contention=Contention(limit=0))
    assert is_ready(contend(node, LIMIT * 4).conditions)
