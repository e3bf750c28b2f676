"""Manifests for the lab's cluster: the settings for those that the deploy renders, and pods to try the device plugin with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.cluster import bundle, network_plugins
from lab.cluster.control_plane import ControlPlane
from lab.cluster.images import REGISTRY

RESOURCE = "rdma/hca_shared_devices_b"
PLUGIN = "rdma-shared-device-plugin"
"""The name of the plugin's DaemonSet."""

NAMESPACE = "kube-system"
SHARES = 8
"""How many pods may share the node's RDMA devices at a time."""

SUBNET = "10.56.217.0/24"
"""The addresses of pods' networks."""


def wanted(folder: Path, plugins: Sequence[str] = (), vfs: str | None = None) -> dict[str, Any]:
    """The inventory's key `device_plugins` for the lab, with its own images.

    ``folder``: where the deploy writes the manifests, which are applied as they are. ``plugins``: the network
    plugins to install, of those that are built here; with Multus every pod takes longer to start. ``vfs``: the indexes of the
    VFs that the SR-IOV plugin gives to one pod each; None: all RDMA devices are shared.
    """
    shared = {
        "image": f"{REGISTRY}/{bundle.DEVICE_PLUGIN}",
        "rdma_hca_max": SHARES,
        # 0 is never: looking for devices once takes an emulated CPU a minute.
        "periodic_update_interval": 0,
    }
    # The policies of the lab's cluster list the default labels only.
    sriov = {"image": network_plugins.SRIOV_DEVICE_PLUGIN, "vfs": vfs, "node_selector": {"rdma": "hca"}}
    return {
        "folder": str(folder),
        "namespace": NAMESPACE,
        "shared_rdma": None if vfs else shared,
        "sriov": sriov if vfs else None,
        "test_pods": {"image": f"{REGISTRY}/{bundle.PERFTEST}"},
        "networks": {"subnet": SUBNET} if {"multus", "whereabouts"} <= set(plugins) else None,
        "network_plugins": {name: {"image": network_plugins.reference(name)} for name in plugins},
    }


def apply(plane: ControlPlane, folder: Path) -> None:
    """Apply the manifests that the deploy has rendered, in the order of docs/inventory/device-plugins.md."""
    plugins = folder / "network-plugins"
    if plugins.exists():
        plane.kubectl("apply", "--validate=strict", "-k", str(plugins))
        plane.wait_established("crd/network-attachment-definitions.k8s.cni.cncf.io")
    plane.kubectl("apply", "--validate=strict", "-k", str(folder))


def pod(
    name: str,
    command: Sequence[str],
    *,
    rdma: int = 0,
    host_network: bool = False,
    node: str | None = None,
    selector: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod that runs a program of its node.

    :param rdma: how many shares of the RDMA devices it requests.
    :param node: its `nodeName`, which bypasses the scheduler.
    """
    mounts = {"usr": "/usr", "verbs": "/etc/libibverbs.d"}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "hostNetwork": host_network,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "tools",
                "image": bundle.tools().reference,
                "imagePullPolicy": "Never",
                "command": list(command),
                "resources": {"limits": {RESOURCE: str(rdma)}} if rdma else {},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "volumeMounts": [{"name": name, "mountPath": path, "readOnly": True} for name, path in mounts.items()],
            }
        ],
        "volumes": [{"name": name, "hostPath": {"path": path}} for name, path in mounts.items()],
    }
    if node is not None:
        spec["nodeName"] = node
    if selector is not None:
        spec["nodeSelector"] = dict(selector)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
