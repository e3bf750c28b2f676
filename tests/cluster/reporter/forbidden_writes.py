"""Writes to Nodes that a reporter must not be able to make, as data."""

from typing import Any

from attrs import frozen

from agent.reporter.kubernetes.api import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from tests.cluster.reporter.reporters import STATUS
from tests.cluster.reporter.thief import APPLY, OTHER, OURS, OWN, OWNER, READY, THEIRS, add, remove, status, taints


@frozen
class Attack:
    """A write that must have no effect. ``change``: as a merge; ``operations``: the same as a JSON patch.

    ``strategic``: as a strategic merge, where that says it otherwise; an ``ignored`` one is answered with success.
    """

    name: str
    change: dict[str, Any]
    operations: list[dict[str, Any]]
    status: bool = False
    on: str = OWN
    strategic: dict[str, Any] | None = None
    ignored: bool = False

    def bodies(self) -> dict[str, tuple[str, Any]]:
        """What to send, by the kind of patch."""
        applied = {"apiVersion": "v1", "kind": "Node", **self.change}
        applied["metadata"] = {
            "name": self.on,
            **{k: v for k, v in applied.get("metadata", {}).items() if v is not None},
        }
        return {
            "json": (JSON_PATCH, self.operations),
            "merge": (MERGE_PATCH, self.change),
            "strategic": (STRATEGIC_PATCH, self.strategic or self.change),
            "apply": (APPLY, applied),
        }


def put(name: str, path: str, value: Any, **more: Any) -> Attack:
    """Sets the field at a path of a JSON patch."""
    return Attack(name, _at(path, value), add(path, value), **more)


def without(name: str, path: str) -> Attack:
    """Removes the field at a path."""
    return Attack(name, _at(path, None), remove(path))


def _at(path: str, value: Any) -> Any:
    """The merge by which the field at a path has this value; None: it is removed."""
    for part in reversed(path.split("/")[1:]):
        value = {part.replace("~1", "/"): value}
    return value


def taint(name: str, added: dict[str, Any], on: str = OWN) -> Attack:
    """Adds a taint to that of others."""
    return Attack(name, taints(THEIRS, added), add("/spec/taints/-", added), on=on)


GPU, RACK = "/metadata/labels/example.net~1gpu", "/metadata/labels/example.net~1rack"
DROP_TAINTS = {"spec": {"taints": [{"$patch": "replace"}, OURS]}}
DROP_CONDITIONS = {"status": {"conditions": [{"$patch": "replace"}, READY]}}


# At index 1 of the conditions is one of others, wherever the reporter has put its own.
ATTACKS = [
    put("another label", GPU, "yes"),
    put("a role", "/metadata/labels/node-role.kubernetes.io~1control-plane", ""),
    put("another's label's value", RACK, "8"),
    without("another's label removed", RACK),
    Attack(
        "all labels replaced",
        {"metadata": {"labels": None}},
        add("/metadata/labels", {"rdma": "hca"}),
        strategic={"metadata": {"labels": {"$patch": "replace", "rdma": "hca"}}},
    ),
    put("an annotation", "/metadata/annotations/example.net~1a", "b"),
    without("annotations removed", "/metadata/annotations"),
    put("a finalizer", "/metadata/finalizers", ["example.net/never"]),
    put("an owner that is gone", "/metadata/ownerReferences", [OWNER]),
    put("the field managers forgotten", "/metadata/managedFields", [{}]),
    taint("another taint", {"key": "x", "effect": "NoSchedule"}),
    taint("evicting all pods", {**OURS, "effect": "NoExecute"}),
    taint("a preference", {**OURS, "effect": "PreferNoSchedule"}),
    taint("our taint with a value", {**OURS, "value": "x"}),
    Attack("another's taint replaced by ours", taints(OURS), add("/spec/taints", [OURS]), strategic=DROP_TAINTS),
    Attack(
        "another's taint removed",
        {"spec": {"taints": None}},
        remove("/spec/taints/0"),
        strategic={"spec": {"taints": [{"$patch": "delete", "key": THEIRS["key"]}]}},
    ),
    Attack(
        "another's taint's effect",
        taints({**THEIRS, "effect": "PreferNoSchedule"}),
        add("/spec/taints/0/effect", "PreferNoSchedule"),
    ),
    put("cordoned", "/spec/unschedulable", True),
    Attack(
        "a pod network",
        {"spec": {"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]}},
        [*add("/spec/podCIDR", "10.9.0.0/24"), *add("/spec/podCIDRs", ["10.9.0.0/24"])],
    ),
    put("a provider's machine", "/spec/providerID", "cloud://x"),
    put("capacity past the subresource", "/status/capacity/cpu", "64", ignored=True),
    put("capacity", "/status/capacity/cpu", "64", status=True),
    Attack(
        "a resource",
        status(capacity={"rdma/x": "9"}, allocatable={"rdma/x": "9"}),
        add("/status/allocatable/rdma~1x", "9"),
        status=True,
    ),
    put("allocatable", "/status/allocatable/cpu", "1", status=True),
    Attack(
        "an address",
        status(addresses=[{"type": "InternalIP", "address": "192.0.2.9"}]),
        add("/status/addresses/0/address", "192.0.2.9"),
        status=True,
    ),
    Attack(
        "an image",
        status(images=[{"names": ["x"], "sizeBytes": 1}]),
        add("/status/images/-", {"names": ["x"], "sizeBytes": 1}),
        status=True,
    ),
    Attack(
        "the kubelet's condition",
        status(conditions=[{"type": "Ready", "status": "False"}]),
        add("/status/conditions/1/reason", "Stolen"),
        status=True,
    ),
    Attack(
        "another condition",
        status(conditions=[*STATUS["conditions"], {"type": "MemoryPressure", "status": "True"}]),
        add("/status/conditions/-", {"type": "MemoryPressure", "status": "True"}),
        status=True,
    ),
    Attack(
        "conditions removed",
        status(conditions=None),
        remove("/status/conditions/1"),
        status=True,
        strategic={"status": {"conditions": [{"$patch": "delete", "type": "Ready"}]}},
    ),
    Attack(
        "a condition twice in another's place",
        status(conditions=[STATUS["conditions"][1], STATUS["conditions"][1]]),
        [
            {"op": "copy", "from": "/status/conditions/1", "path": "/status/conditions/-"},
            *remove("/status/conditions/0"),
        ],
        status=True,
        strategic=status(conditions=[{"$patch": "replace"}, STATUS["conditions"][1], STATUS["conditions"][1]]),
    ),
    Attack(
        "conditions replaced",
        status(conditions=[READY, {"type": "Ready", "status": "Unknown"}]),
        add("/status/conditions", [READY]),
        status=True,
        strategic=DROP_CONDITIONS,
    ),
    put("a volume", "/status/volumesAttached", [{"name": "v", "devicePath": "/dev/sda"}], status=True),
    put("the kubelet's port", "/status/daemonEndpoints", {"kubeletEndpoint": {"Port": 1}}, status=True),
    put("the kubelet's version", "/status/nodeInfo/kubeletVersion", "v9", status=True),
    put("a label by the status", GPU, "yes", status=True),
    put("an annotation by the status", "/metadata/annotations/a", "b", status=True),
    put("a finalizer by the status", "/metadata/finalizers", ["x/y"], status=True),
    put("cordoned by the status", "/spec/unschedulable", True, status=True, ignored=True),
    Attack(
        "another node's condition",
        status(conditions=[READY]),
        add("/status/conditions/-", READY),
        status=True,
        on=OTHER,
    ),
    put("another node's label", "/metadata/labels/rdma", "hca", on=OTHER),
    taint("another node's taint", OURS, on=OTHER),
]
KINDS = ("json", "merge", "strategic", "apply")
