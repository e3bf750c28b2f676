"""Reads API objects that nodes can write. One unreadable object does not prevent the reading of the others.

The API server accepts times that Python cannot represent: the years 0 and 10000. A client that decodes a whole list at once
would fail at the first of them, so objects are fetched as plain JSON and decoded one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec
from attrs import field, frozen
from lightkube import ApiError, Client
from lightkube.core.resource import Resource
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericGlobalStatus,
    GenericNamespacedResource,
    create_global_resource,
    create_namespaced_resource,
)
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import ConfigMap, Node, NodeStatus, Pod
from lightkube.resources.policy_v1 import PodDisruptionBudget

from fleet.decoding import convert

PAGE = 500
"""Objects in one answer to a list."""

EXPIRED = 410
"""HTTP status code of a long list whose rest is no longer there: the list must be read anew."""

T = TypeVar("T", Node, Lease, Pod, PodDisruptionBudget)
R = TypeVar("R", bound=Resource)
V = TypeVar("V")


def _plain(base: type[R], kind: type[Resource]) -> type[R]:
    """A kind of lightkube's whose objects stay as JSON."""
    return type(f"Plain{kind.__name__}", (base,), {"_api_info": kind._api_info})


PlainNode = _plain(GenericGlobalResource, Node)
PlainNodeStatus = _plain(GenericGlobalStatus, NodeStatus)
PlainLease = _plain(GenericNamespacedResource, Lease)
PlainConfigMap = _plain(GenericNamespacedResource, ConfigMap)
PlainPod = _plain(GenericNamespacedResource, Pod)
PlainPodDisruptionBudget = _plain(GenericNamespacedResource, PodDisruptionBudget)
PlainResourceSlice = create_global_resource("resource.k8s.io", "v1", "ResourceSlice", "resourceslices")
PlainResourceClaim = create_namespaced_resource("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims")
PlainDeviceTaintRule = create_global_resource("resource.k8s.io", "v1", "DeviceTaintRule", "devicetaintrules")


# JSON can express half of a surrogate pair, which UTF-8 cannot.
_UNREADABLE = (msgspec.ValidationError, UnicodeEncodeError)

ALL: dict[str, Any] = {}
"""The whole of a field."""

USED: dict[type, dict[str, Any]] = {
    Node: {
        "metadata": ALL,
        "spec": {"taints": ALL, "unschedulable": ALL},
        "status": {"conditions": ALL, "nodeInfo": ALL},
    },
    # The API server lets nobody renew a Lease in which any time cannot be read, so all of them are.
    Lease: {"metadata": ALL, "spec": ALL},
    Pod: {
        "metadata": ALL,
        "spec": {
            "containers": {"name": ALL},  # lightkube's type requires it
            "volumes": {"name": ALL, "emptyDir": {"medium": ALL}},
            "tolerations": ALL,
        },
        "status": {"phase": ALL, "conditions": ALL},
    },
    PodDisruptionBudget: {
        "metadata": ALL,
        "spec": {"selector": ALL, "unhealthyPodEvictionPolicy": ALL},
        "status": dict.fromkeys(
            ("observedGeneration", "disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"), ALL
        ),
    },
}
"""The fields that are read. The rest takes most of the memory of a list of thousands of Nodes, and may be of a version of
Kubernetes that lightkube does not know."""

# Fields whose values are texts, even if they look like times.
_TEXTS = ("annotations", "labels")

_TIME = re.compile(r"[+-]?\d{4,}-\d\d-\d\d[Tt]")


def all_of(client: Client, kind: type[Any], read: Callable[[Iterable[Mapping[str, Any]]], V], **of: Any) -> V:
    """Read all objects of a plain kind, page by page; if the pages expire meanwhile, again in one answer, as client-go's pager.

    :param of: the namespace and the labels.
    """
    try:
        return read(client.list(kind, chunk_size=PAGE, **of))
    except ApiError as error:
        if error.status.code != EXPIRED:
            raise
        return read(client.list(kind, **of))


@frozen
class Read(Generic[T]):
    """Objects by name. ``faults``: what cannot be read, by the object's name; ``objects`` has the rest of such an object.

    An object of which nothing can be read is only in ``faults``.
    """

    objects: dict[str, T] = field(factory=dict)
    faults: dict[str, str] = field(factory=dict)


def read_all(documents: Iterable[Mapping[str, Any]], kind: type[T]) -> Read[T]:
    """Read each of many objects."""
    result: Read[T] = Read()
    for document in documents:
        name = str(document["metadata"]["name"])
        thing, fault = read(document, kind)
        if thing is not None:
            if isinstance(thing, Node) and thing.metadata:
                thing.metadata.managedFields = None
            result.objects[name] = thing
        if fault:
            result.faults[name] = fault
    return result


def _used(value: Any, fields: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_used(each, fields) for each in value]
    if not (fields and isinstance(value, Mapping)):
        return value
    return {key: _used(value[key], of) for key, of in fields.items() if key in value}


def read(document: Mapping[str, Any], kind: type[T], fields: Mapping[str, Any] | None = None) -> tuple[T | None, str]:
    """Decode an object; the object, and what cannot be read of it. Times that cannot be read are left out.

    :param fields: those to read, as in :data:`USED`.
    """
    used = _used(document, fields or USED[kind])
    try:
        return convert(used, kind), ""
    except _UNREADABLE as error:
        fault = str(error)
    try:
        return convert(without_bad_times(used), kind), fault
    except _UNREADABLE:
        return None, fault


def without_bad_times(value: Any) -> Any:
    """A document without the times that cannot be read."""
    if isinstance(value, Mapping):
        return {
            key: each if key in _TEXTS else without_bad_times(each)
            for key, each in value.items()
            if not _is_bad_time(each)
        }
    if isinstance(value, list):
        return [without_bad_times(each) for each in value]
    return value


def _is_bad_time(value: object) -> bool:
    return isinstance(value, str) and bool(_TIME.match(value)) and read_time(value) is None


def read_time(value: object) -> datetime | None:
    """A time of Kubernetes; None if it cannot be read."""
    try:
        return convert(value, datetime)
    except _UNREADABLE:
        return None
