"""Writes to Nodes that a reporter must not be able to make, as data."""

from typing import Any

from attrs import frozen

from agent.reporter.kubernetes.api import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from tests.cluster.reporter.reporters import STATUS
from tests.cluster.reporter.thief import (
    APPLY,
    OTHER,
    OURS,
    OWN,
    OWNER,
    READY,
    THEIRS,
    add,
    labels,
    remove,
    status,
    taints,
)


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


RACK = "/metadata/labels/example.net~1rack"
NO_RACK = {"metadata": {"labels": {"example.net/rack": None}}}
DROP_TAINTS = {"spec": {"taints": [{"$patch": "replace"}, OURS]}}
DROP_CONDITIONS = {"status": {"conditions": [{"$patch": "replace"}, READY]}}


# At index 1 of the conditions is one of others, wherever the reporter has put its own.
ATTACKS = [
    Attack("another label", labels(**{"example.net/gpu": "yes"}), add("/metadata/labels/example.net~1gpu", "yes")),
    Attack(
        "a role",
        labels(**{"node-role.kubernetes.io/control-plane": ""}),
        add("/metadata/labels/node-role.kubernetes.io~1control-plane", ""),
    ),
    Attack("another's label's value", labels(**{"example.net/rack": "8"}), add(RACK, "8")),
    Attack("another's label removed", NO_RACK, remove(RACK)),
    Attack(
        "all labels replaced",
        {"metadata": {"labels": None}},
        add("/metadata/labels", {"rdma": "hca"}),
        strategic={"metadata": {"labels": {"$patch": "replace", "rdma": "hca"}}},
    ),
    Attack("an annotation", {"metadata": {"annotations": {"example.net/a": "b"}}}, add("/metadata/annotations/a", "b")),
    Attack("annotations removed", {"metadata": {"annotations": None}}, remove("/metadata/annotations")),
    Attack(
        "a finalizer",
        {"metadata": {"finalizers": ["example.net/never"]}},
        add("/metadata/finalizers", ["example.net/never"]),
    ),
    Attack(
        "an owner that is gone", {"metadata": {"ownerReferences": [OWNER]}}, add("/metadata/ownerReferences", [OWNER])
    ),
    Attack("the field managers forgotten", {"metadata": {"managedFields": [{}]}}, add("/metadata/managedFields", [{}])),
    Attack(
        "another taint",
        taints(THEIRS, {"key": "x", "effect": "NoSchedule"}),
        add("/spec/taints/-", {"key": "x", "effect": "NoSchedule"}),
    ),
    Attack(
        "evicting all pods",
        taints(THEIRS, {**OURS, "effect": "NoExecute"}),
        add("/spec/taints/-", {**OURS, "effect": "NoExecute"}),
    ),
    Attack(
        "a preference",
        taints(THEIRS, {**OURS, "effect": "PreferNoSchedule"}),
        add("/spec/taints/-", {**OURS, "effect": "PreferNoSchedule"}),
    ),
    Attack(
        "our taint with a value", taints(THEIRS, {**OURS, "value": "x"}), add("/spec/taints/-", {**OURS, "value": "x"})
    ),
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
    Attack("cordoned", {"spec": {"unschedulable": True}}, add("/spec/unschedulable", True)),
    Attack(
        "a pod network",
        {"spec": {"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]}},
        [*add("/spec/podCIDR", "10.9.0.0/24"), *add("/spec/podCIDRs", ["10.9.0.0/24"])],
    ),
    Attack("a provider's machine", {"spec": {"providerID": "cloud://x"}}, add("/spec/providerID", "cloud://x")),
    Attack(
        "capacity past the subresource", status(capacity={"cpu": "64"}), add("/status/capacity/cpu", "64"), ignored=True
    ),
    Attack("capacity", status(capacity={"cpu": "64"}), add("/status/capacity/cpu", "64"), status=True),
    Attack(
        "a resource",
        status(capacity={"rdma/x": "9"}, allocatable={"rdma/x": "9"}),
        add("/status/allocatable/rdma~1x", "9"),
        status=True,
    ),
    Attack("allocatable", status(allocatable={"cpu": "1"}), add("/status/allocatable/cpu", "1"), status=True),
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
    Attack(
        "a volume",
        status(volumesAttached=[{"name": "v", "devicePath": "/dev/sda"}]),
        add("/status/volumesAttached", [{"name": "v", "devicePath": "/dev/sda"}]),
        status=True,
    ),
    Attack(
        "the kubelet's port",
        status(daemonEndpoints={"kubeletEndpoint": {"Port": 1}}),
        add("/status/daemonEndpoints", {"kubeletEndpoint": {"Port": 1}}),
        status=True,
    ),
    Attack(
        "the kubelet's version",
        status(nodeInfo={"kubeletVersion": "v9"}),
        add("/status/nodeInfo/kubeletVersion", "v9"),
        status=True,
    ),
    Attack(
        "a label by the status",
        labels(**{"example.net/gpu": "yes"}),
        add("/metadata/labels/example.net~1gpu", "yes"),
        status=True,
    ),
    Attack(
        "an annotation by the status",
        {"metadata": {"annotations": {"a": "b"}}},
        add("/metadata/annotations/a", "b"),
        status=True,
    ),
    Attack(
        "a finalizer by the status",
        {"metadata": {"finalizers": ["x/y"]}},
        add("/metadata/finalizers", ["x/y"]),
        status=True,
    ),
    Attack(
        "cordoned by the status",
        {"spec": {"unschedulable": True}},
        add("/spec/unschedulable", True),
        status=True,
        ignored=True,
    ),
    Attack(
        "another node's condition",
        status(conditions=[READY]),
        add("/status/conditions/-", READY),
        status=True,
        on=OTHER,
    ),
    Attack("another node's label", labels(rdma="hca"), add("/metadata/labels/rdma", "hca"), on=OTHER),
    Attack("another node's taint", taints(THEIRS, OURS), add("/spec/taints/-", OURS), on=OTHER),
]
KINDS = ("json", "merge", "strategic", "apply")
