"""Public reports about taints, labels, drains and cordons, tried by their triggers on what is written to the Node."""

from __future__ import annotations

from typing import Any

import pytest
from lightkube.models.core_v1 import NodeSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node

from agent.report import names
from agent.report.names import READY_LABEL
from agent.reporter.kubernetes.node import desired, node_patch, read_node
from fleet.eviction import Rules, drain, full_name
from fleet.maintenance_record import Record, annotated, finished
from tests.unit.fleet.test_maintenance import pod
from tests.unit.reporter.test_node import FACT, LABELS, NOT_READY, OURS, READY_NOW, RESOURCE, SETTINGS, THEIRS, labelled
from tests.unit.reporter.test_node import apply as patched


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


def test_pods_of_daemon_sets_stay_also_if_they_have_a_device() -> None:
    """sriov-network-operator 840: the agent then defers the change, and names the pod."""
    planned = drain([pod("job"), pod("capture", owner="DaemonSet")], Rules())
    assert [full_name(each) for each in planned.evict] == ["ml/job"]
