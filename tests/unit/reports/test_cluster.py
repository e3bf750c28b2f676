"""Public reports about taints, labels, drains and cordons, tried by their triggers on what is written to the Node."""

from __future__ import annotations

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
from tests.unit.fleet.test_maintenance import pod
from tests.unit.fleet.test_maintenance_requests import NODE, PODS, Serve, recorded, serve
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
        pytest.param([OURS], id="cilium-17103"),
        pytest.param([OURS, THEIRS], id="aws-ebs-csi-driver-2492"),
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
    [
        pytest.param(True, {"unschedulable": None}, id="kured-63"),
        pytest.param(False, None, id="draino-91"),
        pytest.param(False, None, id="drainsafe-1"),
    ],
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
