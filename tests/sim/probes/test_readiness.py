"""The probes over time: the conditions while probes are first read, fail now and then, hang, or are silenced."""

from datetime import date
from pathlib import Path

import pytest

from agent.engine.readiness import HANDOVER, SLACK
from agent.probes import DEADLINE, probes
from agent.report.verdict import is_ready
from tests.sim.passes import nic
from tests.sim.readiness import Node, writer
from tests.sim.two_nics import MAC1, NAME1, PF0, PF1

WIDTH = f"/sys/bus/pci/devices/{PF0}/current_link_width"


@pytest.fixture
def node() -> Node:
    return Node.with_two_nics()


REQUIRED = {"pcie_link": {"severity": "required"}}


def test_the_node_is_not_ready_before_a_required_probe_has_answered(node: Node) -> None:
    conditions = node.begin(probes=REQUIRED)
    assert (conditions["PcieLink"].status, conditions["PcieLink"].reason) == ("Unknown", "NotYetRead")
    assert not is_ready(conditions.values())
    assert is_ready(node.until("PcieLink", "FullWidthAndSpeed").values())


def test_a_reading_that_hangs_is_unknown_after_its_deadline_and_is_not_started_again(node: Node, fifo: Path) -> None:
    assert is_ready(node.look(probes=REQUIRED).values())
    node.kernel.pipes[WIDTH] = str(fifo)
    node.now += 60
    assert is_ready(node.begin(probes=REQUIRED).values()), "the last answer holds until the deadline"
    with writer(fifo) as end:
        node.now += 9
        assert is_ready(node.again().values())
        node.now += 1
        conditions = node.again()
        assert (conditions["PcieLink"].status, conditions["PcieLink"].reason) == ("Unknown", "ProbeTimedOut")
        assert not is_ready(conditions.values())
        assert conditions["Converged"].status == conditions["Carrier"].status == "True"
        for _ in range(3):
            node.now += 60
            node.begin(probes={"pcie_link": {"severity": "off"}})
            node.begin(probes=REQUIRED)
        assert node.kernel.piped == [WIDTH]
        del node.kernel.pipes[WIDTH]
        end.write("16")
    node.until("PcieLink", "NotYetRead")  # an answer that comes too late is not used
    assert is_ready(node.until("PcieLink", "FullWidthAndSpeed").values())


def test_a_reading_that_hangs_delays_neither_those_before_it_nor_those_after_it(node: Node, fifo: Path) -> None:
    stuck = "/sys/module/ib_core/srcversion"
    node.kernel.pipes[stuck] = str(fifo)
    node.begin()
    with writer(fifo):  # the readings before it have ended
        assert 0 < node.probes.timeout() <= HANDOVER
        node.now += HANDOVER
        assert node.probes.timeout() == 0
        conditions = node.again()
        assert (conditions["ClockSynchronised"].status, conditions["PcieLink"].reason) == ("True", "NotYetRead")
        conditions = node.until("PcieLink", "FullWidthAndSpeed")
        assert conditions["KernelModules"].reason == "NotYetRead"
        assert node.probes.timeout() == DEADLINE - HANDOVER
        node.now += node.probes.timeout()
        assert node.probes.timeout() == 0
        assert node.again()["KernelModules"].reason == "ProbeTimedOut"
        assert 50 < node.probes.timeout() <= 65, "nothing more to do before the others are due"


def test_the_spec_can_set_a_probes_deadline(node: Node, fifo: Path) -> None:
    node.kernel.pipes[WIDTH] = str(fifo)
    node.begin(probes={"pcie_link": {"deadline": 2}})
    with writer(fifo):
        node.now += 2
        assert node.again()["PcieLink"].reason == "ProbeTimedOut"


def test_a_failed_reading_is_unknown_and_tried_again_soon(node: Node) -> None:
    node.kernel.tree.put(WIDTH, "")
    node.kernel.unreadable.add(WIDTH)
    conditions = node.look(probes=REQUIRED)
    assert (conditions["PcieLink"].status, conditions["PcieLink"].reason) == ("Unknown", "ProbeFailed")
    assert WIDTH in conditions["PcieLink"].message
    node.kernel.unreadable.clear()
    node.now += 10
    assert node.look(probes=REQUIRED)["PcieLink"].status == "True"


def test_a_reading_that_keeps_failing_is_tried_less_often_up_to_the_probes_period(node: Node) -> None:
    alone = {probe.name: {"severity": "off"} for probe in probes() if probe.name != "pcie_link"}

    def wait() -> float:
        node.look(probes=alone)
        until_due = node.probes.timeout()
        node.now += until_due
        return until_due - SLACK

    node.kernel.tree.put(WIDTH, "")
    node.kernel.unreadable.add(WIDTH)
    assert [wait() for _ in range(5)] == [10, 20, 40, 60, 60]
    node.kernel.unreadable.clear()
    node.kernel.tree.put(WIDTH, "16")
    assert wait() == 60
    node.kernel.unreadable.add(WIDTH)
    assert wait() == 10


def test_a_reading_of_more_nics_is_used_and_one_of_fewer_is_not_unless_it_is_of_the_node(node: Node) -> None:
    """A node that waits for a slow answer would not be ready whenever a NIC that it need not have goes or comes."""
    node.look()
    node.kernel.remove_nic(PF1)
    conditions = node.begin()
    assert (conditions["PcieLink"].reason, conditions["ClockSynchronised"].reason) == (
        "FullWidthAndSpeed",
        "Synchronised",
    )
    node.kernel.add_nic(PF1, NAME1, MAC1)
    conditions = node.begin()
    assert (conditions["PcieLink"].reason, conditions["ClockSynchronised"].reason) == ("NotYetRead", "Synchronised")
    node.until("PcieLink", "FullWidthAndSpeed")


def test_a_new_spec_of_the_same_devices_uses_the_last_reading(node: Node) -> None:
    node.look(probes=REQUIRED)
    node.more = {"gpus": {"count": 1}}
    conditions = node.begin(probes=REQUIRED)
    assert conditions["PcieLink"].status == "True"
    assert conditions["GpusPresent"].reason == "DriverMissing"


def test_a_narrow_link_only_warns_unless_the_spec_requires_it(node: Node) -> None:
    node.kernel.tree.put(WIDTH, "8")
    conditions = node.look()
    assert (conditions["PcieLink"].status, conditions["PcieLink"].severity) == ("False", "warn")
    assert "rail0 (0000:21:00.0) has x8 at 32 GT/s of x16 at 32 GT/s" in conditions["PcieLink"].message
    assert is_ready(conditions.values())
    assert not is_ready(node.look(probes=REQUIRED).values())


def test_a_warning_of_a_probe_is_never_made_required(node: Node) -> None:
    node.more = {"nics": [nic("spare", "0000:99:00.0", required=False)]}
    conditions = node.look(probes={"nics": {"severity": "required"}})
    assert (conditions["NicsPresent"].status, conditions["NicsPresent"].severity) == ("False", "warn")
    assert is_ready(conditions.values())


def test_a_link_without_a_speed_is_not_judged(node: Node) -> None:
    node.kernel.tree.put(WIDTH.replace("width", "speed"), "Unknown")
    assert node.look()["PcieLink"].status == "True"


def test_a_probe_that_is_off_is_neither_read_nor_reported(node: Node, fifo: Path) -> None:
    node.kernel.pipes[WIDTH] = str(fifo)
    assert "PcieLink" not in node.look(probes={"pcie_link": {"severity": "off"}})


def test_a_condition_is_false_only_after_fail_after_failures_of_the_last_checks(node: Node) -> None:
    judged = {"probes": {"pcie_link": {"fail_after": 2, "of": 3}}}

    def check(width: str) -> str:
        node.kernel.tree.put(WIDTH, width)
        node.now += 60
        return node.look(**judged)["PcieLink"].status

    assert [check(width) for width in ("16", "8", "16", "8", "16", "16", "8", "8", "16", "16")] == [
        *("True", "True", "True", "False", "True", "True", "True", "False", "False", "True")
    ]


def test_a_first_failure_that_does_not_count_yet_is_unknown_also_after_an_event(node: Node) -> None:
    """An event between two readings does not count as a check."""
    node.kernel.tree.put(WIDTH, "8")
    for _ in range(2):
        degraded = node.look(probes={"pcie_link": {"fail_after": 2, "of": 2}})["PcieLink"]
        assert (degraded.status, degraded.reason) == ("Unknown", "PcieDegraded")
        assert "failed 1 of the last 2 checks" in degraded.message
        node.now += 1


def test_a_silenced_condition_only_warns_and_gives_the_reason_until_its_last_day(node: Node) -> None:
    node.kernel.host.processes.add("irqbalance")
    silenced = {"irqbalance": {"until": "2026-06-01", "reason": "it is being measured"}}
    conditions = node.look(silenced=silenced)
    assert (conditions["IrqbalancePolicy"].status, conditions["IrqbalancePolicy"].severity) == ("False", "warn")
    assert "silenced until 2026-06-01: it is being measured" in conditions["IrqbalancePolicy"].message
    assert is_ready(conditions.values())
    node.today = date(2026, 6, 2)
    conditions = node.look(silenced=silenced)
    assert "its silence ended on 2026-06-01" in conditions["IrqbalancePolicy"].message
    assert not is_ready(conditions.values())


def test_readings_run_together_with_the_resync_if_there_is_one(node: Node) -> None:
    node.look()
    assert 60 < node.probes.timeout() <= 65
    node.now += 57
    node.begin()
    assert node.probes.waiting(), "a pass just before the minute takes the reading with it"
