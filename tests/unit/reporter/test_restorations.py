"""The reporter and somebody who changes again and again what it writes, as another machine of the same name does."""

import pytest
from attrs import evolve

from agent.report.records import Report
from agent.reporter.kubernetes.backoff import LAST_WAIT
from agent.reporter.kubernetes.node import read_node
from agent.reporter.kubernetes.publish import Publication
from agent.reporter.kubernetes.restorations import AT_ONCE, FORGOTTEN
from tests.unit.reporter.publication import UNREADY, Cluster, Running, later, say
from tests.unit.reporter.test_node import NO_CARRIER, REPORT, document

OTHER = evolve(UNREADY, conditions=(evolve(NO_CARRIER, reason="NoCable"),))


@pytest.fixture
def running(running: Running) -> Running:
    # After each write the Node is as it was: without condition, label and taint.
    reporter, cluster, _ = running
    cluster.node = document(spec={})
    reporter.watch.node = read_node(cluster.node)
    return running


def written(reporter: Publication, cluster: Cluster, turns: int) -> list[str]:
    """The writes of the Node in so many turns; of a Lease, there may be more."""
    cluster.writes.clear()
    for _ in range(turns):
        reporter.turn()
    return sorted(what for what in cluster.writes if what != "lease")


@pytest.mark.parametrize("report", [REPORT, UNREADY], ids=["ready", "not ready"])
def test_what_others_change_is_written_at_most_once_a_minute(running: Running, report: Report) -> None:
    reporter, cluster, clocks = running
    say(reporter, report)
    assert written(reporter, cluster, 100) == ["n1"] * (1 + AT_ONCE) + ["status"] * (1 + AT_ONCE)
    assert "else changes the Node's conditions" in reporter.acknowledged.now.error
    # Only YAML and JSON have the managed fields: https://kubernetes.io/docs/reference/kubectl/generated/kubectl_get/
    assert "kubectl get node n1 -o yaml" in reporter.acknowledged.now.error
    for _ in range(10):
        later(reporter, clocks, LAST_WAIT)
    # By now the waits have grown to a minute.
    for _ in range(3):
        assert len(written(reporter, cluster, 100)) <= 2
        assert 0.0 < reporter.turn() <= LAST_WAIT
        clocks.goes_on(LAST_WAIT)
    # Whoever it was has ended, and it happens again much later.
    clocks.goes_on(FORGOTTEN + 1.0)
    assert written(reporter, cluster, 100) == ["n1"] * AT_ONCE + ["status"] * AT_ONCE


def test_another_state_of_the_node_is_written_at_once_all_the_same(running: Running) -> None:
    reporter, cluster, _ = running
    say(reporter, REPORT)
    written(reporter, cluster, 100)
    say(reporter, UNREADY)
    assert written(reporter, cluster, 1) == ["n1", "status"]
    written(reporter, cluster, 100)
    say(reporter, OTHER)
    assert written(reporter, cluster, 1) == ["status"]


def test_a_state_that_returns_is_written_at_once_although_the_one_between_needed_no_write(running: Running) -> None:
    """A sweep may have written that the node is not ready, in place of the reporter."""
    reporter, cluster, _ = running
    say(reporter, REPORT)
    written(reporter, cluster, 100)
    say(reporter, UNREADY)
    before, cluster.node = cluster.node, document()  # with the taint
    reporter.watch.node = read_node(cluster.node)
    assert written(reporter, cluster, 1) == ["status"]
    cluster.node = before
    reporter.watch.node = read_node(before)
    say(reporter, REPORT)
    assert written(reporter, cluster, 1) == ["n1", "status"]


def test_a_node_that_was_created_anew_is_written_at_once(running: Running) -> None:
    reporter, cluster, _ = running
    say(reporter, UNREADY)
    written(reporter, cluster, 100)
    cluster.node = document(metadata={"uid": "u2", "resourceVersion": "9"}, spec={})
    reporter.watch.node = read_node(cluster.node)
    assert written(reporter, cluster, 1) == ["n1", "status"]
