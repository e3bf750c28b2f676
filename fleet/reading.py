"""Reading what nodes write to the API: one object that cannot be read is named, and the others are read all the same.

The API server takes times that Python has not: the year 0, or 10000. A client that decodes a whole list at once would stop at
the first of them, so objects are fetched as plain JSON and decoded one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec
from attrs import field, frozen
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericGlobalStatus,
    GenericNamespacedResource,
)
from lightkube.resources.certificates_v1 import CertificateSigningRequest
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node, NodeStatus, Pod

T = TypeVar("T", Node, Lease, Pod, CertificateSigningRequest)


class PlainNode(GenericGlobalResource):
    """A Node as JSON."""

    _api_info = Node._api_info


class PlainNodeStatus(GenericGlobalStatus):
    """A Node's status as JSON."""

    _api_info = NodeStatus._api_info


class PlainLease(GenericNamespacedResource):
    """A Lease as JSON."""

    _api_info = Lease._api_info


class PlainPod(GenericNamespacedResource):
    """A pod as JSON."""

    _api_info = Pod._api_info


class PlainRequest(GenericGlobalResource):
    """A request for a certificate as JSON."""

    _api_info = CertificateSigningRequest._api_info


class PlainApproval(GenericGlobalStatus):
    """The decision on a request for a certificate, as JSON."""

    _api_info = CertificateSigningRequest.Approval._api_info


_TIME = re.compile(r"[+-]?\d{4,}-\d\d-\d\d[Tt]")


@frozen
class Read(Generic[T]):
    """Objects by name. ``faults``: what cannot be read of an object, by its name; without that part it is among ``objects``.

    An object of which nothing can be read is among ``faults`` alone.
    """

    objects: dict[str, T] = field(factory=dict)
    faults: dict[str, str] = field(factory=dict)


def read_all(documents: Iterable[Mapping[str, Any]], kind: type[T]) -> Read[T]:
    """Read each of many objects."""
    found: Read[T] = Read()
    for document in documents:
        name = str(document["metadata"]["name"])
        thing, fault = read(document, kind)
        if thing is not None:
            found.objects[name] = thing
        if fault:
            found.faults[name] = fault
    return found


def read(document: Mapping[str, Any], kind: type[T]) -> tuple[T | None, str]:
    """Read an object: it, and what cannot be read of it. Times that cannot be read are left out."""
    try:
        return msgspec.convert(document, kind), ""
    except msgspec.ValidationError as error:
        fault = str(error)
    try:
        return msgspec.convert(without_bad_times(document), kind), fault
    except msgspec.ValidationError:
        return None, fault


def without_bad_times(value: Any) -> Any:
    """A document without the times that cannot be read."""
    if isinstance(value, Mapping):
        return {key: without_bad_times(each) for key, each in value.items() if not _is_bad_time(each)}
    if isinstance(value, list):
        return [without_bad_times(each) for each in value]
    return value


def _is_bad_time(value: object) -> bool:
    if not isinstance(value, str) or not _TIME.match(value):
        return False
    try:
        msgspec.convert(value, datetime)
    except msgspec.ValidationError:
        return True
    return False
