"""Public reports about taints, labels, drains and cordons, tried by their triggers on what is written to the Node."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from lightkube.models.core_v1 import NodeSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node

from agent.report import names
from agent.report.names import READY_LABEL
from agent.reporter.kubernetes.node import desired, node_patch, read_node
from fleet.inventory import Inventory
from fleet.maintenance_record import Record, annotated, finished
from tests.unit.fleet.nodes_api import status
from tests.unit.fleet.test_fleet import lease
from tests.unit.fleet.test_fleet import node as fleet_node
from tests.unit.fleet.test_maintenance import pod
from tests.unit.fleet.test_maintenance_requests import (
    EVICTION,
    GET,
    LEASES,
    NO_PODS,
    NODE,
    ONE_POD,
    PODS,
    UNUSED,
    Serve,
    recorded,
    serve,
    sweeps,
    swept,
)
from tests.unit.reporter.test_node import FACT, LABELS, NOT_READY, OURS, READY_NOW, RESOURCE, SETTINGS, THEIRS, labelled
from tests.unit.reporter.test_node import apply as patched

__all__ = ["serve"]


def after(verdict: Any, was: dict[str, Any], *labels: Any) -> dict[str, Any]:
    there = read_node(was)
    made = patched(node_patch(desired(verdict, SETTINGS, labels, there, away=False), there), was)
    assert made is not None
    return made


@pytest.mark.parametrize(
    "taints",
    [
        pytest.param([OURS], id="gardener-11656"),
        pytest.param([OURS, THEIRS], id="karpenter-1772"),
        pytest.param([THEIRS, OURS], id="neco-541"),
    ],
)
def test_a_taint_that_somebody_gives_a_ready_node_again_is_lifted_again(taints: list[Any]) -> None:
    """The kubelet does so whenever it starts, and an autoscaler may restore the taints of a new node."""
    was = labelled({READY_LABEL: "true"}, taints, allocatable={RESOURCE: "4"})
    assert after(READY_NOW, was)["spec"]["taints"] == [taint for taint in taints if taint is not OURS]


@pytest.mark.parametrize(
    "taints", [pytest.param(None, id="kubernetes-43992"), pytest.param([THEIRS], id="kubernetes-44758")]
)
def test_a_node_that_is_not_verified_is_tainted_however_it_registered(taints: list[Any] | None) -> None:
    assert after(NOT_READY, labelled({}, taints))["spec"]["taints"] == [*(taints or ()), OURS]


def test_a_label_of_a_feature_that_is_gone_is_removed() -> None:
    """node-feature-discovery 25."""
    was = labelled({FACT.key: "true", READY_LABEL: "true"})
    assert after(READY_NOW, was, *LABELS[1:])["metadata"]["labels"].keys() == {READY_LABEL, LABELS[1].key}


def node_of(record: Record) -> Node:
    notes = annotated(record)["metadata"]["annotations"]
    return Node(metadata=ObjectMeta(name="a", annotations=notes), spec=NodeSpec(unschedulable=True))


@pytest.mark.parametrize(
    ("cordoned", "spec"),
    [pytest.param(True, {"unschedulable": None}, id="kured-63"), pytest.param(False, None, id="draino-91")],
)
def test_a_maintenance_uncordons_a_node_only_if_it_cordoned_it(cordoned: bool, spec: Any) -> None:
    body, _ = finished(node_of(Record("me", "2026", "wait", cordoned, "rebind")))
    assert body is not None
    assert body.get("spec") == spec
    assert body["metadata"]["annotations"] == {names.MAINTENANCE: None}


@pytest.mark.parametrize("ready", ["True", "False"])
def test_a_change_that_a_pod_of_a_daemon_set_forbids_does_not_keep_a_ready_node_cordoned(
    serve: Serve, tmp_path: Path, ready: str
) -> None:
    """sriov-network-operator 840: a drain leaves such a pod, and an evicted one would be there again at once."""
    why = "vfs 0000:3b:00.0 count: 4 -> 8: it would disturb ml/capture (0000:3b:00.0#1)"
    refused = {"trackbed apply": {"success": False, "stderr": why}}
    data = {"node_name": "a", "fake_delay": 0, "fake_delay_jitter": 0, "fake_responses": refused}
    (tmp_path / "fleet.py").write_text(f"hosts = {[('@fake/a', data)]!r}")
    code, begun = recorded("drain")
    states = {"Ready": "True", names.READY: ready, names.UP_TO_DATE: "False"}
    conditions = [{"type": name, "status": status} for name, status in states.items()]
    unused = {"metadata": {"name": "a", "resourceVersion": "7"}}
    pods = {"items": [pod("capture", owner="DaemonSet").to_dict()]}
    script, maintenance = serve(
        {
            PODS: [(200, pods)],
            f"GET {NODE}": [(200, unused), (code, {**begun, "status": {"conditions": conditions}})],
            f"PATCH {NODE}": [(200, {})],
        }
    )
    inventory = Inventory.read(tmp_path / "fleet.py")
    result, reason = evolve(maintenance, hosts=inventory).run(["a"], 1)["a"]
    assert result == ("undone" if ready == "True" else "failed")
    assert why in reason
    # To cordon, to note the step, and to undo.
    assert script.asked.count(f"PATCH {NODE}") == (3 if ready == "True" else 2)


BY_STRIMZI = 'admission webhook "strimzi-drain-cleaner.strimzi.io" denied the request: The pod will be rolled'
NO_WEBHOOK = 'Internal error occurred: failed calling webhook "virtualization-pod-handler": EOF'


@pytest.mark.parametrize(
    ("code", "why"),
    [
        pytest.param(500, BY_STRIMZI, id="kured-1269"),
        pytest.param(403, BY_STRIMZI, id="AKS-5637"),
        pytest.param(500, NO_WEBHOOK, id="deckhouse-23007"),
        pytest.param(500, "etcdserver: leader changed", id="eksctl-8782"),
    ],
)
def test_an_eviction_that_fails_for_a_moment_does_not_undo_the_drain(serve: Serve, code: int, why: str) -> None:
    """A webhook on the drained node is away for a moment, or an operator's webhook has the operator move the pod first."""
    script, maintenance = serve(
        {PODS: [ONE_POD, ONE_POD, NO_PODS], EVICTION: [status(code, why), (201, {})], GET: [UNUSED, recorded("drain")]}
    )
    assert maintenance.take_out("a") == ("done", "")
    assert script.asked.count(EVICTION) == 2


TERMINATING = {"items": [pod("job", ending=True).to_dict()]}


@pytest.mark.parametrize(
    ("answer", "listed"),
    [
        pytest.param(status(404, "pods not found"), [ONE_POD], id="kubectl-28"),
        pytest.param((201, {}), [ONE_POD, (200, TERMINATING), (200, TERMINATING)], id="tuppr-582"),
        pytest.param(status(409, "the UID is another one"), [ONE_POD], id="kubernetes-138229"),
    ],
)
def test_a_drain_waits_for_the_pods_that_the_node_still_has_and_for_no_others(
    serve: Serve, answer: Any, listed: list[Any]
) -> None:
    script, maintenance = serve({PODS: [*listed, NO_PODS], EVICTION: [answer], GET: [UNUSED, recorded("drain")]})
    assert maintenance.take_out("a") == ("done", "")
    assert (script.asked.count(EVICTION), script.asked.count(PODS)) == (1, len(listed) + 1)


def test_a_pod_that_may_go_only_after_another_one_does_not_keep_that_from_being_evicted(serve: Serve) -> None:
    """kubernetes.core 711: Longhorn's pod may be evicted only once no pod uses its volumes."""
    both = (200, {"items": [pod("job").to_dict(), pod("user").to_dict()]})
    other = EVICTION.replace("job", "user")
    script, maintenance = serve(
        {
            PODS: [both, ONE_POD, NO_PODS],
            EVICTION: [status(429, "it would violate the pod's disruption budget"), (201, {})],
            other: [(201, {})],
            GET: [UNUSED, recorded("drain")],
        }
    )
    assert maintenance.take_out("a") == ("done", "")
    assert [each for each in script.asked if "eviction" in each] == [EVICTION, other, EVICTION]


def test_a_pod_that_never_ends_undoes_the_drain_in_time_and_is_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cluster-api 1870: its kubelet is gone, so nobody ends it."""
    script, maintenance = serve({PODS: [(200, TERMINATING)]})
    monkeypatch.setattr("fleet.maintenance.monotonic", lambda: 10.0 * script.asked.count(PODS))
    result, why = maintenance.run(["a"], 1)["a"]
    assert (result, "60 s" in why, "ml/job" in why) == ("undone", True, True)


NODE_PATCH, LEASE = f"PATCH {NODE}", f"GET {LEASES}/a"


@pytest.mark.parametrize(
    "conflict", [pytest.param(422, id="kubernetes-128304"), pytest.param(409, id="autoscaler-5415")]
)
def test_a_taint_that_somebody_else_adds_while_a_node_is_swept_stays(serve: Serve, conflict: int) -> None:
    """The sweep's patch is for the Node that it has read, and adds to the others' taints."""
    silent, alone = [lease("a", age=901)], fleet_node("a").to_dict()
    others = {**alone, "metadata": {**alone["metadata"], "resourceVersion": "8"}, "spec": {"taints": [THEIRS]}}
    script, maintenance = serve(
        {
            **sweeps("a", silent),
            GET: [(200, alone), (200, others)],
            LEASE: [(200, silent[0].to_dict())],
            NODE_PATCH: [status(conflict, "the test failed"), (200, others)],
            f"{NODE_PATCH}/status": [(200, others)],
        }
    )
    assert swept(maintenance.api).tainted == ("a",)
    tested, added, *_ = json.loads(script.bodies[NODE_PATCH])
    assert tested == {"op": "test", "path": "/metadata/resourceVersion", "value": "8"}
    assert (added["op"], added["path"]) == ("add", "/spec/taints/-")
