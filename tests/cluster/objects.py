"""Objects of the API server, as the tests of this folder create and change them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from agent.report import names
from lab.cluster.control_plane import ControlPlane

LEASES = f"--namespace={names.NAMESPACE}"
"""Where the reporters' Leases are, and all else of Trackbed that belongs to a namespace."""

RESOURCE = "resource.k8s.io/v1"
"""The version of the objects of DRA."""


def manifest(version: str, kind: str, name: str, namespace: str = "", **fields: Any) -> dict[str, Any]:
    """An object with these fields, in this namespace if it belongs to one. ``metadata``: what it has beside its names."""
    metadata = {"name": name, **({"namespace": namespace} if namespace else {}), **fields.pop("metadata", {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def vf_device(name: str, address: str) -> dict[str, Any]:
    """A VF as a driver of DRA publishes it."""
    return {"name": name, "attributes": {"resource.kubernetes.io/pciBusID": {"string": address}}}


def resource_slice(node: str, driver: str, devices: Iterable[Mapping[str, Any]], name: str = "") -> dict[str, Any]:
    """The only slice of a driver's pool on a node."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": list(devices)}
    return manifest(RESOURCE, "ResourceSlice", name or node, spec=spec)


def device_class(name: str, expression: str) -> dict[str, Any]:
    """A class of the devices for which the expression is true."""
    return manifest(RESOURCE, "DeviceClass", name, spec={"selectors": [{"cel": {"expression": expression}}]})


def claim_template(name: str, namespace: str = "", **exactly: Any) -> dict[str, Any]:
    """A template for claims of one VF."""
    devices = {"requests": [{"name": "vf", "exactly": exactly}]}
    return manifest(RESOURCE, "ResourceClaimTemplate", name, namespace, spec={"spec": {"devices": devices}})


def budget(name: str, labels: Mapping[str, str], namespace: str = "") -> dict[str, Any]:
    """A budget that forbids the eviction of a workload's only pod."""
    spec = {"minAvailable": 1, "selector": {"matchLabels": labels}}
    return manifest("policy/v1", "PodDisruptionBudget", name, namespace, spec=spec)


def replica_set(name: str, labels: Mapping[str, str], pod: Mapping[str, Any], namespace: str = "") -> dict[str, Any]:
    """A ReplicaSet of one pod."""
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return manifest("apps/v1", "ReplicaSet", name, namespace, spec=spec)


def patch(plane: ControlPlane, kind: str, name: str, body: Any, *options: str, how: str = "merge") -> None:
    """Change an object as an administrator."""
    plane.kubectl("patch", kind, name, *options, f"--type={how}", "-p", json.dumps(body))


def patch_status(plane: ControlPlane, name: str, body: Any, how: str = "merge") -> None:
    """Change the status of a Node, as its kubelet does."""
    patch(plane, "node", name, body, "--subresource=status", how=how)


def patch_lease(plane: ControlPlane, name: str, body: Any) -> None:
    """Change the Lease of a reporter."""
    patch(plane, "lease", name, body, LEASES)


def unschedulable(pod: Mapping[str, Any]) -> bool:
    """Whether the scheduler has found no node for a pod."""
    return any(each.get("reason") == "Unschedulable" for each in pod["status"].get("conditions", []))
