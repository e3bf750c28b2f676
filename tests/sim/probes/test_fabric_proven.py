"""The condition FabricProven on a simulated node: what a test of the fabric has shown, and what ends its validity."""

import time

import pytest

from agent.report.fabric import RESULTS_FILE, FabricResults, NicResult, identity, results_to_json
from agent.report.records import Condition
from tests.sim.passes import nic
from tests.sim.readiness import Node
from tests.sim.two_nics import PF0, PF1

DEVICE = "mlx5_0"


@pytest.fixture
def node() -> Node:
    made = Node.with_two_nics()
    tree = made.kernel.tree
    folder = f"/sys/bus/pci/devices/{PF0}/infiniband/{DEVICE}"
    tree.put(f"{folder}/node_guid", "0002:c903:0000:0001")
    for path, text in (
        ("node_guid", "0002:c903:0000:0001"),
        ("fw_ver", "28.39.1002"),
        ("node_type", "1: CA"),
        ("ports/1/link_layer", "Ethernet"),
        ("ports/1/rate", "400 Gb/sec (4X NDR)"),
        ("ports/1/state", "4: ACTIVE"),
    ):
        tree.put(f"/sys/class/infiniband/{DEVICE}/{path}", text)
    tree.put("/proc/sys/kernel/osrelease", "6.1.0-28-amd64")
    return made


def tested(node: Node, good: bool = True, days: float = 0.0) -> None:
    parts = ("igb", "6.1.0-28-amd64", "28.39.1002", "0002:c903:0000:0001", "Ethernet", "400 Gb/sec (4X NDR)")
    seen = NicResult("rail0", PF0, DEVICE, good, "" if good else "it sends nothing", identity(*parts))
    node.kernel.tree.put(RESULTS_FILE, results_to_json(FabricResults(time.time() - days * 86400, (seen,))))


def condition(node: Node) -> Condition:
    node.now += 120
    return node.look()["FabricProven"]


def test_without_a_test_there_is_no_condition(node: Node) -> None:
    assert "FabricProven" not in node.look()


def test_a_tested_nic_is_proven_and_the_age_is_said(node: Node) -> None:
    tested(node, days=3.5)
    proven = condition(node)
    assert (proven.status, proven.reason, proven.message) == ("True", "TestPassed", "tested 3 days ago: rail0")


def test_a_nic_with_rdma_that_was_not_tested_is_named(node: Node) -> None:
    nics = [nic(f"rail{n}", pf, rdma={}) for n, pf in enumerate((PF0, PF1))]
    node.more["nics"] = nics[:1]
    tested(node)
    assert condition(node).status == "True"
    node.more["nics"] = nics
    proven = condition(node)
    assert (proven.status, proven.reason, proven.message) == ("Unknown", "NotTested", "not tested: rail1")
    # Without RDMA there is nothing to test.
    node.more["nics"] = [nics[0], {**nics[1], "rdma": None}]
    assert condition(node).status == "True"


def test_a_nic_that_failed_is_named(node: Node) -> None:
    tested(node, good=False)
    proven = condition(node)
    assert (proven.status, proven.reason) == ("False", "TestFailed")
    assert f"rail0 ({PF0}): it sends nothing" in proven.message


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        (f"/sys/class/infiniband/{DEVICE}/fw_ver", "28.40.1000", "firmware was 28.39.1002, is 28.40.1000"),
        ("/proc/sys/kernel/osrelease", "6.1.0-29-amd64", "driver was igb 6.1.0-28-amd64, is igb 6.1.0-29-amd64"),
        (f"/sys/class/infiniband/{DEVICE}/ports/1/rate", "200 Gb/sec (4X HDR)", "port was "),
    ],
)
def test_a_test_of_another_firmware_driver_or_port_is_not_valid(node: Node, path: str, text: str, named: str) -> None:
    tested(node)
    assert condition(node).status == "True"
    node.kernel.tree.put(path, text)
    proven = condition(node)
    assert (proven.status, proven.reason) == ("Unknown", "ChangedSinceTest")
    assert named in proven.message


def test_a_result_that_cannot_be_read_proves_nothing(node: Node) -> None:
    node.kernel.tree.put(RESULTS_FILE, "{")
    assert (condition(node).status, condition(node).reason) == ("Unknown", "ResultUnreadable")
