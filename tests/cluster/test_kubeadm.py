"""A node joins by kubeadm itself, which restarts the kubelet and waits for it, while the node is not verified."""

import json
from typing import Any

import pytest

from lab.cluster import join, programs
from lab.cluster.control_plane import ControlPlane
from lab.node import Node
from tests.cluster.conftest import LONG, Cluster, restore
from tests.cluster.fleet.test_fleet_rights import RBAC, rule
from tests.cluster.objects import manifest
from tests.cluster.test_gate import has_our_taint, make_unverifiable
from tests.lab.test_gate import BLOCKER, unit

CONFIG = "/var/lib/kubelet/config.yaml"
INVITATION = "/root/invitation.conf"

pytestmark = pytest.mark.campaign


def config_map(namespace: str, name: str, data: dict[str, str]) -> dict[str, Any]:
    return manifest("v1", "ConfigMap", name, namespace, data=data)


def initialised(plane: ControlPlane, node: Node) -> None:
    """What `kubeadm init` leaves in a cluster for those who join: two ConfigMaps, and the right to read them and Nodes."""
    cluster = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "ClusterConfiguration",
        "kubernetesVersion": plane.version,
        "controlPlaneEndpoint": plane.node_url.removeprefix("https://"),
        "networking": {"dnsDomain": "cluster.local"},
    }
    plane.apply(
        config_map("kube-system", "kubeadm-config", {"ClusterConfiguration": json.dumps(cluster)}),
        config_map("kube-system", "kubelet-config", {"kubelet": node.sh(f"cat {CONFIG}")}),
        manifest(f"{RBAC}/v1", "ClusterRole", "lab:kubeadm", rules=[rule("", ("configmaps", "nodes"), ("get",))]),
        join.binding("kubeadm", "lab:kubeadm", join.BOOTSTRAPPERS),
        config_map("kube-public", "cluster-info", {}),
    )


def test_kubeadm_joins_a_node_that_is_not_verified(fresh_cluster: Cluster) -> None:
    plane, (node, _) = fresh_cluster.plane, fresh_cluster.nodes
    restore(plane, node)
    initialised(plane, node)
    node.copy({"kubeadm": programs.kubernetes("kubeadm")}, "/usr/local/bin", LONG)
    node.write(INVITATION, join.invitation(plane, node), mode="600")
    make_unverifiable(node)
    name = join.node_name(node)
    # The lab's nodes have not all that it looks for first: swap, ports, host names, and the kernel's configuration.
    node.sh(f"kubeadm join --discovery-file {INVITATION} --node-name {name} --ignore-preflight-errors all", LONG)
    assert node.run(["test", "-e", "/run/trackbed/first-pass"]).returncode != 0
    assert unit(node, "kubelet", "SubState") == ["running"]
    join.wait_ready(plane, node)
    assert has_our_taint(plane, name)
    node.sh(f"rm {BLOCKER}")
