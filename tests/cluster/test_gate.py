"""The kubelet's gate and a node's first registration, on a real kubelet: by the API and by the node's journal."""

from typing import Any

from lab.cluster import join, manifests
from lab.cluster.control_plane import ControlPlane
from lab.node import Node
from tests.cluster.conftest import LONG, Cluster, joined, restore
from tests.cluster.objects import unschedulable
from tests.lab.conftest import eventually, wait_ready
from tests.lab.test_gate import BLOCKER, VERIFIED, first_said_at, started, unit

TAINT = {"key": "readiness.k8s.io/trackbed", "effect": "NoSchedule"}


def phase(plane: ControlPlane, pod: str) -> str:
    return str(plane.get("pod", pod)["status"]["phase"])


def plugin_pods(plane: ControlPlane, node: str) -> list[dict[str, Any]]:
    chosen = (
        "-n",
        manifests.NAMESPACE,
        "-l",
        f"app.kubernetes.io/name={manifests.PLUGIN}",
        f"--field-selector=spec.nodeName={node}",
    )
    items: list[dict[str, Any]] = plane.get("pods", *chosen)["items"]
    return items


def make_unverifiable(node: Node) -> None:
    """Make a node one that cannot be verified.

    The agent comes with the kubelet (Wants=) even if it was stopped; so it is given what it cannot repair.
    """
    node.sh(
        f"echo 'install igbvf /bin/false' > {BLOCKER}; rmmod igbvf; systemctl stop trackbed; rm /run/trackbed/first-pass"
    )


def has_our_taint(plane: ControlPlane, name: str) -> bool:
    taints = plane.get("node", name)["spec"].get("taints", [])
    return TAINT in [{key: taint.get(key) for key in TAINT} for taint in taints]


def test_a_fresh_node_registers_tainted_and_gets_nothing_to_run(fresh_cluster: Cluster) -> None:
    plane, (node, _) = fresh_cluster.plane, fresh_cluster.nodes
    restore(plane, node)
    # A node that is not verified joins nevertheless: `kubeadm join` waits for the kubelet's restart.
    make_unverifiable(node)
    name = joined(plane, node)
    join.wait_ready(plane, node)
    assert has_our_taint(plane, name)
    assert not {"rdma", "trackbed.internal/ready"} & plane.get("node", name)["metadata"]["labels"].keys()
    selector = {"kubernetes.io/hostname": name}
    plane.apply(manifests.pod("wants-rdma", ["sleep", "infinity"], rdma=1, selector=selector))
    eventually("the scheduler's refusal", lambda: unschedulable(plane.get("pod", "wants-rdma")))
    assert phase(plane, "wants-rdma") == "Pending"
    assert plugin_pods(plane, name) == []
    plane.kubectl("delete", "pod", "wants-rdma", "--wait=false")


def test_a_pod_that_bypasses_the_scheduler_runs_without_a_device(fresh_cluster: Cluster) -> None:
    plane, name = fresh_cluster.plane, fresh_cluster.names[0]
    plane.apply(manifests.pod("goes-round", ["ls", "/dev/infiniband"], rdma=1, node=name))
    # The kubelet does not check a resource that no plugin of its node has registered.
    eventually("the pod's end", lambda: phase(plane, "goes-round") == "Failed", LONG)
    (container,) = plane.get("pod", "goes-round")["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 2
    assert "No such file" in plane.kubectl("logs", "goes-round")
    plane.kubectl("delete", "pod", "goes-round", "--wait=false")


def test_after_a_power_cut_the_kubelet_waits_until_the_node_is_verified(fresh_cluster: Cluster) -> None:
    node = fresh_cluster.nodes[0]
    node.sh(f"echo 'install igbvf /bin/false' > {BLOCKER}; sync")
    node.power_cut()
    node.boot()
    eventually("the gate", lambda: unit(node, "kubelet", "SubState") == ["start-pre"], LONG)
    assert node.run(["test", "-e", "/run/trackbed/first-pass"]).returncode != 0
    # No container of this boot, although the pods' sandboxes are still known.
    assert node.run(["pgrep", "-f", "containerd-shim"]).returncode != 0
    node.sh(f"rm {BLOCKER}; modprobe igbvf")
    wait_ready(node)
    eventually("the kubelet", lambda: unit(node, "kubelet", "SubState") == ["running"], LONG)
    assert started(node, "kubelet") > first_said_at(node, "trackbed", VERIFIED)


def test_after_the_first_verified_pass_no_kubelet_waits_and_a_restart_of_the_agent_leaves_it_running(
    fresh_cluster: Cluster,
) -> None:
    node = fresh_cluster.nodes[0]
    eventually("the kubelet", lambda: unit(node, "kubelet", "SubState") == ["running"], LONG)
    before = unit(node, "kubelet", "MainPID")
    node.sh("systemctl restart trackbed")
    assert unit(node, "kubelet", "MainPID") == before
    node.sh("systemctl stop trackbed")
    assert unit(node, "kubelet", "MainPID") == before
    # Not verified now, and not held either.
    node.sh("systemctl restart --no-block kubelet")
    eventually(
        "another kubelet", lambda: unit(node, "kubelet", "SubState", "MainPID") not in (["running", *before], [])
    )
    eventually("it runs", lambda: unit(node, "kubelet", "SubState") == ["running"])
    assert unit(node, "trackbed", "ActiveState") == ["active"]
