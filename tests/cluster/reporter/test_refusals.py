"""A reporter whose writes are partly refused still publishes that its node is not ready, against a real API server."""

import time
from typing import Any

from agent.report.names import READY_LABEL
from agent.reporter.kubernetes.api import MERGE_PATCH, STRATEGIC_PATCH, Api, Refused
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import answer
from tests.cluster.objects import LEASES, manifest, patch
from tests.cluster.reporter.conftest import Start
from tests.cluster.reporter.reporters import CLUSTER, Reporter, by_token, notice, until
from tests.cluster.reporter.test_publishing import FACT

# The name of the Node of whoever writes, in a list; an empty one for a kubelet.
OF_NODE = "request.userInfo.?extra[?'authentication.kubernetes.io/node-name'].orValue([])"


def forbid(plane: ControlPlane, name: str, resource: str, expression: str = "false") -> None:
    """Somebody else's admission policy: a node's reporter may not write this any more."""
    kind, called = ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"), f"theirs-{name}"
    updates = {"apiGroups": [""], "apiVersions": ["*"], "resources": [resource], "operations": ["UPDATE"]}
    spec = {
        "matchConstraints": {"resourceRules": [updates]},
        "matchConditions": [{"name": "it", "expression": f"'{name}' in {OF_NODE}"}],
        "validations": [{"expression": expression, "reason": "Forbidden"}],
    }
    bound = {"policyName": called, "validationActions": ["Deny"]}
    plane.apply(manifest(*kind, called, spec=spec), manifest(kind[0], f"{kind[1]}Binding", called, spec=bound))
    status = resource.partition("/")[2]
    api = Api(plane.url, by_token(plane, name).session)
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


def standing(plane: ControlPlane, name: str) -> Any:
    return next(one for one in answer(plane, "status")["nodes"] if one["name"] == name)


def test_where_the_node_may_not_be_written_its_condition_and_lease_say_that_it_is_not_ready(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("forbidden-node")
    reporter.opened()
    until(lambda: not reporter.published().error, "the Lease is there")
    forbid(plane, reporter.name, "nodes")
    reporter.say(False)
    until(lambda: reporter.condition()["status"] == "False", "the condition turns")
    until(lambda: notice(plane, reporter.name), "the Lease says so")
    assert "NoCarrier" in notice(plane, reporter.name)
    assert "theirs-forbidden-node" in reporter.published().error
    assert standing(plane, reporter.name)["ready"] == "False"
    assert reporter.name in answer(plane, "sweep")["tainted"]
    assert reporter.is_tainted()
    allow(plane, reporter.name)
    until(lambda: not notice(plane, reporter.name), "the Lease has nothing more to say", deadline=90.0)
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the taint is lifted again")


def test_if_the_condition_may_not_be_written_the_node_is_tainted_and_the_sweep_sets_the_condition(
    plane: ControlPlane, start: Start
) -> None:
    reporter = start("forbidden-status")
    reporter.opened()
    forbid(plane, reporter.name, "nodes/status")
    reporter.say(False)
    until(reporter.is_tainted, "the taint comes")
    until(lambda: notice(plane, reporter.name), "the Lease says so")
    assert reporter.condition()["status"] == "True"
    assert (standing(plane, reporter.name)["ready"], standing(plane, reporter.name)["condition"]) == ("False", "True")
    assert reporter.name in answer(plane, "sweep")["tainted"]
    assert reporter.condition()["status"] == "False" and "NoCarrier" in reporter.condition()["message"]
    assert reporter.name not in answer(plane, "sweep")["tainted"]


def test_if_a_label_may_not_be_removed_the_node_is_tainted_nevertheless(plane: ControlPlane, start: Start) -> None:
    reporter = start("forbidden-label")
    reporter.opened()
    forbid(plane, reporter.name, "nodes", "object.metadata.labels == oldObject.metadata.labels")
    reporter.say(False)
    until(reporter.is_tainted, "the taint comes")
    until(lambda: reporter.condition()["status"] == "False", "the condition turns")
    assert READY_LABEL in reporter.node()["metadata"]["labels"]


def test_a_refusal_does_not_delay_a_loss_of_readiness(plane: ControlPlane, start: Start) -> None:
    reporter = start("unlisted", [{"key": "example.net/unlisted", "value": "x", "role": "fact", "resource": None}])
    reporter.say(True)
    until(lambda: reporter.condition().get("status") == "True", "the condition turns")
    until(lambda: "a reporter changes the labels" in reporter.published().error, "the label is refused")
    reporter.publication.steps.not_before["ready"] += 3600.0
    reporter.acknowledged(reporter.say(False))
    assert (reporter.condition()["status"], reporter.published().error) == ("False", "")


def test_unreadable_labels_are_reported_and_do_not_delay_a_loss_of_readiness(plane: ControlPlane, start: Start) -> None:
    reporter = start("unreadable")
    reporter.opened()
    reporter.publication.files.labels.write_text("{")
    reporter.acknowledged(reporter.say(False))
    assert reporter.is_tainted() and reporter.condition()["status"] == "False"
    assert "labels.json" in reporter.published().error


LABEL = str(FACT["key"])


def labelled(plane: ControlPlane, reporter: Reporter, labels: dict[str, str | None]) -> bool:
    """Whether the reporter's credentials may make this change of its Node's labels, which is then made."""
    api = Api(plane.url, by_token(plane, reporter.name).session)
    try:
        api.ask("PATCH", f"/api/v1/nodes/{reporter.name}", {}, {"metadata": {"labels": labels}}, MERGE_PATCH)
    except Refused:
        return False
    return True


def test_a_label_that_is_no_longer_listed_can_be_removed(plane: ControlPlane, start: Start) -> None:
    listed = plane.get("configmap", "reporter", LEASES)["data"]["labels"]

    def list_labels(text: str) -> None:
        patch(plane, "configmap", "reporter", {"data": {"labels": text}}, LEASES)

    reporter = start("delisted", [FACT])
    reporter.opened()
    try:
        list_labels("example.net/other")
        until(lambda: not labelled(plane, reporter, {LABEL: str(time.monotonic_ns())}), "the list is in force")
        reporter.acknowledged(reporter.say(False))
        assert reporter.is_tainted() and READY_LABEL not in reporter.node()["metadata"]["labels"]
        assert labelled(plane, reporter, {LABEL: None})
    finally:
        list_labels(listed)


def test_without_the_list_of_labels_only_labels_stay_unwritten(plane: ControlPlane, start: Start) -> None:
    def changed(labels: dict[str, str | None]) -> bool:
        return labelled(plane, reporter, labels)

    reporter = start("no-list", [FACT])
    reporter.opened()
    plane.kubectl("delete", "configmap", "reporter", LEASES)
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
