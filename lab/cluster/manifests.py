"""Manifests for the lab's cluster: the device plugin, and pods to try it with."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent.report.names import TAINT
from lab.cluster import bundle
from lab.cluster.images import REGISTRY

SELECTOR = {"rdma": "hca"}
"""The label by which the plugin's DaemonSet selects its nodes."""

RESOURCE = "rdma/hca_shared_devices_b"
PLUGIN = "rdma-shared-dp"
NAMESPACE = "kube-system"
SHARES = 8
"""How many pods may share the node's RDMA devices at a time."""

CONFIGURATION = {
    # 0 is never: looking for devices once takes an emulated CPU a minute.
    "periodicUpdateInterval": 0,
    "configList": [
        {
            "resourcePrefix": RESOURCE.split("/")[0],
            "resourceName": RESOURCE.split("/")[1],
            "rdmaHcaMax": SHARES,
            # The VFs; their PFs have another driver.
            "selectors": {"drivers": ["igbvf"]},
        }
    ],
}


def device_plugin() -> list[dict[str, Any]]:
    """The plugin's ConfigMap and its DaemonSet, which tolerates our taint: without its resource the taint stays."""
    names = {"name": PLUGIN, "namespace": NAMESPACE}
    labels = {"app": PLUGIN}
    mounts = {
        "device-plugins": "/var/lib/kubelet/device-plugins",
        "plugins-registry": "/var/lib/kubelet/plugins_registry",
        "devices": "/dev",
    }
    container = {
        "name": PLUGIN,
        "image": f"{REGISTRY}/k8s-rdma-shared-dp:v1.5.3",
        "imagePullPolicy": "Never",
        "env": [{"name": "GOMAXPROCS", "value": "1"}],
        "securityContext": {"privileged": True},
        "volumeMounts": [
            *({"name": name, "mountPath": path} for name, path in mounts.items()),
            {"name": "configuration", "mountPath": "/k8s-rdma-shared-dev-plugin"},
        ],
    }
    volumes = [
        *({"name": name, "hostPath": {"path": path}} for name, path in mounts.items()),
        {"name": "configuration", "configMap": {"name": PLUGIN}},
    ]
    pod = {
        "hostNetwork": True,
        "priorityClassName": "system-node-critical",
        "nodeSelector": SELECTOR,
        "tolerations": [{"key": TAINT, "operator": "Exists"}],
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": volumes,
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": names,
            "data": {"config.json": json.dumps(CONFIGURATION)},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": names,
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


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
