"""Somebody puts a value back again and again: we stop, say who it may be, and begin again later."""

import pytest

from agent.engine.contention import LIMIT, PAUSE, WINDOW, Contention, suspect
from agent.engine.converge import Pass, converge
from agent.engine.retry import Failures
from agent.report.records import Condition, Outcome, is_ready
from agent.spec.node import NodeSpec, from_mapping
from tests.sim.kernel import Kernel

PF = "0000:21:00.0"
SPEC = from_mapping(
    {
        "node_name": "n1",
        "nics": [{"name": "rail0", "select": {"pci": PF}, "mtu": 9000, "vfs": {"count": 2}}],
        "irqs": {"irqbalance": "untouched"},
    }
)


class Node:
    """A machine with an agent that lives through passes of a clock that the test turns."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.kernel.add_nic(PF, "enp33s0", "02:00:00:00:01:00")
        self.failures = Failures()
        self.now = 1000.0
        self.last = self.look()

    def look(self, spec: NodeSpec = SPEC) -> Pass:
        self.last = converge(self.kernel.machine(), spec, None, None, self.failures, lambda: self.now)
        return self.last

    def mtu(self) -> int:
        return self.kernel.netdev(PF).mtu

    def someone_sets_the_mtu(self) -> None:
        self.kernel.set_link(self.kernel.netdev(PF).ifindex, mtu=1500)

    def move_irq(self) -> None:
        number = next(
            number
            for number in self.kernel.names(f"/sys/bus/pci/devices/{PF}/msi_irqs")
            if "TxRx" in self.kernel.read(f"/sys/kernel/irq/{number}/actions")
        )
        self.kernel.write(f"/proc/irq/{number}/smp_affinity_list", "3")


@pytest.fixture
def node() -> Node:
    return Node()


def contended(found: Pass) -> Condition:
    return next(condition for condition in found.conditions if condition.type == "Uncontended")


def blocked(found: Pass) -> list[Outcome]:
    return [outcome for outcome in found.outcomes if outcome.result == "blocked"]


def fight(node: Node, rounds: int = LIMIT, every: float = 10.0) -> Pass:
    # The first write of all was the agent's own, not in answer to anybody.
    for _ in range(rounds):
        node.now += every
        node.someone_sets_the_mtu()
        node.look()
    return node.last


def test_a_value_that_is_put_back_again_and_again_is_left_alone_and_the_node_not_ready(node: Node) -> None:
    assert contended(node.last).status == "True"
    found = fight(node)
    assert node.mtu() == 1500
    assert not is_ready(found.conditions)
    assert (contended(found).status, contended(found).reason) == ("False", "Contended")
    (outcome,) = blocked(found)
    assert outcome.change.field == "mtu"
    assert f"put back {LIMIT} times within 10 minutes" in outcome.error


def test_one_time_fewer_and_it_is_still_put_right(node: Node) -> None:
    assert is_ready(fight(node, LIMIT - 1).conditions)
    assert node.mtu() == 9000


def test_seldom_is_no_fight(node: Node) -> None:
    assert is_ready(fight(node, LIMIT * 3, every=WINDOW / (LIMIT - 1)).conditions)


def test_everything_else_goes_on(node: Node) -> None:
    fight(node)
    node.kernel.write(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "0")
    found = node.look()
    assert node.kernel.read(f"/sys/bus/pci/devices/{PF}/sriov_numvfs") == "2"
    assert len(blocked(found)) == 1


def test_after_the_pause_it_is_tried_once_and_given_up_at_once_if_that_is_put_back(node: Node) -> None:
    fight(node)
    node.now += PAUSE - 100
    node.look()
    assert node.mtu() == 1500
    node.now += 200
    assert is_ready(node.look().conditions)
    assert node.mtu() == 9000
    node.now += 10
    node.someone_sets_the_mtu()
    assert contended(node.look()).status == "False"
    assert node.mtu() == 1500


def test_another_spec_or_a_person_s_word_begins_anew(node: Node) -> None:
    fight(node)
    node.failures.forget()
    assert is_ready(node.look().conditions)
    assert node.mtu() == 9000


def test_it_is_over_when_the_other_one_gives_in(node: Node) -> None:
    fight(node)
    node.kernel.set_link(node.kernel.netdev(PF).ifindex, mtu=9000)
    assert is_ready(node.look().conditions)
    node.now += 10
    node.someone_sets_the_mtu()
    assert is_ready(node.look().conditions)


def test_irqbalance_is_named_when_it_runs(node: Node) -> None:
    node.kernel.host.processes.add("irqbalance")
    # The first placing followed from the link's coming up, and does not count.
    for _ in range(LIMIT + 1):
        node.now += 10
        node.move_irq()
        node.look()
    assert "by irqbalance" in contended(node.last).message


def test_what_follows_from_a_device_that_is_made_anew_is_nobody_s_doing(node: Node) -> None:
    """Its driver is loaded again twice as often as a fight takes: VFs and interrupts are made and placed every time."""
    counted = set()
    for _ in range(LIMIT * 2):
        node.now += WINDOW / LIMIT
        node.kernel.reload_driver(PF)
        found = node.look()
        counted |= {outcome.change.kind for outcome in found.outcomes if outcome.result == "applied"}
        assert is_ready(found.conditions), found.conditions
    assert {"links", "vfs", "irqs"} <= counted


def test_interrupts_that_follow_from_a_link_do_not_count(node: Node) -> None:
    for _ in range(LIMIT - 1):
        node.now += 10
        node.kernel.set_link(node.kernel.netdev(PF).ifindex, up=False)
        applied = [outcome.change.kind for outcome in node.look().outcomes]
        assert {"links", "irqs"} <= set(applied)
    node.now += 10
    node.move_irq()
    assert is_ready(node.look().conditions)


def test_a_vf_that_never_keeps_its_mac_is_bound_anew_so_often_and_no_more(node: Node) -> None:
    """As a driver does that cannot hear its PF: with each netdev that is made comes another address."""
    vf = node.kernel.target(f"/sys/bus/pci/devices/{PF}/virtfn0").rpartition("/")[2]
    found, rebound = node.last, 0
    for number in range(LIMIT * 4):
        node.now += 10
        node.kernel.unbind(vf)
        node.kernel.set_vf(node.kernel.netdev(PF).ifindex, 0, mac=f"02:aa:00:00:00:{number:02x}")
        node.kernel.write("/sys/bus/pci/drivers_probe", vf)
        found = node.look()
        rebound += sum(o.result == "applied" and o.change.kind == "bindings" for o in found.outcomes)
    assert rebound <= LIMIT * 2
    assert contended(found).status == "False"
    assert not is_ready(found.conditions)


def test_a_limit_of_none_never_stops(node: Node) -> None:
    node.failures = Failures(contention=Contention(limit=0))
    assert is_ready(fight(node, LIMIT * 4).conditions)


@pytest.mark.parametrize(
    ("kind", "processes", "named"),
    [
        ("links", {"NetworkManager", "irqbalance"}, "NetworkManager"),
        ("irqs", {"irqbalance", "tuned"}, "irqbalance or tuned"),
        ("links", {"irqbalance"}, "a driver or a script"),
        ("unheard-of", set(), "a driver or a script"),
    ],
)
def test_suspects(kind: str, processes: set[str], named: str) -> None:
    assert named in suspect(kind, frozenset(processes))
