"""The verdict on each NIC and VF: whose fault is whose."""

import errno
from typing import Any

import pytest

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import converge
from agent.hardware.functions import vf_addresses
from agent.report.records import Change, Disruption, NicVerdict
from agent.report.verdict import is_ready, passes_first
from agent.spec.node import from_mapping
from tests.sim.passes import nic
from tests.sim.readiness import Node
from tests.sim.refusing import refusing
from tests.sim.two_nics import PF0, PF1

REQUIRED = {"pcie_link": {"severity": "required"}}
WIDTH = f"/sys/bus/pci/devices/{PF0}/current_link_width"


@pytest.fixture
def node() -> Node:
    return with_nics({"vfs": {"count": 3}}, {"required": False, "vfs": {"count": 2}})


def with_nics(first: dict[str, object], second: dict[str, object]) -> Node:
    node = Node.with_two_nics()
    nics = [nic(name, pci, **more) for name, pci, more in (("rail0", PF0, first), ("rail1", PF1, second))]
    node.more = {"nics": nics}
    return node


def nics(node: Node) -> tuple[NicVerdict, NicVerdict]:
    assert node.last is not None
    first, second = node.last.nics
    return first, second


def test_each_nic_of_a_ready_node_is_ready_and_names_its_vfs(node: Node) -> None:
    node.look()
    first, second = nics(node)
    assert (first.name, first.pci, first.ready, first.required, first.certainty) == (
        "rail0",
        PF0,
        True,
        True,
        "certain",
    )
    assert first.vfs == tuple(vf_addresses(node.kernel.files, PF0).values())
    assert (first.ready_vfs, second.ready_vfs, second.required) == (3, 2, False)


def test_a_pf_without_carrier_takes_its_vfs_with_it_and_no_other_nic(node: Node) -> None:
    node.look()
    node.kernel.carriers.lose(PF0)
    assert not is_ready(node.look().values())
    first, second = nics(node)
    assert (first.ready, first.reason, first.message, first.ready_vfs) == (
        False,
        "NoCarrier",
        "enp33s0 has no carrier",
        0,
    )
    assert (second.ready, second.ready_vfs) == (True, 2)


def test_an_optional_nic_is_not_ready_on_a_node_that_is(node: Node) -> None:
    node.look()
    node.kernel.carriers.lose(PF1)
    assert is_ready(node.look().values())
    first, second = nics(node)
    assert (first.ready, second.ready, second.reason) == (True, False, "NoCarrier")


def test_a_fault_of_a_vf_is_that_vf_s_alone(node: Node) -> None:
    node.look()
    node.kernel.carriers.lose(vf_addresses(node.kernel.files, PF0)[1], slow=True)
    node.look()
    first, _ = nics(node)
    assert (first.ready, first.ready_vfs) == (True, 2)
    ((index, message),) = [(vf.index, vf.message) for vf in first.faulty_vfs]
    assert index == 1
    assert "enp33s0v1 has no carrier" in message


def test_what_cannot_be_changed_is_a_fault_of_its_function(node: Node) -> None:
    node.look()
    node.kernel.fault = refusing(errno.EINVAL, "mtu=4000")
    node.more = with_nics({"vfs": {"count": 3}}, {"vfs": {"count": 2}, "mtu": 4000}).more
    assert not is_ready(node.look().values())
    first, second = nics(node)
    assert first.ready
    assert (second.ready, second.reason) == (False, "Failed")
    assert f"links {PF1} mtu" in second.message


def test_a_nic_that_is_not_there_has_no_address(node: Node) -> None:
    node.look()
    node.kernel.remove_nic(PF1)
    assert is_ready(node.look().values())
    second = nics(node)[1]
    assert (second.name, second.pci, second.ready, second.reason, second.vfs) == ("rail1", "", False, "NicMissing", ())


def test_without_an_answer_nothing_is_known_of_any_nic(node: Node) -> None:
    node.begin(probes=REQUIRED)
    assert {(nic.ready, nic.reason, nic.certainty) for nic in nics(node)} == {(False, "NotYetRead", "unknown")}
    node.until("PcieLink", "FullWidthAndSpeed")
    assert all(nic.ready for nic in nics(node))


def test_what_is_certain_stands_before_what_is_unknown(node: Node) -> None:
    required = {**REQUIRED, "queue_interrupts": {"severity": "required"}}
    node.look(probes=required)
    node.kernel.tree.put(WIDTH, "")
    node.kernel.unreadable.add(WIDTH)
    node.kernel.interrupts.free(PF0)
    node.kernel.interrupts.request_all(PF0, ["mana_intr"] * 3)
    node.now += 60
    node.look(probes=required)
    first, second = nics(node)
    assert (first.reason, first.certainty) == ("NotRecognised", "certain")
    assert (second.reason, second.certainty) == ("ProbeFailed", "unknown")


def test_a_check_that_only_warns_or_is_silenced_leaves_a_nic_ready(node: Node) -> None:
    node.kernel.tree.put(WIDTH, "8")
    node.look()
    assert nics(node)[0].ready
    node.look(probes=REQUIRED, silenced={"pcie_link": {"until": "2026-06-02", "reason": "known"}})
    assert nics(node)[0].ready
    conditions = node.look(probes=REQUIRED)
    assert [(nic.ready, nic.reason) for nic in nics(node)] == [(False, "PcieDegraded"), (True, "")]
    assert [fault.target for fault in conditions["PcieLink"].faults] == [PF0]


def test_a_failed_check_below_its_limit_is_no_fault_yet(node: Node) -> None:
    twice = {"pcie_link": {"severity": "required", "fail_after": 2, "of": 3}}
    node.look(probes=twice)
    node.kernel.tree.put(WIDTH, "8")
    node.now += 60
    node.look(probes=twice)
    assert nics(node)[0].ready
    node.now += 60
    node.look(probes=twice)
    assert not nics(node)[0].ready


def test_errors_are_counted_for_the_nic_that_has_them(node: Node) -> None:
    required = {"error_counters": {"severity": "required"}}
    counter = "/sys/class/net/enp65s0/statistics/rx_crc_errors"
    node.kernel.tree.put(counter, "7")
    node.look(probes=required)
    node.kernel.tree.put(counter, "9")
    node.now += 60
    node.look(probes=required)
    assert [(nic.ready, nic.message) for nic in nics(node)] == [(True, ""), (False, "enp65s0 rx_crc_errors +2")]


@pytest.mark.parametrize("needed", [{}, {"granularity": "device", "at_least": 2}], ids=["node", "device"])
def test_in_observe_mode_every_nic_is_ready_as_the_node_is(node: Node, needed: dict[str, Any]) -> None:
    both(node)
    node.look()
    node.more = {**node.more, "mode": "observe"}
    node.kernel.carriers.lose(PF0)
    conditions = node.look(**needed)
    assert is_ready(conditions.values())
    assert all(nic.ready for nic in nics(node))
    assert conditions["Carrier"].faults


# --- which NICs the node needs ---------------------------------------------------------------------------------------

ONE: dict[str, Any] = {"granularity": "device", "at_least": 1}


def both(node: Node) -> None:
    """Both NICs are required."""
    node.more = with_nics({"vfs": {"count": 3}}, {"vfs": {"count": 2}}).more


def test_with_enough_nics_the_node_is_ready_and_warns_of_the_others(node: Node) -> None:
    both(node)
    assert is_ready(node.look(**ONE).values())
    node.kernel.carriers.lose(PF0)
    conditions = node.look(**ONE)
    assert is_ready(conditions.values())
    assert (conditions["Carrier"].status, conditions["Carrier"].severity) == ("False", "warn")
    assert conditions["NicsReady"].message.startswith("1 of 2 NICs are ready, at least 1 must be: rail0")
    assert passes_first(conditions.values())
    assert not is_ready(node.look(granularity="device", at_least=2).values())
    node.kernel.carriers.lose(PF1)
    conditions = node.look(**ONE)
    assert (conditions["NicsReady"].status, conditions["NicsReady"].reason) == ("False", "TooFewReady")
    assert not passes_first(conditions.values())


@pytest.mark.parametrize(("these", "ready"), [(["rail0"], False), (["rail1"], True), (["rail0", "rail1"], False)])
def test_the_nics_that_the_node_needs_can_be_named(node: Node, these: list[str], ready: bool) -> None:
    both(node)
    node.look()
    node.kernel.carriers.lose(PF0)
    assert is_ready(node.look(granularity="device", these=these).values()) is ready


def test_a_nic_that_is_gone_or_cannot_be_changed_costs_no_more_than_itself(node: Node) -> None:
    both(node)
    node.look(**ONE)
    node.kernel.remove_nic(PF1)
    conditions = node.look(**ONE)
    assert is_ready(conditions.values())
    assert (conditions["NicsPresent"].status, conditions["NicsPresent"].severity) == ("False", "warn")
    node.kernel.fault = refusing(errno.EINVAL, "mtu=4000")
    node.more = with_nics({"vfs": {"count": 3}, "mtu": 4000}, {}).more
    conditions = node.look(**ONE)
    assert conditions["Converged"].severity == "warn"
    assert conditions["NicsReady"].status == "False"


def test_a_check_that_only_an_optional_nic_fails_stays_required(node: Node) -> None:
    node.look()
    node.kernel.carriers.lose(PF1)
    carrier = node.look(**ONE)["Carrier"]
    assert (carrier.status, carrier.severity, len(carrier.faults)) == ("True", "required", 1)


def test_a_fault_of_the_host_costs_the_node_ready_whatever_the_nics(node: Node) -> None:
    both(node)
    node.kernel.fault = refusing(errno.EINVAL, "swappiness")
    node.kernel.tree.put("/proc/sys/vm/swappiness", "60")
    node.more = {**node.more, "sysctls": {"vm.swappiness": "1"}}
    conditions = node.look(**ONE)
    assert (conditions["Converged"].status, conditions["Converged"].severity) == ("False", "required")
    assert all(nic.ready for nic in nics(node))


def test_a_repair_that_disturbs_nobody_is_announced_only_if_the_node_needs_the_nic(node: Node) -> None:
    both(node)
    node.more = with_nics({"txqueuelen": 2000, "mtu": 4000}, {"txqueuelen": 2000}).more
    node.look(**ONE)

    def announced(count: int, disruption: Disruption = Disruption.NONE, **judged: object) -> bool:
        for pf in (PF0, PF1)[:count]:
            index = node.kernel.netdev(pf).ifindex
            if disruption == Disruption.NONE:
                node.kernel.netlink.set_link(index, txqueuelen=500)
            else:
                node.kernel.netlink.set_link(index, mtu=1400)
        made: list[Change] = []
        spec = from_mapping({"node_name": "n1", **node.more, "readiness": judged})
        memory = Memory(lambda: node.now)
        result = converge(node.kernel.machine(), Goal(spec), memory, callbacks=Callbacks(announce=made.append))
        assert {outcome.change.disruption for outcome in result.outcomes} == {disruption}
        return bool(made)

    assert announced(1)
    assert not announced(2, **ONE)
    assert announced(1, Disruption.LINK_FLAP, **ONE), "nothing else tells the scheduler that the NIC is disturbed"
    assert announced(1, granularity="device", these=["rail0"])
    assert not announced(1, granularity="device", these=["rail1"])
