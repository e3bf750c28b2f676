"""What the reporter keeps on its Node, against a real API server: through outages, beside others, after everything was lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from agent.report.names import READY_LABEL, TAINT
from agent.reporter.kubernetes import identity as identities
from agent.reporter.kubernetes.api import MERGE_PATCH, STRATEGIC_PATCH, Api, Refused
from agent.reporter.settings import Settings
from agent.runtime import boot_id
from lab.cluster.control_plane import ControlPlane
from tests.cluster.reporter.relay import Relay
from tests.cluster.reporter.reporters import (
    CLUSTER,
    Reporter,
    admit,
    by_certificate,
    by_token,
    holder,
    node,
    prepare,
    until,
)

RESOURCE = "rdma/hca_shared_devices_b"
FACT = {"key": "aliyun.accelerator/erdma", "value": "true", "role": "fact", "resource": None}
PLUGIN = {"key": "rdma", "value": "hca", "role": "plugin", "resource": RESOURCE}
OURS = {"key": TAINT, "effect": "NoSchedule"}
BUSY = {"key": "example.net/busy", "effect": "NoSchedule"}
Start = Callable[..., Reporter]


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    prepare(control_plane)
    return control_plane


@pytest.fixture
def start(plane: ControlPlane, tmp_path: Path) -> Iterator[Start]:
    """Start the reporter of a new Node."""

    def begin(
        name: str, labels: list[dict[str, Any]] | None = None, server: str | None = None, **more: Any
    ) -> Reporter:
        plane.apply(node(name))
        admit(plane, name)
        (tmp_path / "labels.json").write_text(json.dumps({"labels": labels or []}))
        settings = Settings(name, server or plane.url, str(plane.authority.pair.certificate), **more)
        return Reporter.start(plane, tmp_path, settings, by_certificate(plane, name))

    yield begin


def give(plane: ControlPlane, name: str, **amounts: str) -> None:
    """Play the kubelet: resources become allocatable."""
    body = {"status": {"capacity": amounts, "allocatable": amounts}}
    plane.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(body))


def test_a_nodes_first_day(plane: ControlPlane, start: Start) -> None:
    reporter = start("first-day", [FACT, PLUGIN], required_resources=(RESOURCE,))
    reporter.acknowledged(1)
    assert (reporter.condition()["status"], reporter.condition()["reason"]) == ("False", "NoCarrier")
    assert reporter.is_tainted()
    assert "rdma" not in reporter.node()["metadata"]["labels"]
    reporter.acknowledged(reporter.say(True))
    found = reporter.node()
    assert (reporter.condition()["status"], reporter.condition("TrackbedUpToDate")["status"]) == ("True", "True")
    assert {FACT["key"]: "true", "rdma": "hca", READY_LABEL: "true"}.items() <= found["metadata"]["labels"].items()
    assert reporter.is_tainted()
    give(plane, reporter.name, **{RESOURCE: "4"})
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    assert reporter.node()["spec"]["taints"] == [BUSY]
    assert [event["objectRef"].get("subresource", "") for event in reporter.writes()] == [
        "",
        "status",
        "status",
        "",
        "",
    ]


def test_after_a_boot_the_taint_stays_until_the_kubelet_has_reported(plane: ControlPlane, start: Start) -> None:
    reporter = start("booted", required_resources=(RESOURCE,))

    def kubelet_says(boot: str) -> None:
        body = json.dumps({"status": {"nodeInfo": {"bootID": boot}}})
        plane.kubectl("patch", "node", reporter.name, "--subresource=status", "--type=merge", "-p", body)

    give(plane, reporter.name, **{RESOURCE: "4"})
    kubelet_says("the boot before")
    reporter.acknowledged(reporter.say(True))
    assert reporter.node()["metadata"]["labels"][READY_LABEL] == "true"
    assert reporter.is_tainted()
    kubelet_says(boot_id())
    until(lambda: not reporter.is_tainted(), "the taint is lifted")


def test_after_a_restart_of_the_kubelet_the_taint_stays_until_it_has_reported(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("restarted", required_resources=(RESOURCE,))

    def kubelet_speaks(at: float) -> None:
        stamp = datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": stamp}
        body = json.dumps({"status": {"conditions": [ready]}})
        plane.kubectl("patch", "node", reporter.name, "--subresource=status", "--type=strategic", "-p", body)

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
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
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
    # To change them takes the node out of service.
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


def test_a_label_whose_plugin_stays_comes_back(
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


def test_what_others_write_at_the_same_time_survives(plane: ControlPlane, start: Start) -> None:
    reporter = start("busy")
    stop = threading.Event()

    def others() -> None:
        for turn in range(10):
            plane.kubectl("taint", "node", reporter.name, f"other-{turn % 3}=x:NoSchedule", "--overwrite")
            plane.kubectl("label", "node", reporter.name, f"example.net/turn-{turn}=x")
            body = {"status": {"conditions": [{"type": f"Other{turn}", "status": "True"}]}}
            plane.kubectl("patch", "node", reporter.name, "--subresource=status", "-p", json.dumps(body))
        stop.set()

    thread = threading.Thread(target=others)
    thread.start()
    ready = False
    while not stop.wait(0.02):
        ready = not ready
        reporter.say(ready)
    thread.join()
    # After so many changes Ready is held back for a minute.
    reporter.acknowledged(reporter.say(False))
    found = reporter.node()
    theirs = {BUSY["key"], "other-0", "other-1", "other-2"}
    assert {taint["key"] for taint in found["spec"]["taints"]} == {*theirs, OURS["key"]}
    assert {f"example.net/turn-{turn}" for turn in range(10)} <= found["metadata"]["labels"].keys()
    assert {f"Other{turn}" for turn in range(10)} <= {c["type"] for c in found["status"]["conditions"]}
    assert reporter.condition()["status"] == "False"


# --- not ready, whoever else writes the Node ----------------------------------------------------------------------


def applied(plane: ControlPlane, name: str, *options: str, **fields: Any) -> None:
    """Play a GitOps tool, which takes whatever it applies from its other owners."""
    document = {"apiVersion": "v1", "kind": "Node", **fields}
    document["metadata"] = {"name": name, **fields.get("metadata", {})}
    words = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller", *options)
    plane.kubectl("apply", *words, "--filename=-", stdin=json.dumps(document))


LIED = [{"type": "TrackbedReady", "status": "True", "reason": "Applied", "message": "as it is in git"}]
IN_STATUS = ("--subresource=status",)
GITOPS: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "taints": [((), {"spec": {"taints": [BUSY]}})],
    "our-taint-too": [((), {"spec": {"taints": [BUSY, OURS]}}), ((), {"spec": {"taints": [BUSY]}})],
    "no-taints": [((), {"spec": {"taints": []}})],
    "labels": [((), {"metadata": {"labels": {READY_LABEL: "true"}}})],
    "annotations": [((), {"metadata": {"annotations": {"example.net/note": "applied"}}})],
    "condition": [(IN_STATUS, {"status": {"conditions": LIED}})],
    "everything": [
        (
            (),
            {
                "metadata": {
                    "labels": {READY_LABEL: "true", "rdma": "hca"},
                    "annotations": {"example.net/note": "applied"},
                },
                "spec": {"taints": [BUSY]},
            },
        ),
        (IN_STATUS, {"status": {"conditions": LIED}}),
    ],
}


@pytest.mark.parametrize("manifests", GITOPS.values(), ids=GITOPS.keys())
def test_whatever_others_own_by_server_side_apply_a_node_that_is_not_ready_says_so(
    plane: ControlPlane, start: Start, manifests: list[tuple[tuple[str, ...], dict[str, Any]]], request: Any
) -> None:
    def says_so() -> bool:
        labels = reporter.node()["metadata"]["labels"]
        return reporter.is_tainted() and READY_LABEL not in labels and reporter.condition()["status"] == "False"

    reporter = start(f"gitops-{request.node.callspec.id}", [PLUGIN])
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    for options, fields in manifests:
        applied(plane, reporter.name, *options, **fields)
    reporter.acknowledged(reporter.say(False))
    assert says_so()
    # It applies the same again and again, and takes all back.
    for options, fields in manifests:
        applied(plane, reporter.name, *options, **fields)
    until(says_so, "it says so again")
    until(lambda: not reporter.published().error, "and nothing is in the way")


def forbid(plane: ControlPlane, name: str, resource: str, expression: str = "false") -> None:
    """Somebody else's admission policy: a node's reporter may not write this any more."""
    group = "admissionregistration.k8s.io/v1"
    called = f"theirs-{name}"
    policy = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": called},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["*"], "resources": [resource], "operations": ["UPDATE"]}
                ]
            },
            "matchConditions": [{"name": "it", "expression": f"request.userInfo.username == 'trackbed:node:{name}'"}],
            "validations": [{"expression": expression, "reason": "Forbidden"}],
        },
    }
    binding = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": called},
        "spec": {"policyName": called, "validationActions": ["Deny"]},
    }
    plane.apply(policy, binding)
    status = resource.partition("/")[2]
    api = Api(plane.url, by_certificate(plane, name).session)
    conditions = [{"type": "TrackbedUpToDate", "status": "Unknown", "reason": "Probe", "message": ""}]

    def refused() -> bool:
        path, body = f"/api/v1/nodes/{name}", {"metadata": {"labels": {READY_LABEL: str(time.monotonic_ns())}}}
        conditions[0]["message"] = str(time.monotonic_ns())
        try:
            if status:
                api.ask("PATCH", f"{path}/status", {}, {"status": {"conditions": conditions}}, STRATEGIC_PATCH)
            else:
                api.ask("PATCH", path, {}, body, MERGE_PATCH)
        except Refused as error:
            return called in str(error)
        return False

    until(refused, "their policy is in force")


def allow(plane: ControlPlane, name: str) -> None:
    plane.kubectl("delete", "validatingadmissionpolicybinding", f"theirs-{name}")
    plane.kubectl("delete", "validatingadmissionpolicy", f"theirs-{name}")


def fleet(plane: ControlPlane, *words: str) -> Any:
    """The answer of `trackbed fleet`; whatever its exit code."""
    command = [sys.executable, "-m", "agent", "fleet", *words, "--json", f"--kubeconfig={plane.admin}"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout)


def standing(plane: ControlPlane, name: str) -> Any:
    return next(one for one in fleet(plane, "status")["nodes"] if one["name"] == name)


def renewed(plane: ControlPlane, name: str) -> str:
    """When a Lease was last renewed."""
    return str(plane.get("lease", name, "--namespace=trackbed-system")["spec"]["renewTime"])


LEASE_KIND = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
ON_LEASE: dict[str, tuple[str, dict[str, Any]]] = {
    "its-time": ("patch", {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}),
    "its-duration": ("patch", {"spec": {"leaseDurationSeconds": 60}}),
    "its-notice": ("patch", {"metadata": {"annotations": {"trackbed.internal/not-ready": "somebody: says so"}}}),
    "its-labels-and-notice": (
        "patch",
        {
            "metadata": {
                "labels": {f"example.net/{number}": "x" for number in range(20)},
                "annotations": {"trackbed.internal/not-ready": "somebody: says so"},
            }
        },
    ),
    "its-spec-applied": ("apply", {"spec": {"holderIdentity": "owned-its-spec-applied", "leaseDurationSeconds": 60}}),
    "its-owners": ("patch", {"metadata": {"ownerReferences": []}}),
}


@pytest.mark.parametrize("what", ON_LEASE)
def test_whatever_others_have_written_in_its_lease_it_is_renewed(
    plane: ControlPlane, start: Start, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.lease.LEASE_EVERY", (0.5, 0.5))
    reporter = start(f"owned-{what}")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    how, body = ON_LEASE[what]
    place = ("--namespace=trackbed-system", "--field-manager=somebody")
    if how == "apply":
        document = {**LEASE_KIND, "metadata": {"name": reporter.name}, **body}
        plane.kubectl("apply", "--server-side", "--force-conflicts", *place, "--filename=-", stdin=json.dumps(document))
    else:
        plane.kubectl("patch", "lease", reporter.name, *place, "--type=merge", "-p", json.dumps(body))

    def restored() -> bool:
        found = plane.get("lease", reporter.name, "--namespace=trackbed-system")
        return found["spec"]["leaseDurationSeconds"] == 900 and bool(found["metadata"].get("ownerReferences"))

    until(restored, "it is as the reporter writes it")
    until(lambda: not notice(plane, reporter.name), "it says nothing else")
    before = renewed(plane, reporter.name)
    until(lambda: renewed(plane, reporter.name) > before, "and it is renewed")
    assert reporter.published().error == ""


def test_of_two_conditions_of_its_type_one_is_left(plane: ControlPlane, start: Start) -> None:
    """Whoever may write a Node may write two with a JSON patch, and who reads the other one is told something else."""

    def said() -> list[str]:
        found = reporter.node()["status"]["conditions"]
        return [one["status"] for one in found if one["type"] == "TrackbedReady"]

    reporter = start("doubled")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    lie = {"type": "TrackbedReady", "status": "True", "reason": "Doubled", "message": ""}
    for path in ("/status/conditions/-", "/status/conditions/0"):
        body = json.dumps([{"op": "add", "path": path, "value": lie}])
        plane.kubectl("patch", "node", reporter.name, "--subresource=status", "--type=json", "-p", body)
        until(lambda: said() == ["True"], "one is left")
    reporter.acknowledged(reporter.say(False))
    mark = len(plane.audit())
    plane.kubectl("patch", "node", reporter.name, "--subresource=status", "--type=json", "-p", body)
    until(lambda: said() == ["False"], "one is left, and it says so")
    plane.kubectl("label", "node", reporter.name, "example.net/after=x")
    until(lambda: reporter.published().error == "", "nothing is in the way")
    assert len(reporter.writes(mark)) <= 2


def test_a_taint_of_our_key_with_a_value_is_left_alone_and_nothing_is_in_the_way(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("valued")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    valued = {**OURS, "value": "by-somebody"}
    applied(plane, reporter.name, spec={"taints": [BUSY, valued]})
    reporter.acknowledged(reporter.say(False))
    assert reporter.condition()["status"] == "False"
    assert reporter.node()["spec"]["taints"] == [BUSY, valued]
    assert reporter.published().error == ""


def notice(plane: ControlPlane, name: str) -> str:
    """What a Lease says of a node that cannot say it by its Node."""
    found = plane.get("lease", name, "--namespace=trackbed-system")
    return str(found["metadata"].get("annotations", {}).get("trackbed.internal/not-ready", ""))


def test_where_the_node_may_not_be_written_its_condition_and_lease_say_that_it_is_not_ready(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("forbidden-node")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    until(lambda: not reporter.published().error, "the Lease is there")
    forbid(plane, reporter.name, "nodes")
    reporter.say(False)
    until(lambda: reporter.condition()["status"] == "False", "the condition turns")
    until(lambda: notice(plane, reporter.name), "the Lease says so")
    assert "NoCarrier" in notice(plane, reporter.name)
    assert "theirs-forbidden-node" in reporter.published().error
    assert standing(plane, reporter.name)["ready"] == "False"
    assert reporter.name in fleet(plane, "sweep")["tainted"]
    assert reporter.is_tainted()
    allow(plane, reporter.name)
    reporter.publication.retry_now()
    until(lambda: not notice(plane, reporter.name), "the Lease has nothing more to say")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted again")


def test_where_the_condition_may_not_be_written_the_taint_comes_and_the_sweep_turns_the_condition(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("forbidden-status")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    forbid(plane, reporter.name, "nodes/status")
    reporter.say(False)
    until(reporter.is_tainted, "the taint comes")
    until(lambda: notice(plane, reporter.name), "the Lease says so")
    assert reporter.condition()["status"] == "True"
    assert (standing(plane, reporter.name)["ready"], standing(plane, reporter.name)["condition"]) == ("False", "True")
    assert reporter.name in fleet(plane, "sweep")["tainted"]
    assert reporter.condition()["status"] == "False" and "NoCarrier" in reporter.condition()["message"]
    assert reporter.name not in fleet(plane, "sweep")["tainted"]


def test_where_a_label_may_not_be_taken_away_the_taint_comes_nevertheless(plane: ControlPlane, start: Start) -> None:
    reporter = start("forbidden-label")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    forbid(plane, reporter.name, "nodes", "object.metadata.labels == oldObject.metadata.labels")
    reporter.say(False)
    until(reporter.is_tainted, "the taint comes")
    until(lambda: reporter.condition()["status"] == "False", "the condition turns")
    assert READY_LABEL in reporter.node()["metadata"]["labels"]


def test_what_is_refused_to_a_ready_node_does_not_delay_its_loss_of_readiness(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("unlisted", [{"key": "example.net/unlisted", "value": "x", "role": "fact", "resource": None}])
    reporter.say(True)
    until(lambda: reporter.condition()["status"] == "True", "the condition turns")
    until(lambda: "a reporter changes the labels" in reporter.published().error, "the label is refused")
    reporter.publication.steps.not_before["ready"] += 3600.0
    reporter.acknowledged(reporter.say(False))
    assert (reporter.condition()["status"], reporter.published().error) == ("False", "")


def test_unreadable_labels_are_reported_and_do_not_delay_a_loss_of_readiness(plane: ControlPlane, start: Start) -> None:
    reporter = start("unreadable")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    reporter.publication.files.labels.write_text("{")
    reporter.acknowledged(reporter.say(False))
    assert reporter.is_tainted() and reporter.condition()["status"] == "False"
    assert "labels.json" in reporter.published().error


def test_a_label_that_is_no_longer_listed_can_be_taken_away(plane: ControlPlane, start: Start) -> None:
    listed = plane.get("configmap", "reporter", "--namespace=trackbed-system")["data"]["labels"]

    def list_labels(text: str) -> None:
        body = json.dumps({"data": {"labels": text}})
        plane.kubectl("patch", "configmap", "reporter", "--namespace=trackbed-system", "--type=merge", "-p", body)

    reporter = start("delisted", [FACT])
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    try:
        list_labels("example.net/other")
        api = Api(plane.url, by_certificate(plane, reporter.name).session)

        def in_force() -> bool:
            try:
                change = {"metadata": {"labels": {FACT["key"]: str(time.monotonic_ns())}}}
                api.ask("PATCH", f"/api/v1/nodes/{reporter.name}", {}, change, MERGE_PATCH)
            except Refused:
                return True
            return False

        until(in_force, "the list is in force")
        reporter.acknowledged(reporter.say(False))
        assert reporter.is_tainted() and READY_LABEL not in reporter.node()["metadata"]["labels"]
        assert api.ask("PATCH", f"/api/v1/nodes/{reporter.name}", {}, {"metadata": {"labels": {FACT["key"]: None}}},
                       MERGE_PATCH)  # fmt: skip
    finally:
        list_labels(listed)


def test_without_the_list_of_labels_only_labels_stay_unwritten_and_readiness_is_lost(
    plane: ControlPlane, start: Start
) -> None:
    def changed(labels: dict[str, str | None]) -> bool:
        try:
            api.ask("PATCH", f"/api/v1/nodes/{reporter.name}", {}, {"metadata": {"labels": labels}}, MERGE_PATCH)
        except Refused:
            return False
        return True

    reporter = start("no-list", [FACT])
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    api = Api(plane.url, by_certificate(plane, reporter.name).session)
    plane.kubectl("delete", "configmap", "reporter", "--namespace=trackbed-system")
    try:
        until(lambda: changed({"example.net/unlisted": str(time.monotonic_ns())}), "the list is gone")
        assert plane.try_kubectl("annotate", "node", reporter.name, "example.net/kubelet=x").returncode == 0
        assert plane.try_kubectl("label", "node", reporter.name, "example.net/theirs=x").returncode == 0
        assert not changed({"node-role.kubernetes.io/control-plane": ""})
        assert not changed({"kubernetes.io/hostname": "another"})
        reporter.acknowledged(reporter.say(False))
        assert reporter.is_tainted() and READY_LABEL not in reporter.node()["metadata"]["labels"]
    finally:
        plane.kubectl("apply", "-k", str(CLUSTER))
        until(lambda: not changed({"example.net/unlisted": str(time.monotonic_ns())}), "the list is there again")


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
    """One patch for each subresource, and no intermediate value in any."""
    # An API server that starts refuses every write until it has read its policies. Refused writes were tried again.
    done = [event for event in writes if event["responseStatus"]["code"] < 300]
    assert sorted(event["objectRef"].get("subresource", "") for event in done) == ["", "status"]
    said = json.dumps([event.get("requestObject") for event in writes])
    assert '"False"' in said and "NoCarrier" in said and "AsSpecified" not in said


def test_after_an_outage_only_the_newest_state_is_written(plane: ControlPlane, start: Start) -> None:
    reporter = start("outage")
    reporter.acknowledged(reporter.say(True))
    one_each(outage(plane, reporter, 5.0))
    assert reporter.is_tainted()


@pytest.mark.campaign
def test_after_three_minutes_without_an_api_server_only_the_newest_state_is_written(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("long-outage")
    reporter.acknowledged(reporter.say(True))
    one_each(outage(plane, reporter, 180.0))


def test_a_watch_on_a_dead_path_is_started_again(
    plane: ControlPlane, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.api.SILENCE", 3.0)
    relay = Relay(plane.ports.api)
    reporter = start("path", server=relay.start())
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
    relay.swallow()
    # Only the watch can announce this, since the report does not change.
    plane.kubectl("label", "node", reporter.name, f"{READY_LABEL}-")
    until(lambda: READY_LABEL in reporter.node()["metadata"]["labels"], "the label is back")


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


def test_a_node_that_was_created_anew_gets_everything_again(plane: ControlPlane, start: Start) -> None:
    reporter = start("anew", [FACT])
    reporter.acknowledged(reporter.say(True))
    plane.kubectl("delete", "node", reporter.name)
    until(lambda: "no Node" in reporter.published().error, "the reporter says that there is no Node")
    plane.apply(node(reporter.name))
    until(lambda: reporter.condition().get("status") == "True", "the condition is back")
    until(lambda: READY_LABEL in reporter.node()["metadata"]["labels"], "the labels are back")
    assert reporter.node()["metadata"]["labels"][FACT["key"]] == "true"


def test_the_lease_is_the_heartbeat_and_is_deleted_with_its_node(plane: ControlPlane, start: Start) -> None:
    reporter = start("lives")
    found = until(
        lambda: plane.try_kubectl("get", "lease", "-n", "trackbed-system", "lives", "-o", "json").stdout, "a Lease"
    )
    lease = json.loads(found)
    assert lease["spec"]["leaseDurationSeconds"] == 900
    assert lease["spec"]["holderIdentity"] == reporter.name
    assert lease["metadata"]["annotations"]["trackbed.internal/spec-hash"] == "h1"
    renewed = datetime.fromisoformat(lease["spec"]["renewTime"].replace("Z", "+00:00"))
    assert abs((datetime.now(renewed.tzinfo) - renewed).total_seconds()) < 60
    plane.kubectl("delete", "node", reporter.name)
    gone = lambda: plane.try_kubectl("get", "lease", "-n", "trackbed-system", "lives").returncode  # noqa: E731
    until(gone, "the Lease is collected", 60.0)


def test_a_bound_token_publishes_as_well(plane: ControlPlane, tmp_path: Path) -> None:
    plane.apply(node("by-token"))
    settings = Settings("by-token", plane.url, str(plane.authority.pair.certificate), identity="token")
    secret = tmp_path / "token"
    fixed = by_token(plane, "by-token")
    secret.write_text(str(fixed.known.token))
    reporter = Reporter.start(plane, tmp_path, settings, identities.identity(settings, tmp_path, secret))
    reporter.acknowledged(reporter.say(True))
    assert reporter.condition()["status"] == "True"


def test_a_refused_token_is_reported(plane: ControlPlane, tmp_path: Path) -> None:
    plane.apply(node("expired"))
    settings = Settings("expired", plane.url, str(plane.authority.pair.certificate), identity="token")
    (tmp_path / "token").write_text("not.a.token")
    reporter = Reporter.start(plane, tmp_path, settings, identities.identity(settings, tmp_path, tmp_path / "token"))
    until(lambda: "401" in reporter.published().error, "the reporter says that it is refused")


def test_a_node_asks_for_its_certificate_and_renews_it_before_it_ends(plane: ControlPlane, tmp_path: Path) -> None:
    plane.apply(node("enrols"))
    admit(plane, "enrols")
    settings = Settings("enrols", plane.url, str(plane.authority.pair.certificate), certificate_days=1)
    secret = tmp_path / "enrolment"
    secret.write_text(str(holder(plane, "enrolment").known.token))
    identity = identities.identity(settings, tmp_path, secret)
    reporter = Reporter.start(plane, tmp_path, settings, identity)
    until(lambda: "trackbed fleet approve" in reporter.published().error, "the reporter waits to be approved")
    first = approve(plane, "enrols")
    assert first["spec"]["username"] == "system:serviceaccount:trackbed-system:enrolment"
    reporter.publication.retry_now()
    reporter.acknowledged(reporter.say(True), 60.0)
    assert reporter.condition()["status"] == "True"
    before = (tmp_path / "reporter.pem").read_text()
    assert (tmp_path / "reporter.pem").stat().st_mode & 0o777 == 0o600
    # Two thirds of its life later, it asks by itself.
    secret.unlink()
    at = datetime.now().timestamp() + 17 * 3600
    identity.keep(at)
    second = approve(plane, "enrols")
    assert second["spec"]["username"] == "trackbed:node:enrols"
    until(
        lambda: identity.keep(at) < float("inf") and (tmp_path / "reporter.pem").read_text() != before, "the next one"
    )
    reporter.acknowledged(reporter.say(False))


def approve(plane: ControlPlane, name: str) -> dict[str, Any]:
    """Approve the request that waits for a node; the request."""

    def pending() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = plane.get("csr")["items"]
        return [i for i in items if i["metadata"]["name"].startswith(f"trackbed-{name}-") and not i["status"]]

    (found,) = until(pending, "a request for a certificate")
    plane.kubectl("certificate", "approve", found["metadata"]["name"])
    return found


@pytest.mark.campaign
def test_all_is_published_again_after_etcd_lost_everything(plane: ControlPlane, start: Start) -> None:
    reporter = start("lost", [FACT])
    reporter.acknowledged(reporter.say(True))
    plane.empty()
    prepare(plane)
    plane.apply(node(reporter.name))
    admit(plane, reporter.name)
    until(lambda: reporter.condition().get("status") == "True", "the condition is back", 120.0)
    until(lambda: READY_LABEL in reporter.node()["metadata"]["labels"], "the labels are back")
    until(lambda: not reporter.is_tainted(), "the taint is lifted")
