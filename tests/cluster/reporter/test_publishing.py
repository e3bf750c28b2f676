"""What the reporter writes into its Node and its Lease, and with which credentials, against a real API server."""

import json
import time
from datetime import datetime, timezone

import pytest

from agent.report.names import READY_LABEL
from agent.runtime import boot_id
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import LEASES, patch_status
from tests.cluster.reporter.conftest import Start
from tests.cluster.reporter.reporters import until

RESOURCE = "rdma/hca_shared_devices_b"
FACT = {"key": "aliyun.accelerator/erdma", "value": "true", "role": "fact", "resource": None}
PLUGIN = {"key": "rdma", "value": "hca", "role": "plugin", "resource": RESOURCE}
BUSY = {"key": "example.net/busy", "effect": "NoSchedule"}


def give(plane: ControlPlane, name: str, **amounts: str) -> None:
    """Play the kubelet: resources become allocatable."""
    patch_status(plane, name, {"status": {"capacity": amounts, "allocatable": amounts}})


def test_a_nodes_first_day(plane: ControlPlane, start: Start) -> None:
    reporter = start("first-day", [FACT, PLUGIN], required_resources=(RESOURCE,))
    reporter.acknowledged(1)
    assert (reporter.condition()["status"], reporter.condition()["reason"]) == ("False", "NoCarrier")
    assert reporter.is_tainted()
    assert "rdma" not in reporter.node()["metadata"]["labels"]
    reporter.acknowledged(reporter.say(True))
    node = reporter.node()
    assert (reporter.condition()["status"], reporter.condition("TrackbedUpToDate")["status"]) == ("True", "True")
    assert {FACT["key"]: "true", "rdma": "hca", READY_LABEL: "true"}.items() <= node["metadata"]["labels"].items()
    assert reporter.is_tainted()
    give(plane, reporter.name, **{RESOURCE: "4"})
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    assert reporter.node()["spec"]["taints"] == [BUSY]
    written = [event["objectRef"].get("subresource", "") for event in reporter.writes()]
    assert written == ["", "status", "status", "", ""]


def test_after_a_boot_the_taint_stays_until_the_kubelet_has_reported(plane: ControlPlane, start: Start) -> None:
    reporter = start("booted", required_resources=(RESOURCE,))

    def kubelet_says(boot: str) -> None:
        patch_status(plane, reporter.name, {"status": {"nodeInfo": {"bootID": boot}}})

    # This first report sets the taint. Without the wait, the reporter may publish only the next one.
    reporter.acknowledged(1)
    give(plane, reporter.name, **{RESOURCE: "4"})
    kubelet_says("the boot before")
    reporter.acknowledged(reporter.say(True))
    assert reporter.node()["metadata"]["labels"][READY_LABEL] == "true"
    assert reporter.is_tainted()
    kubelet_says(boot_id())
    until(lambda: not reporter.is_tainted(), "the taint is lifted")


def test_after_a_kubelet_restart_the_taint_stays_until_it_has_reported(plane: ControlPlane, start: Start) -> None:
    reporter = start("restarted", required_resources=(RESOURCE,))

    def kubelet_speaks(at: float) -> None:
        stamp = datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": stamp}
        patch_status(plane, reporter.name, {"status": {"conditions": [ready]}}, how="strategic")

    # This first report sets the taint. Without the wait, the reporter may publish only the next one.
    reporter.acknowledged(1)
    now = time.time()
    give(plane, reporter.name, **{RESOURCE: "4"})
    kubelet_speaks(now - 60)
    reporter.acknowledged(reporter.say(True, kubelet=now - 10))
    assert reporter.node()["metadata"]["labels"][READY_LABEL] == "true"
    assert reporter.is_tainted()
    kubelet_speaks(now - 9)
    until(lambda: not reporter.is_tainted(), "the taint is lifted")


def test_losing_readiness_keeps_the_plugins_pod_and_taints(plane: ControlPlane, start: Start) -> None:
    reporter = start("loses", [PLUGIN])
    reporter.opened()
    mark = len(plane.audit())
    reporter.acknowledged(reporter.say(False))
    labels = reporter.node()["metadata"]["labels"]
    assert reporter.is_tainted() and labels["rdma"] == "hca" and READY_LABEL not in labels
    # What keeps pods away is written first.
    assert [event["objectRef"].get("subresource", "") for event in reporter.writes(mark)] == ["", "status"]


def test_the_plugin_is_restarted_when_its_devices_change(
    plane: ControlPlane, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.plugins.PLUGIN_PAUSE", 1.0)
    reporter = start("devices", [PLUGIN], required_resources=(RESOURCE,))
    give(plane, reporter.name, **{RESOURCE: "4"})
    reporter.acknowledged(reporter.say(True, devices="four"))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    assert reporter.node()["metadata"]["labels"]["rdma"] == "hca"
    # A change of these takes the node out of service.
    reporter.acknowledged(reporter.say(False, devices="four"))
    mark = len(plane.audit())
    reporter.acknowledged(reporter.say(True, devices="eight"))
    until(lambda: "rdma" not in reporter.node()["metadata"]["labels"], "the plugin's label goes")
    assert reporter.node()["metadata"]["labels"][READY_LABEL] == "true"
    give(plane, reporter.name, **{RESOURCE: "0"})
    until(lambda: reporter.node()["metadata"]["labels"].get("rdma") == "hca", "it comes back")
    # The old plugin's resource was allocatable until it had gone; pods that come by that are refused.
    assert reporter.is_tainted()
    assert "/spec/taints" not in json.dumps([event.get("requestObject") for event in reporter.writes(mark)])
    give(plane, reporter.name, **{RESOURCE: "8"})
    until(lambda: not reporter.is_tainted(), "the taint is lifted")


def test_a_label_returns_after_ten_minutes_if_its_resource_stays_allocatable(
    plane: ControlPlane, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.plugins.PLUGIN_PAUSE", 1.0)
    monkeypatch.setattr("agent.reporter.kubernetes.plugins.PLUGIN_LONGEST", 3.0)
    reporter = start("stays", [PLUGIN])
    give(plane, reporter.name, **{RESOURCE: "4"})
    reporter.acknowledged(reporter.say(True, devices="four"))
    reporter.acknowledged(reporter.say(True, devices="eight"))
    until(lambda: "rdma" not in reporter.node()["metadata"]["labels"], "the plugin's label goes")
    until(lambda: reporter.node()["metadata"]["labels"].get("rdma") == "hca", "it comes back")


# --- not ready, while others write the Node, too ----------------------------------------------------------------------


def test_the_lease_is_the_heartbeat_and_is_deleted_with_its_node(plane: ControlPlane, start: Start) -> None:
    reporter = start("lives")
    there = ("get", "lease", LEASES, "lives", "-o", "json")
    text = until(lambda: plane.try_kubectl(*there).stdout, "a Lease")
    lease = json.loads(text)
    assert lease["spec"]["leaseDurationSeconds"] == 900
    assert lease["spec"]["holderIdentity"] == reporter.name
    assert lease["metadata"]["annotations"]["trackbed.internal/spec-hash"] == "h1"
    renewed = datetime.fromisoformat(lease["spec"]["renewTime"].replace("Z", "+00:00"))
    assert abs((datetime.now(renewed.tzinfo) - renewed).total_seconds()) < 60
    plane.kubectl("delete", "node", reporter.name)
    until(lambda: plane.try_kubectl(*there).returncode, "the Lease is collected", 60.0)
