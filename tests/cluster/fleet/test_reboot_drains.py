"""A deploy drains a Node of a real API server before it reboots the host, with the rights that docs/fleet.md lists alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from lab.cluster.control_plane import ControlPlane
from tasks import reboot_policy
from tests.cluster.fleet.fleet_commands import make_node, until
from tests.cluster.fleet.test_fleet_maintain import cordoned, forbid, kubelets, pods, workload
from tests.cluster.fleet.test_fleet_rights import rule, user_with
from tests.cluster.objects import manifest
from tests.deploy.conftest import Node
from tests.deploy.kubernetes.test_maintenance import Machine, OfCluster, deferred, deploy
from tests.unit.fleet.nodes_api import Cluster


@pytest.fixture
def host(
    plane: ControlPlane, no_nodes: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    """A host that needs a reboot. It is simulated, and its Node m1 is an object only."""
    monkeypatch.setattr(reboot_policy, "POLL_INTERVAL", 0)
    make_node(plane, "m1")
    OfCluster.machine = Machine(Cluster({}))
    rights = [
        rule("", ("nodes",), ("get", "patch")),
        rule("", ("pods",), ("list",)),
        rule("", ("pods/eviction",), ("create",)),
    ]
    reboots: Path = user_with(plane, "reboots", rights, [])
    authority = str(plane.authority.pair.certificate)
    key = {"server": "https://10.0.0.1:6443", "ca_file": authority, "kubeconfig": str(reboots)}
    data = {"node_name": "m1", "reboot": {"policy": "allow"}, "kubernetes": key}
    with kubelets(plane, "m1"):
        yield evolve(Node(caplog), data=data, connector=OfCluster)
        plane.kubectl("delete", "replicasets,poddisruptionbudgets,pods", "--all", "--force")
        until(lambda: not plane.get("pods")["items"], "the pods are gone")


def test_a_node_is_drained_before_the_reboot_and_brought_back(host: Node, plane: ControlPlane) -> None:
    workload(plane, "job", "m1")
    (before,) = pods(plane, "job", "m1")
    result = deploy(host)
    assert not result.failed
    steps = [line.partition(" m1: ")[2].partition(" default/")[0] for line in result.log if " m1: " in line]
    assert steps == ["cordoned", "evicting", "ready", "uncordoned"]
    assert OfCluster.machine.cluster.events == ["rebooted"]
    assert cordoned(plane, "m1") == (False, False)
    until(lambda: pods(plane, "job", "m1") not in ([], [before]), "another pod replaces it")


def test_a_budget_undoes_the_drain_and_defers_the_reboot(
    host: Node, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.kubernetes.maintenance.DRAIN_TIMEOUT", 3.0)
    workload(plane, "job", "m1")
    forbid(plane, "job")
    before = pods(plane, "job", "m1")
    assert "The disruption budget job needs 1 healthy pods" in deferred(deploy(host))
    assert OfCluster.machine.cluster.events == []
    assert cordoned(plane, "m1") == (False, False)
    assert pods(plane, "job", "m1") == before


def test_a_pod_without_a_controller_defers_the_reboot_and_is_named(host: Node, plane: ControlPlane) -> None:
    pod = {"nodeName": "m1", "containers": [{"name": "c", "image": "example.net/pause:1"}]}
    plane.apply(manifest("v1", "Pod", "bare", "default", spec=pod))
    assert deferred(deploy(host)).startswith("default/bare has no controller")
    assert OfCluster.machine.cluster.events == []
    assert cordoned(plane, "m1") == (False, False)
