"""The reporter through outages of the API server and losses of its data, against a real one."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.report.names import READY_LABEL
from lab.cluster.control_plane import ControlPlane
from tests.cluster.reporter.conftest import Start
from tests.cluster.reporter.relay import Relay
from tests.cluster.reporter.reporters import Reporter, bring, node, prepare, until
from tests.cluster.reporter.test_publishing import FACT


def outage(plane: ControlPlane, reporter: Reporter, seconds: float) -> list[dict[str, Any]]:
    """The API server is killed; readiness changes five times; the writes after it came back. The agent lives all along."""

    def well_again() -> bool:
        reporter.beat()
        return reporter.published().generation >= last and not reporter.published().error

    mark = len(plane.audit())
    plane.kill_api_server()
    until(lambda: reporter.published().error, "the reporter says why nothing is published")
    for ready in (False, True, False, True, False):
        last = reporter.say(ready)
        threading.Event().wait(seconds / 5)
    assert "cannot be reached" in reporter.published().error
    plane.start_api_server()
    until(well_again, "all is well again", 120.0)
    return reporter.writes(mark)


def one_each(writes: list[dict[str, Any]]) -> None:
    """A patch for each subresource, and no intermediate value in any."""
    # An API server that starts refuses every write until it has read its policies. Refused writes were tried again. So was one
    # whose answer was lost, and one that the first list of Nodes does not have yet.
    done = [event for event in writes if event["responseStatus"]["code"] < 300]
    assert {event["objectRef"].get("subresource", "") for event in done} == {"", "status"}
    bodies = json.dumps([event.get("requestObject") for event in writes])
    assert '"False"' in bodies and "NoCarrier" in bodies and "AsSpecified" not in bodies


def test_after_an_outage_only_the_newest_state_is_written(plane: ControlPlane, start: Start) -> None:
    reporter = start("outage")
    reporter.acknowledged(reporter.say(True))
    writes = outage(plane, reporter, 5.0)
    one_each(writes)
    done = [event for event in writes if event["responseStatus"]["code"] < 300]
    assert done[0]["objectRef"].get("subresource", "") == "", "the taint is the first"
    assert reporter.is_tainted()


@pytest.mark.campaign
def test_after_an_outage_of_three_minutes_the_newest_state_is_written(plane: ControlPlane, start: Start) -> None:
    reporter = start("long-outage")
    reporter.acknowledged(reporter.say(True))
    one_each(outage(plane, reporter, 180.0))


def test_a_watch_on_a_dead_path_is_started_again(
    plane: ControlPlane, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.api.SILENCE", 3.0)
    relay = Relay(plane.ports.api)
    reporter = start("path", server=relay.start())
    reporter.opened()
    relay.swallow()
    # Only the watch can announce this, since the report does not change.
    plane.kubectl("label", "node", reporter.name, f"{READY_LABEL}-")
    until(lambda: READY_LABEL in reporter.node()["metadata"]["labels"], "the label is back")


@pytest.mark.parametrize("reset", [False, True])
def test_after_a_proxy_has_ended_idle_connections_the_taint_is_written_first_and_at_once(
    plane: ControlPlane, start: Start, reset: bool
) -> None:
    relay = Relay(plane.ports.api)
    reporter = start(f"proxied-{reset}".lower(), server=relay.start())
    for _ in range(2):
        reporter.opened()
        mark = len(plane.audit())
        relay.end(reset)
        reporter.acknowledged(reporter.say(False))
        assert [event["objectRef"].get("subresource", "") for event in reporter.writes(mark)] == ["", "status"]


def test_a_hanging_api_server_is_reported_and_tried_again(
    plane: ControlPlane, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.api.SILENCE", 3.0)
    monkeypatch.setattr("agent.reporter.kubernetes.api.TIMEOUT", 3.0)
    reporter = start("hangs")
    reporter.acknowledged(reporter.say(True))
    pid = plane.api_server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        # The stopped server's kernel still answers keepalives, and no data are due meanwhile.
        until(lambda: "does not answer in time" in reporter.published().error, "the reporter says so")
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not reporter.published().error, "all is well again", 90.0)
    reporter.acknowledged(reporter.say(False))


def test_a_node_that_was_created_anew_gets_everything_again_by_the_next_token(
    plane: ControlPlane, start: Start, tmp_path: Path
) -> None:
    reporter = start("anew", [FACT])
    reporter.acknowledged(reporter.say(True))
    plane.kubectl("delete", "node", reporter.name)
    until(lambda: "no Node" in reporter.published().error, "the reporter says that there is no Node")
    plane.apply(node(reporter.name))
    # The token has ended with the Node. The reporter looks for its Node again after a minute at most.
    until(lambda: "401" in reporter.published().error, "the reporter says that it is refused", deadline=90.0)
    assert not reporter.condition()
    bring(plane, reporter.name, tmp_path)
    # It tries again after a minute at most.
    until(lambda: reporter.condition().get("status") == "True", "the condition is back", deadline=150.0)
    until(lambda: READY_LABEL in reporter.node()["metadata"]["labels"], "the labels are back")
    assert reporter.node()["metadata"]["labels"][FACT["key"]] == "true"


@pytest.mark.campaign
def test_all_is_published_again_after_etcd_lost_everything(plane: ControlPlane, start: Start, tmp_path: Path) -> None:
    reporter = start("lost", [FACT])
    reporter.acknowledged(reporter.say(True))
    plane.empty()
    prepare(plane)
    plane.apply(node(reporter.name))
    bring(plane, reporter.name, tmp_path)
    until(lambda: reporter.condition().get("status") == "True", "the condition is back", 240.0)
    until(lambda: READY_LABEL in reporter.node()["metadata"]["labels"], "the labels are back")
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
