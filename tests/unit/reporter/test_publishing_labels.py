"""What turns of the reporter do to a Node's labels and taint, and when a message may be written again."""

import json
from typing import Any

import pytest
from attrs import evolve

from agent.report.names import READY, READY_LABEL, UP_TO_DATE
from agent.report.records import Condition, Report, report_to_json
from agent.report.verdict import STALE, judge
from agent.reporter.kubernetes.node import read_node, ready_condition
from agent.reporter.kubernetes.node_writer import MESSAGE_EVERY
from agent.reporter.kubernetes.plugins import PLUGIN_PAUSE
from agent.reporter.kubernetes.publish import Publication
from agent.runtime import boot_id, uptime
from tests.unit.reporter.publication import UNREADY, Cluster, Running, later, say, turn
from tests.unit.reporter.test_node import NO_CARRIER, OURS, PLUGIN, REPORT, RESOURCE, labelled

WITH, WITHOUT = {PLUGIN.key: PLUGIN.value, READY_LABEL: "true"}, {READY_LABEL: "true"}
TAINT_GONE, PLUGIN_GONE = ("remove", "/spec/taints/0"), ("remove", f"/metadata/labels/{PLUGIN.key}")
PLUGIN_BACK = ("add", f"/metadata/labels/{PLUGIN.key}")


@pytest.fixture
def running(running: Running) -> Running:
    label = {"key": PLUGIN.key, "value": PLUGIN.value, "role": "plugin", "resource": RESOURCE}
    reporter, *_ = running
    reporter.files.labels.write_text(json.dumps({"labels": [label]}))
    return running


def said(reporter: Publication) -> list[dict[str, str]]:
    """The conditions of a Node that says what the report says."""
    ready = ready_condition(judge(reporter.files.report))
    contents = [(READY, ready.status, ready.reason, ready.message), (UP_TO_DATE, "True", "SpecDone", "")]
    return [dict(zip(("type", "status", "reason", "message"), each, strict=True)) for each in contents]


def changed(cluster: Cluster) -> list[tuple[str, str]]:
    """What the patches of the Node have changed since the last look."""
    patches, cluster.patches = cluster.patches, []
    return [
        (operation["op"], operation["path"])
        for patch in patches
        if isinstance(patch, list)
        for operation in patch
        if operation["op"] != "test"
    ]


def shows(
    reporter: Publication, cluster: Cluster, labels: dict[str, str], taints: list[Any] | None = None, **status: Any
) -> None:
    """The Node has these labels and this status from now on; unless there are others, its conditions are the report's."""
    cluster.node = labelled(labels, taints, **{"conditions": said(reporter), **status})
    reporter.watch.node = read_node(cluster.node)


@pytest.mark.parametrize("report", [REPORT, UNREADY], ids=["ready", "not ready"])
def test_a_plugins_label_is_away_for_a_while_after_its_devices_have_changed(running: Running, report: Report) -> None:
    reporter, cluster, clocks = running
    say(reporter, evolve(report, devices="four"))
    shows(reporter, cluster, WITH, [OURS], allocatable={RESOURCE: "4"})
    reporter.turn()
    assert PLUGIN_GONE not in changed(cluster)
    say(reporter, evolve(report, devices="eight"))
    assert reporter.turn() == PLUGIN_PAUSE
    gone = changed(cluster)
    assert PLUGIN_GONE in gone and TAINT_GONE not in gone
    clocks.goes_on(PLUGIN_PAUSE - 5.0)
    assert reporter.turn() == 5.0
    # Its pod is gone, and with it the resource.
    shows(reporter, cluster, {} if report is UNREADY else WITHOUT, [OURS], allocatable={RESOURCE: "0"})
    later(reporter, clocks, 5.0)
    assert (PLUGIN_BACK in changed(cluster)) is report.ready  # a node that is not ready gets no labels
    say(reporter, evolve(REPORT, devices="eight"))
    shows(reporter, cluster, WITHOUT, [OURS], allocatable={RESOURCE: "0"})
    reporter.turn()
    assert PLUGIN_BACK in changed(cluster)


def test_a_restart_of_the_reporter_does_not_set_the_plugins_label_too_early(running: Running) -> None:
    reporter, cluster, clocks = running

    def change(devices: str, labels: dict[str, str], allocatable: str) -> list[tuple[str, str]]:
        say(reporter, evolve(REPORT, devices=devices))
        shows(reporter, cluster, labels, [OURS], allocatable={RESOURCE: allocatable})
        reporter.turn()
        return changed(cluster)

    # Until the first plugin has started, other devices remove no label.
    for devices in ("none", "four"):
        assert PLUGIN_BACK in change(devices, {}, "0")
    change("four", WITH, "4")
    assert PLUGIN_GONE in change("eight", WITH, "4")
    # The reporter starts again.
    reporter.__attrs_post_init__()
    reporter.watch.known = True
    for seconds, allocatable, returns in ((2.0, "4", False), (PLUGIN_PAUSE, "4", False), (1.0, "0", True)):
        clocks.goes_on(seconds)
        assert (PLUGIN_BACK in change("eight", WITHOUT, allocatable)) is returns


@pytest.mark.parametrize(("boot", "starts_again"), [(None, True), ("the boot before", False)])
def test_after_a_boot_a_plugin_that_may_have_started_before_its_devices_starts_again(
    running: Running, boot: str | None, starts_again: bool
) -> None:
    """Without a gate the kubelet starts its pods at once, and the agent's first pass may make the VFs only after that."""
    reporter, cluster, clocks = running
    say(reporter, UNREADY)  # the first pass is not complete
    info = {"bootID": boot or boot_id()}
    shows(reporter, cluster, WITH, [OURS], allocatable={RESOURCE: "1"}, nodeInfo=info)
    reporter.turn()
    say(reporter, evolve(REPORT, devices="eight"))
    shows(reporter, cluster, WITH, [OURS], allocatable={RESOURCE: "1"}, nodeInfo=info)
    changed(cluster)
    reporter.turn()
    assert (PLUGIN_GONE in changed(cluster)) is starts_again
    clocks.goes_on(PLUGIN_PAUSE)
    shows(reporter, cluster, WITHOUT, [OURS], allocatable={RESOURCE: "0"}, nodeInfo=info)
    turn(reporter, evolve(REPORT, devices="eight"))
    assert PLUGIN_BACK in changed(cluster)


def test_a_report_that_is_out_of_date_removes_no_plugins_label(running: Running) -> None:
    reporter, cluster, _ = running
    say(reporter, evolve(REPORT, devices="four"))
    shows(reporter, cluster, WITH, [OURS], allocatable={RESOURCE: "4"})
    reporter.turn()
    changed(cluster)
    old = evolve(REPORT, devices="eight", boot_id=boot_id(), uptime=uptime() - STALE - 1)
    reporter.files.report.write_text(report_to_json(old))
    reporter.turn()
    assert changed(cluster) == [("remove", f"/metadata/labels/{READY_LABEL.replace('/', '~1')}")]


@pytest.mark.parametrize("ahead", [-10.0, 10.0], ids=["restarted", "the clock was set back since"])
def test_the_taint_stays_until_a_restarted_kubelet_has_reported(running: Running, ahead: float) -> None:
    reporter, cluster, clocks = running
    say(reporter, evolve(REPORT, kubelet=clocks.day + ahead))
    before = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2001-09-09T01:46:10Z"}
    after = {**before, "lastHeartbeatTime": "2001-09-09T01:46:39Z"}
    for heartbeat in (before, after):
        shows(reporter, cluster, WITH, [OURS], conditions=[*said(reporter), heartbeat], allocatable={RESOURCE: "4"})
        reporter.turn()
        assert (TAINT_GONE in changed(cluster)) is (heartbeat is after or ahead > 0)


def test_what_the_taint_of_a_ready_node_waits_for_is_said(running: Running) -> None:
    """Else nobody sees why a node that is ready gets no pods: its device plugin does not run, or offers another resource."""
    reporter, cluster, clocks = running

    def waits(taints: list[Any] | None, allocatable: str, **report: Any) -> str:
        clocks.goes_on(1.0)
        say(reporter, evolve(REPORT, **report))
        shows(reporter, cluster, WITH, taints, allocatable={RESOURCE: allocatable}, nodeInfo={"bootID": boot_id()})
        reporter.turn()
        return reporter.acknowledged.now.tainted_until

    assert waits([OURS], "0") == f"{RESOURCE} is allocatable"
    assert waits([OURS], "4") == ""
    # The scheduler sees that the resource is gone, so the taint does not come back.
    assert waits(None, "0") == ""
    shows(reporter, cluster, WITH, [OURS], allocatable={RESOURCE: "4"}, nodeInfo={"bootID": "the boot before"})
    reporter.turn()
    assert reporter.acknowledged.now.tainted_until == "the kubelet has reported in this boot"


WARNED = evolve(REPORT, conditions=(Condition("ClockSynchronised", "False", "NotSynchronised", severity="warn"),))
OTHER = evolve(UNREADY, conditions=(evolve(NO_CARRIER, message="no carrier on ens2f0; check the cable"),))


@pytest.mark.parametrize(("first", "second"), [(REPORT, WARNED), (UNREADY, OTHER)], ids=["ready", "not ready"])
def test_a_new_message_alone_is_written_at_most_once_a_minute(running: Running, first: Report, second: Report) -> None:
    reporter, cluster, clocks = running
    turn(reporter, first)
    labels, taints = (WITH, []) if first.ready else ({}, [OURS])
    shows(reporter, cluster, labels, taints, allocatable={RESOURCE: "4"})
    cluster.writes.clear()
    say(reporter, second)
    clocks.goes_on(MESSAGE_EVERY - 5.0)
    assert (reporter.turn(), cluster.writes) == (5.0, [])
    later(reporter, clocks, 5.0)
    assert cluster.writes == ["status"]


def test_conditions_that_the_node_already_has_are_not_written(running: Running) -> None:
    reporter, cluster, _ = running
    say(reporter, UNREADY)
    reporter.watch.node = read_node(labelled({}))
    # The answer to the taint's patch: another process has said the same in the meantime.
    cluster.node = labelled({}, [OURS], conditions=said(reporter))
    cluster.node["metadata"]["resourceVersion"] = "9"
    reporter.turn()
    assert cluster.writes == ["n1", "lease"]
