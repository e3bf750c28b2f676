"""The test of the fabric on real perftest and rxe, on three nodes: deploys/fabric.py, the report, and the nodes' condition."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fleet.fabric.journal import Journal, default_path
from lab import ALL_MACHINES, Node
from tests.lab.conftest import (
    DEPLOYED,
    ROOT,
    Done,
    booted,
    condition,
    deployed_once,
    eventually,
    inventory_data,
    pyinfra,
    succeeded,
    wait_ready,
)

pytestmark = pytest.mark.campaign

VFS = tuple(f"{nic.netdev}v0" for nic in ALL_MACHINES[0].nics)

# One test at a time, since all nodes share the host's CPUs. Small messages: at a slow rate, too, each must arrive before the
# connection counts it as lost. Each takes 12 s: an emulated CPU may stand still for seconds, which ruins a test of 5 s.
SETTINGS = {"seconds": 12, "size": 512, "grace": 60, "at_once": 1}
# Without ib_read_bw: an emulated link loses packets of its 30 queue pairs. Between the same two NICs, one test was 80 times as
# fast as another.
STEADY = {**SETTINGS, "tests": ["ib_write_bw", "ib_send_bw", "ib_write_lat"]}
ONE_TEST = {**SETTINGS, "tests": ["ib_write_bw"], "across_rails": False}
READ = {**ONE_TEST, "tests": ["ib_read_bw"]}
# The emulated links move some Mbit/s.
REDUCE = {**ONE_TEST, "tests": ["ib_write_bw", "all_reduce"], "collective_size": 4096}
MPI = "openmpi-bin python3-mpi4py"


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[tuple[Node, ...]]:
    """Three nodes, deployed, in a lab of their own: two show which rail is bad, and not which end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKBED_LAB", f"{os.environ['TRACKBED_LAB']}-3")
        with booted(3) as nodes:
            succeeded(deployed_once(nodes))
            yield nodes


@pytest.fixture
def addressed(three_nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes, with an address on the first VF of each NIC, so that its RDMA device has a GID with it."""
    for node in three_nodes:
        node.restore(DEPLOYED)
    for number, node in enumerate(three_nodes, 1):
        wait_ready(node)
        for rail, vf in enumerate(VFS):
            node.sh(f"ip link set {vf} up; ip address add 10.77.{rail}.{number}/24 dev {vf}")
    return three_nodes


def run_fabric(settings: dict[str, Any]) -> tuple[Done, list[dict[str, Any]]]:
    """Run the test, then the report."""
    given = inventory_data({"fabric": settings})
    done = pyinfra("-y", "--fail-percent", "100", "inventories/lab.py", "deploys/fabric.py", *given)
    words = [sys.executable, "-m", "cli", "fleet", "fabric", "report", "--json"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 2), done.stdout + done.stderr + ended.stderr
    return done, [json.loads(line) for line in ended.stdout.splitlines()]


def not_good(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["end"]: line["status"] for line in lines if line.get("status", "good") != "good"}


def test_a_good_fabric_is_proven_and_the_nodes_say_so(addressed: tuple[Node, ...]) -> None:
    done, lines = run_fabric(STEADY)
    succeeded(done)
    assert lines[-1]["proven"] is True, lines
    assert len([line for line in lines if "end" in line]) == 6
    for node in addressed:
        eventually("FabricProven", lambda n=node: condition(n, "FabricProven").get("status") == "True")  # type: ignore[misc]


def test_each_nic_is_read_from_by_30_queue_pairs(addressed: tuple[Node, ...]) -> None:
    run_fabric(READ)
    assert {result.server for result in Journal.read(default_path()).results if result.value} == {
        f"{node.name}/{nic.name}" for node in addressed for nic in node.machine.nics
    }


def test_a_slow_end_and_a_blocked_one_are_named_and_no_other(addressed: tuple[Node, ...]) -> None:
    # A tenth of the emulated link's rate. With a longer delay RDMA would count packets as lost.
    addressed[0].sh(f"tc qdisc add dev {VFS[0]} root netem rate 200kbit")
    addressed[2].sh(f"tc qdisc add dev {VFS[1]} root netem loss 100%")
    done, lines = run_fabric(ONE_TEST)
    assert done.returncode != 0
    assert not_good(lines) == {"node1/fab0": "bad", "node3/fab1": "bad"}


def test_a_node_that_loses_power_in_the_middle_is_named_and_no_other_is_blamed(addressed: tuple[Node, ...]) -> None:
    lost, results = addressed[2], default_path()
    results.unlink(missing_ok=True)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run_fabric, ONE_TEST)
        # A line for the run, then one for each result.
        eventually("the first result", lambda: results.exists() and len(results.read_text().splitlines()) > 1)
        lost.power_cut()
        done, lines = running.result()
    lost.boot()
    assert done.returncode != 0
    assert not_good(lines) == {"node3/fab0": "lost", "node3/fab1": "lost"}


def test_the_nics_of_each_rail_reduce_together_by_mpi(addressed: tuple[Node, ...]) -> None:
    with ThreadPoolExecutor() as pool:
        command = f"apt-get update -q && apt-get install -qy --no-install-recommends {MPI}"
        list(pool.map(lambda node: node.sh(command, timeout=1200), addressed))
    done, lines = run_fabric(REDUCE)
    succeeded(done)
    collectives = [line["collective"] for line in lines if "collective" in line]
    assert len(collectives) == len(VFS), lines
