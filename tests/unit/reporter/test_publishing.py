"""When the reporter publishes, and what it then writes: its Publication, without a cluster."""

import copy
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.report import published
from agent.report.names import READY, READY_LABEL, UP_TO_DATE
from agent.report.records import Condition, report_to_json
from agent.report.verdict import STALE, Verdict, judge
from agent.reporter.kubernetes.backoff import LAST_WAIT
from agent.reporter.kubernetes.calm import LASTING, LOSSES
from agent.reporter.kubernetes.lease import LEASE_EVERY
from agent.reporter.kubernetes.node import read_node
from agent.runtime import boot_id, uptime
from tests.unit.reporter.publication import UNREADY, Running, later, say, turn
from tests.unit.reporter.test_node import NO_CARRIER, OURS, REPORT, labelled, node

HOURS = 8 * 3600.0


def test_setting_the_clock_back_delays_neither_a_retry_nor_the_lease(running: Running) -> None:
    reporter, cluster, clocks = running
    say(reporter, REPORT)
    cluster.busy = True
    reporter.turn()
    assert "503" in reporter.acknowledged.now.error
    cluster.busy = False
    clocks.day -= HOURS
    later(reporter, clocks, LAST_WAIT)
    assert (reporter.acknowledged.now.error, cluster.writes.count("lease")) == ("", 1)
    clocks.day -= HOURS
    later(reporter, clocks, LEASE_EVERY[1])
    assert cluster.writes.count("lease") == 2


def test_a_renewal_sends_only_the_time_and_restores_what_somebody_has_changed(running: Running) -> None:
    reporter, cluster, clocks = running
    turn(reporter, REPORT)
    first = copy.deepcopy(cluster.lease)
    assert first is not None
    assert cluster.renewals == [first]

    def renew() -> list[Any]:
        cluster.renewals.clear()
        later(reporter, clocks, LEASE_EVERY[1])
        return cluster.renewals

    (patch,) = renew()
    assert [*patch, *patch["spec"]] == ["spec", "renewTime"]
    assert cluster.lease is not None
    cluster.lease["metadata"]["annotations"] = {}
    cluster.lease["spec"]["leaseDurationSeconds"] = 1
    assert len(renew()) == 2
    assert cluster.lease["metadata"] == first["metadata"]
    assert cluster.lease["spec"]["leaseDurationSeconds"] == first["spec"]["leaseDurationSeconds"]
    cluster.lease = None
    assert [made["metadata"] for made in renew()] == [first["metadata"]]


def test_an_outage_is_reported_without_writing_to_the_disk(running: Running) -> None:
    reporter, cluster, _ = running
    turn(reporter, REPORT)
    before = reporter.files.memory.stat().st_ino
    cluster.busy = True
    turn(reporter, UNREADY)
    assert "503" in reporter.files.acknowledgement.read_text()
    assert reporter.files.memory.stat().st_ino == before


def test_what_is_published_is_kept_once_the_disk_has_room_again(running: Running) -> None:
    reporter, *_ = running
    in_the_way = reporter.files.memory.with_name(".memory.new")
    in_the_way.mkdir()
    turn(reporter, REPORT)
    assert not reporter.files.memory.exists()
    in_the_way.rmdir()
    reporter.turn()
    assert published.read(reporter.files.memory) == published.read(reporter.files.acknowledgement)


def test_a_heartbeat_is_a_change_only_after_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "report"

    def heard(age: float, **more: Any) -> Verdict:
        beaten = evolve(REPORT, boot_id=boot_id(), uptime=uptime() - age, heartbeat=age, **more)
        path.write_text(report_to_json(beaten))
        return judge(path).without_heartbeat()

    assert heard(20.0) == heard(0.0)
    assert heard(2 * STALE) != heard(0.0)
    # Its age is another one each second: `trackbed status --watch` would print a line each time.
    assert heard(2 * STALE) == heard(3 * STALE)
    assert not heard(2 * STALE).ready
    assert heard(2 * STALE, ready=False, conditions=(NO_CARRIER,)) != heard(2 * STALE)
    assert heard(0.0, generation=2) != heard(0.0, generation=1)


def test_a_ready_that_comes_and_goes_is_published_only_after_it_has_lasted(running: Running) -> None:
    reporter, cluster, clocks = running
    checking = evolve(REPORT, ready=False, conditions=(Condition("Converged", "Unknown", "Checking", "it waits"),))
    published: list[bool] = []
    for generation in range(100):
        for report in (REPORT, checking):
            turn(reporter, evolve(report, generation=generation))
            published.append(reporter.acknowledged.now.ready)
            assert not (reporter.acknowledged.now.ready and not report.ready)
            # As the API server would send it.
            labels = {READY_LABEL: "true"} if reporter.acknowledged.now.ready else {}
            ready = ("True", "AsSpecified", "the node is as its spec says")
            waits = ("False", "Checking", "Converged is Unknown (Checking): it waits")
            said = [
                (READY, *(ready if reporter.acknowledged.now.ready else waits)),
                (UP_TO_DATE, "True", "SpecDone", ""),
            ]
            conditions = [dict(zip(("type", "status", "reason", "message"), each, strict=True)) for each in said]
            reporter.watch.node = read_node(labelled(labels, [OURS], conditions=conditions))
            clocks.goes_on(2.0)
    assert published == [True, False] * LOSSES + [False] * (200 - 2 * LOSSES)
    assert len([where for where in cluster.writes if where != "lease"]) < 20
    say(reporter, REPORT)
    left = reporter.turn()
    assert (reporter.acknowledged.now.ready, left) == (False, LASTING)
    assert "Ready was lost 3 times" in reporter.acknowledged.now.error
    later(reporter, clocks, left)
    assert (reporter.acknowledged.now.ready, reporter.acknowledged.now.error) == (True, "")


def test_a_wrong_clock_does_not_keep_not_ready_from_being_published(running: Running) -> None:
    reporter, cluster, clocks = running
    for clocks.day in (-1e12, 1e15):
        cluster.writes.clear()
        reporter.watch.node = node()
        turn(reporter, UNREADY)
        assert (reporter.acknowledged.now.error, cluster.writes[:1]) == ("", ["status"])


def test_an_answer_that_is_no_node_is_reported_as_an_error(running: Running) -> None:
    reporter, cluster, _ = running
    cluster.node = {"kind": "Status"}
    turn(reporter, UNREADY)
    assert "something that is not a Node" in reporter.acknowledged.now.error


@pytest.mark.parametrize("metadata", [None, [], 5, {"annotations": []}, {"annotations": None}])
def test_an_answer_that_is_no_lease_is_reported_as_an_error(running: Running, metadata: Any) -> None:
    reporter, cluster, clocks = running
    turn(reporter, REPORT)
    assert cluster.lease is not None
    good, cluster.lease = cluster.lease, {"metadata": metadata}
    later(reporter, clocks, LEASE_EVERY[1])
    assert "something that is not a Lease" in reporter.acknowledged.now.error
    cluster.lease = good
    later(reporter, clocks, LAST_WAIT)
    assert reporter.acknowledged.now.error == ""
