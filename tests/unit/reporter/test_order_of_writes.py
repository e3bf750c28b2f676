"""When a node is no longer ready, its taint is written before its condition, also after faults on the way to the API server."""

import random

import pytest
from attrs import evolve

from agent.reporter.kubernetes.backoff import LAST_URGENT_WAIT
from agent.reporter.kubernetes.node import read_node
from tests.unit.reporter.publication import UNREADY, Running, later, say, turn
from tests.unit.reporter.test_node import NO_CARRIER, REPORT, document


@pytest.fixture
def ready(running: Running) -> Running:
    """A reporter that has published Ready, and whose Node has no taint. Its connection is idle."""
    reporter, cluster, _ = running
    cluster.node = document(spec={})
    reporter.watch.node = read_node(cluster.node)
    turn(reporter, REPORT)
    assert reporter.acknowledged.now.ready
    cluster.writes.clear()
    return running


@pytest.mark.parametrize("seed", range(5))
def test_after_an_outage_the_taint_is_still_the_first(ready: Running, seed: int) -> None:
    random.seed(seed)
    reporter, cluster, clocks = ready
    say(reporter, UNREADY)
    cluster.busy = True
    for _ in range(8):
        clocks.goes_on(reporter.turn())
        say(reporter, UNREADY)  # the agent lives
    cluster.busy = False
    back = clocks.boot
    while not cluster.writes:
        later(reporter, clocks, 0.25)
    assert cluster.writes[:2] == ["n1", "status"]
    assert clocks.boot - back <= LAST_URGENT_WAIT + 0.25


def test_a_change_by_somebody_else_does_not_delay_the_taint(ready: Running) -> None:
    reporter, cluster, _ = ready
    cluster.conflicts.append("n1")
    turn(reporter, UNREADY)
    assert cluster.writes == ["n1"]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_the_condition_waits_only_for_a_taint_that_may_come(ready: Running, times: int) -> None:
    reporter, cluster, clocks = ready
    say(reporter, UNREADY)
    cluster.refusing = {"n1": 403, "status": 403}
    for _ in range(times):
        clocks.goes_on(reporter.turn())
    cluster.refusing.clear()
    clocks.goes_on(reporter.turn())
    assert [write for write in cluster.writes if write != "lease"] in ([], ["n1"], ["n1", "status"])
    cluster.refusing["n1"] = 403
    say(reporter, evolve(UNREADY, conditions=(evolve(NO_CARRIER, reason="Other"),)))
    for _ in range(3):
        clocks.goes_on(reporter.turn())
    assert "status" in cluster.writes
