"""Objects of the API server: the reporter's Node, and the objects that the operators' commands read."""

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

import msgspec
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node

from agent.report import names
from agent.report.dra_devices import read_devices
from agent.report.printable import printable
from agent.report.records import NicVerdict
from agent.report.verdict import Verdict
from agent.reporter.kubernetes.api import Refused, read_document
from agent.reporter.kubernetes.device_rules import judged, read_rules, writes
from agent.reporter.kubernetes.node import desired, node_patch, read_node, status_patch
from agent.reporter.kubernetes.tokens import claims_of
from agent.reporter.settings import Quarantine, Settings
from fleet.reading import read
from fleet.standing import standings
from tests.fuzz.targets import choose, chosen

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
SETTINGS = Settings("n1", "https://api", "/ca", required_resources=("a.com/vf",))
STAMP = "2026-01-01T00:00:00Z"
MANAGED = [{"manager": "trackbed-reporter", "time": STAMP, "fieldsV1": {"f:metadata": {"f:labels": {"f:a": {}}}}}]
NODE: dict[str, Any] = {
    "metadata": {"name": "n1", "uid": "u", "resourceVersion": "12", "labels": {"a": "b"}, "managedFields": MANAGED},
    "spec": {"taints": [{"key": names.TAINT, "effect": "NoSchedule", "timeAdded": STAMP}], "unschedulable": True},
    "status": {
        "conditions": [
            {"type": kind, "status": "True", "reason": "Why", "message": "m", "lastTransitionTime": STAMP}
            for kind in (names.READY, names.UP_TO_DATE)
        ]
        + [{"type": "Ready", "status": "True", "lastHeartbeatTime": STAMP}],
        "allocatable": {"a.com/vf": "4", "cpu": "8"},
        "nodeInfo": {"bootID": "boot"},
    },
}
LEASE = {
    "metadata": {"name": "n1", "managedFields": MANAGED, "annotations": {names.NOT_READY: "why"}},
    "spec": {"renewTime": "2026-01-01T00:00:00.000000Z", "leaseDurationSeconds": 40, "holderIdentity": "n1"},
}
# What is read of a ResourceSlice and of a DeviceTaintRule, in one object.
SLICE_AND_RULE = {
    "metadata": {"name": "n1.7", "uid": "u", "labels": {names.EVICT_AFTER: "9"}, "ownerReferences": [{"uid": "u"}]},
    "spec": {
        "driver": "dra.net",
        "pool": {"name": "n1"},
        "devices": [{"name": "a", "attributes": {"dra.net/pciAddress": {"string": "0000:3b:00.0"}}}],
        "deviceSelector": {"driver": "dra.net", "pool": "n1", "device": "a"},
        "taint": {"key": names.QUARANTINE, "value": "0000-3b-00.0", "effect": "NoSchedule"},
    },
}


def _node(data: bytes) -> None:
    # As in NodeWatch: these exceptions are the sender's errors.
    with suppress(Refused, KeyError, TypeError, AttributeError):
        node = read_node(read_document(data))
        # From here on it is the reporter's own fault.
        _publish(node)


def _publish(node: Any) -> None:
    try:
        for verdict in (Verdict(None, ("why",)), Verdict(None, ())):
            wanted = desired(verdict, SETTINGS, (), node, False)
            json.dumps([node_patch(wanted, node), status_patch(wanted, node, 1e9)])
            node.can_give("a.com/vf")
            node.newer_than(node)
    except (KeyError, TypeError, AttributeError) as error:
        raise AssertionError(f"a Node that was accepted stops the reporter: {error!r}") from error


def _devices(data: bytes) -> None:
    # As in DeviceTaints: these exceptions are the sender's errors.
    with suppress(Refused, KeyError, TypeError, AttributeError):
        listing = read_document(data)
        own, rules = read_devices(listing, "n1")[0], read_rules(listing, "n1")
        try:
            bad = NicVerdict("rail0", "0000:3b:00.0", True, False)
            json.dumps(writes("n1", "u", Quarantine(), judged([bad]), own, rules).create)
        except (KeyError, TypeError, AttributeError) as error:
            raise AssertionError(f"an answer that was accepted stops the reporter: {error!r}") from error


def _plain(data: bytes) -> Any:
    # The control host's client decodes JSON as strictly as json does.
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and not _has_time_without_zone(document) else None


def _has_time_without_zone(value: Any) -> bool:
    """The API server stores no such time: Go's parser of RFC 3339 refuses it."""
    if isinstance(value, dict | list):
        return any(map(_has_time_without_zone, value.values() if isinstance(value, dict) else value))
    try:
        return isinstance(value, str) and msgspec.convert(value, datetime).tzinfo is None
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False


def _standing(data: bytes) -> None:
    documents = [document for line in data.split(b"\n") if (document := _plain(line)) is not None]
    nodes = {f"n{at}": node for at, one in enumerate(documents) if (node := read(one, Node)[0]) is not None}
    leases = {f"n{at}": lease for at, one in enumerate(documents) if (lease := read(one, Lease)[0]) is not None}
    for one in standings(nodes, leases, NOW):
        printable(f"{one.name} {one.reason} {one.message}").encode(errors="surrogatepass")


def _token(data: bytes) -> None:
    claims_of(data.decode(errors="replace"))


def check(data: bytes) -> None:
    """Read an object."""
    choose(data, (_node, _standing, _token, _devices))


def seeds() -> Sequence[bytes]:
    """One object of each kind."""
    both = b"\n".join(json.dumps(one).encode() for one in (NODE, LEASE))
    claims = {"iat": 1, "exp": 2, "kubernetes.io": {"node": {"name": "n1", "uid": "u"}}}
    part = base64.urlsafe_b64encode(json.dumps(claims).encode())
    return [
        chosen(0, json.dumps(NODE).encode()),
        chosen(1, both),
        chosen(2, part),
        chosen(3, json.dumps({"items": [SLICE_AND_RULE]}).encode()),
    ]
