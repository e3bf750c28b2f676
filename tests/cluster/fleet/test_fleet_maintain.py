"""`trackbed fleet maintain` against a real API server, with Nodes that are objects only."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from lightkube import ALL_NS, ApiError, Client, KubeConfig
from lightkube.resources.core_v1 import Node, NodeStatus, Pod
from lightkube.types import PatchType

from agent.report import names
from fleet.objects import metadata_of
from lab.cluster.control_plane import ControlPlane
from tests.cluster import objects
from tests.cluster.fleet.fleet_commands import OTHERS, conditions, ended, fleet, make_node, node, stamp, start, until
from tests.cluster.fleet.test_fleet_rights import LEASES, rule, user_with


def ready(name: str) -> str:
    """The condition of m3, on which the change fails, is False."""
    return "False" if name == "m3" else "True"


@contextmanager
def kubelets(plane: ControlPlane, *nodes: str) -> Iterator[None]:
    """Play the kubelets and reporters of these Nodes: send heartbeats, run pods that are bound, and end those that are deleted.

    A change waits on each of the nodes until a maintenance has made it.
    """
    over = Event()
    client = Client(KubeConfig.from_file(plane.admin).get())

    def keep() -> None:
        while not over.wait(0.3):
            for name in nodes:
                with suppress(ApiError):
                    notes = metadata_of(client.get(Node, name)).annotations or {}
                    changed = '"step": "wait"' in notes.get(names.MAINTENANCE, "")
                    said = conditions(ready(name), str(changed))
                    beats = [{**one, "lastHeartbeatTime": stamp()} for one in said]
                    client.patch(NodeStatus, name, {"status": {"conditions": beats}}, patch_type=PatchType.STRATEGIC)
            for pod in client.list(Pod, namespace=ALL_NS):
                with suppress(ApiError):
                    run(pod)

    def run(pod: Pod) -> None:
        assert pod.metadata and pod.metadata.name and pod.spec and pod.status
        name, namespace = pod.metadata.name, pod.metadata.namespace or ""
        if pod.spec.nodeName not in nodes:
            return
        if pod.metadata.deletionTimestamp:
            client.delete(Pod, name, namespace=namespace, grace_period=0)
        elif pod.status.phase == "Pending":
            running = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            client.patch(Pod.Status, name, {"status": running}, namespace=namespace, patch_type=PatchType.MERGE)

    thread = Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def workload(plane: ControlPlane, name: str, node_name: str) -> None:
    """Create a ReplicaSet of one pod that can run on that node only."""
    plane.apply(replica_set(name, node_name))
    until(lambda: pods(plane, name, node_name), f"the pod of {name} runs")


def replica_set(name: str, node_name: str, *claims: dict[str, str]) -> dict[str, Any]:
    """A ReplicaSet of one pod that can run on that node only, with these claims of DRA."""
    resources = {"claims": [{"name": claim["name"]} for claim in claims]}
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": node_name},
        # Not a toleration of every taint: that would include the cordon's.
        "tolerations": [{"key": OTHERS["key"], "operator": "Exists"}],
        "containers": [{"name": "c", "image": "example.net/pause:1", "resources": resources}],
        "resourceClaims": [*claims],
    }
    return objects.replica_set(name, {"app": name}, pod, "default")


def pods(plane: ControlPlane, name: str, node_name: str) -> list[str]:
    """The UIDs of its pods that run on the node."""
    items = plane.get("pods", f"--selector=app={name}")["items"]
    return [
        pod["metadata"]["uid"]
        for pod in items
        if pod["spec"].get("nodeName") == node_name and pod["status"]["phase"] == "Running"
    ]


def forbid(plane: ControlPlane, name: str) -> None:
    """Create a budget that forbids the eviction of the workload, and wait until it is in force."""
    plane.apply(objects.budget(name, {"app": name}, "default"))
    until(lambda: plane.get("pdb", name).get("status", {}).get("currentHealthy") == 1, "the budget counts its pod")


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """An inventory of pyinfra's fake hosts: the change succeeds on m1 and m2, and fails on m3."""
    file = tmp_path / "fleet.py"
    instantly = {"fake_delay": 0, "fake_delay_jitter": 0}
    hosts: list[tuple[str, dict[str, Any]]] = [
        (f"@fake/{name}", {"node_name": name, **instantly}) for name in ("m1", "m2")
    ]
    broken = {"fake_responses": {"trackbed apply": {"success": False, "stderr": "vfs: deferred"}}}
    hosts.append(("@fake/m3", {"node_name": "m3", **instantly, **broken}))
    file.write_text(f"hosts = {hosts!r}\n")
    return file


@pytest.fixture
def nodes(plane: ControlPlane, no_nodes: None) -> Iterator[None]:
    made = ("m1", "m2", "m3")
    for name in made:
        make_node(plane, name, ready(name))
    with kubelets(plane, *made):
        yield
        plane.kubectl("delete", "replicasets,poddisruptionbudgets", "--all")
        until(lambda: not plane.get("pods")["items"], "the pods are gone")


def cordoned(plane: ControlPlane, name: str) -> tuple[bool, bool]:
    """Whether the Node is cordoned, and whether it has the record of a maintenance."""
    document = node(plane, name)
    notes = document["metadata"].get("annotations", {})
    return bool(document["spec"].get("unschedulable")), names.MAINTENANCE in notes


@pytest.mark.usefixtures("nodes")
def test_a_node_is_drained_changed_and_brought_back(plane: ControlPlane, inventory: Path) -> None:
    workload(plane, "job", "m1")
    (before,) = pods(plane, "job", "m1")
    done = fleet(plane, "maintain", "m1", "--inventory", str(inventory))
    assert done.code == 0, done
    steps = [line.partition(": ")[2].partition(" default/")[0] for line in done.out.splitlines()]
    assert steps == [
        "cordoned", "evicting", "making the changes of its spec, up to vf-reset", "ready", "uncordoned",
    ]  # fmt: skip
    assert cordoned(plane, "m1") == (False, False)
    until(lambda: pods(plane, "job", "m1") not in ([], [before]), "another pod replaces it")


def test_a_node_on_which_nothing_waits_is_drained_only_if_its_report_is_old(
    plane: ControlPlane, no_nodes: None, inventory: Path
) -> None:
    """By a user with the rights that docs/fleet.md lists."""
    make_node(plane, "m1")
    rights = [
        rule("", ("nodes",), ("get", "patch")),
        rule("", ("pods",), ("list",)),
        rule("", ("pods/eviction",), ("create",)),
    ]
    maintains = user_with(plane, "maintains", rights, [rule(*LEASES, ("get",))])
    words = ("maintain", "m1", "--inventory", str(inventory))
    left = ended(start(maintains, *words))
    assert (left.code, left.out) == (0, "m1: by its report no change waits, so it is left as it is\n"), left
    make_node(plane, "m1", life=1)
    until(lambda: fleet(plane, "status", "--json").document["nodes"][0]["expired"], "the Lease has expired")
    drained = ended(start(maintains, *words))
    unknown, *steps = drained.out.splitlines()
    assert unknown.startswith("m1: it is not known whether a change waits: no heartbeat for "), drained
    assert (drained.code, steps[0], steps[-1]) == (0, "m1: cordoned", "m1: uncordoned"), drained


@pytest.mark.usefixtures("nodes")
def test_a_disruption_budget_is_respected_and_the_drain_undone(plane: ControlPlane, inventory: Path) -> None:
    workload(plane, "job", "m1")
    forbid(plane, "job")
    before = pods(plane, "job", "m1")
    words = ("maintain", "m1", "m2", "--inventory", str(inventory), "--drain-timeout", "3", "--json")
    done = fleet(plane, *words)
    assert done.code == 1
    assert done.document["nodes"]["m1"]["result"] == "undone"
    assert "The disruption budget job needs 1 healthy pods" in done.document["nodes"]["m1"]["reason"]
    assert done.document["nodes"]["m2"]["result"] == "not started"
    assert pods(plane, "job", "m1") == before
    assert cordoned(plane, "m1") == (False, False)


@pytest.mark.usefixtures("nodes")
def test_a_change_that_fails_leaves_the_node_cordoned_until_it_is_undone(plane: ControlPlane, inventory: Path) -> None:
    words = ("maintain", "m3", "--inventory", str(inventory))
    done = fleet(plane, *words)
    assert done.code == 1
    assert "m3: failed: trackbed apply on the node failed: vfs: deferred; it stays cordoned; then " in done.err
    assert cordoned(plane, "m3") == (True, True)
    refused = fleet(plane, *words)
    assert refused.code == 1
    assert "admin began to maintain m3 at" in refused.err
    assert fleet(plane, *words, "--undo").code == 0
    assert cordoned(plane, "m3") == (False, False)


@pytest.mark.usefixtures("nodes")
def test_two_nodes_at_once_are_drained_changed_and_brought_back(plane: ControlPlane, inventory: Path) -> None:
    for name in ("m1", "m2"):
        workload(plane, f"job-{name}", name)
    done = fleet(plane, "maintain", "m1", "m2", "--at-once", "2", "--inventory", str(inventory))
    assert done.code == 0, done
    assert [cordoned(plane, name) for name in ("m1", "m2")] == [(False, False)] * 2


@pytest.mark.usefixtures("nodes")
def test_a_node_that_was_cordoned_before_stays_cordoned(plane: ControlPlane, inventory: Path) -> None:
    plane.kubectl("cordon", "m1")
    assert fleet(plane, "maintain", "m1", "--inventory", str(inventory)).code == 0
    assert cordoned(plane, "m1") == (True, False)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_drain_is_resumed_or_undone(plane: ControlPlane, inventory: Path, how: signal.Signals) -> None:
    workload(plane, "job", "m1")
    forbid(plane, "job")
    words = ("maintain", "m1", "--inventory", str(inventory))
    running = start(plane.admin, *words)
    until(lambda: cordoned(plane, "m1") == (True, True), "the node is cordoned")
    running.send_signal(how)
    stopped = ended(running)
    if how != signal.SIGKILL:
        assert stopped.code == 130
        assert "trackbed: m1: undone: interrupted before anything was changed" in stopped.err
        assert cordoned(plane, "m1") == (False, False)
        return
    assert cordoned(plane, "m1") == (True, True)
    refused = fleet(plane, *words)
    assert "began to maintain m1 at" in refused.err
    assert "give --resume or --undo" in refused.err
    plane.kubectl("delete", "pdb", "job")
    assert fleet(plane, *words, "--resume").code == 0
    assert cordoned(plane, "m1") == (False, False)


def test_every_fault_is_named_before_a_node_is_touched(plane: ControlPlane, inventory: Path) -> None:
    make_node(plane, "m1")
    plane.apply(objects.manifest("v1", "Node", "bare"))
    done = fleet(plane, "maintain", "m1", "nobody", "bare", "--inventory", str(inventory))
    assert done.code == 1
    assert "nobody is the Node of no host in" in done.err
    assert "the cluster has no Node nobody" in done.err
    assert "bare has no condition TrackbedReady; deploy it first" in done.err
    assert cordoned(plane, "m1") == (False, False)
