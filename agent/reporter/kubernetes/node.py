"""What is to be published of a node, and the patches that do it. All of it is pure.

A JSON patch `test`s what it replaces, so that it fails rather than undoes what somebody else has written meanwhile; conditions
are merged by their type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from attrs import field, frozen

from agent.report.records import Condition, Report, Status
from agent.reporter.settings import READY_LABEL, Label, Settings
from agent.reporter.verdict import Verdict

MANAGER = "trackbed-reporter"
"""By this name (a field manager's) the API server keeps who wrote a label."""

TAINT = "readiness.k8s.io/trackbed"
EFFECT = "NoSchedule"

READY = "TrackbedReady"
UP_TO_DATE = "TrackbedUpToDate"

LONGEST_MESSAGE = 1024
"""Characters of a condition's message. The admission policy refuses more; the API server has no limit of its own."""

LONGEST_NOTICE = 128
"""Characters of the Lease's annotation; the admission policy refuses more."""

LAST_SECOND = 32503679999.0
"""The end of the year 2999: the admission policy refuses later times, and a clock that is wrong must not stop a NotReady."""

LEASE_SECONDS = 900
"""After so many seconds without a renewal a node counts as silent."""

SPEC_HASH = "trackbed.internal/spec-hash"
AGENT_VERSION = "trackbed.internal/agent-version"
"""Annotations of the Lease: a Node's own are not the reporter's to write."""

NOT_READY = "trackbed.internal/not-ready"
"""Annotation of the Lease: why the node is not ready, while the Node itself cannot be made to say so."""

# metav1.Condition's pattern of a reason; a Node's own conditions have none, and readers expect that one.
# The admission policy refuses a longer one.
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?")
_ZERO = re.compile(r"0*\.?0*[A-Za-z]*")

Operation = dict[str, Any]


@frozen
class Said:
    """A condition's content."""

    status: Status
    reason: str
    message: str = ""


@frozen
class Node:
    """What is of interest of a Node. ``ours``: keys of the labels that this reporter has written.

    ``boot_id``: of the boot in which the kubelet has told what is allocatable; empty: it does not say.
    ``kubelet_spoke``: when it did so last, by its node's clock (seconds since the epoch); None: it does not say.
    """

    uid: str
    version: str
    labels: Mapping[str, str] = field(factory=dict)
    ours: frozenset[str] = frozenset()
    taints: tuple[Mapping[str, Any], ...] | None = None
    conditions: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    allocatable: Mapping[str, str] = field(factory=dict)
    has_labels: bool = True
    boot_id: str = ""
    kubelet_spoke: float | None = None

    def can_give(self, resource: str) -> bool:
        """Whether an extended resource is allocatable."""
        return not _ZERO.fullmatch(self.allocatable.get(resource, "0"))

    def newer_than(self, other: Node | None) -> bool:
        """Whether this is a later state of the same Node, or another Node."""
        if other is None or other.uid != self.uid:
            return True
        try:
            return int(self.version) > int(other.version)
        except ValueError:
            return self.version != other.version


def read_node(document: Mapping[str, Any]) -> Node:
    """Read the API server's JSON of a Node."""
    metadata, status = document["metadata"], document.get("status", {})
    taints = document.get("spec", {}).get("taints")
    return Node(
        metadata["uid"],
        metadata["resourceVersion"],
        metadata.get("labels", {}),
        frozenset(_managed(metadata.get("managedFields", []))),
        None if taints is None else tuple(taints),
        {c["type"]: c for c in status.get("conditions", []) if c["type"] in (READY, UP_TO_DATE)},
        # Only what is extended has a slash; cpu and memory change by themselves.
        {name: amount for name, amount in status.get("allocatable", {}).items() if "/" in name},
        "labels" in metadata,
        status.get("nodeInfo", {}).get("bootID", ""),
        _heartbeat(status.get("conditions", [])),
    )


def _heartbeat(conditions: Sequence[Mapping[str, Any]]) -> float | None:
    """The heartbeat of the kubelet's own condition."""
    stamp = next((c.get("lastHeartbeatTime") for c in conditions if c["type"] == "Ready"), None)
    try:
        return datetime.strptime(f"{stamp}+0000", "%Y-%m-%dT%H:%M:%SZ%z").timestamp()
    except ValueError:
        return None


def _managed(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    ours = (entry.get("fieldsV1", {}) for entry in entries if entry.get("manager") == MANAGER)
    return {key[2:] for fields in ours for key in fields.get("f:metadata", {}).get("f:labels", {}) if key[:2] == "f:"}


@frozen
class Wish:
    """What a Node should say. ``taint`` None: it stays as it is. ``drop``: labels that go, where they are."""

    conditions: Mapping[str, Said]
    labels: Mapping[str, str]
    drop: frozenset[str]
    taint: bool | None


def desired(
    verdict: Verdict, settings: Settings, labels: Sequence[Label], node: Node, away: bool, now: float = math.inf
) -> Wish:
    """What the Node should say by the report.

    :param away: the labels that select device plugins are to be away for now.
    :param now: seconds since the epoch.
    """
    plugins = frozenset(label.key for label in labels if label.role == "plugin")
    conditions = {READY: _ready(verdict), UP_TO_DATE: _up_to_date(verdict)}
    if not verdict.ready:
        # A plugin's label stays: without it the plugin's pod would be deleted.
        dropped = frozenset({READY_LABEL}) | (plugins if away else frozenset())
        return Wish(conditions, {}, dropped, _taint(settings, True))
    wanted = {label.key: label.value for label in labels if not (away and label.key in plugins)}
    wanted[READY_LABEL] = "true"
    # After a boot the Node says what its kubelet said before, until that has started and speaks again.
    booted = verdict.report is not None and node.boot_id not in ("", verdict.report.boot_id)
    # What is allocatable while the plugins are away was told by those that go: a pod would be refused by the kubelet.
    stale = booted or away or _restarted(verdict, node, now)
    lifted = not stale and all(node.can_give(resource) for resource in settings.required_resources)
    # A resource that is lost later on speaks for itself: the scheduler finds none of it.
    keep = True if booted or READY_LABEL not in node.labels else None
    return Wish(conditions, wanted, node.ours - wanted.keys(), _taint(settings, False if lifted else keep))


def _restarted(verdict: Verdict, node: Node, now: float) -> bool:
    """Whether the kubelet was started since it has spoken last: the Node says what its plugins offered to the one before.

    A start that is still to come was stamped by a clock that has been put back since, and tells nothing.
    """
    started = verdict.report.kubelet if verdict.report is not None else 0.0
    # Heartbeats are in whole seconds.
    return node.kubelet_spoke is not None and node.kubelet_spoke <= int(started) and started <= now


def _taint(settings: Settings, wanted: bool | None) -> bool | None:
    return wanted if settings.taint_lifted_by == "reporter" else None


def _ready(verdict: Verdict) -> Said:
    """TrackbedReady. Its message has no ages in it: each heartbeat would change them."""
    report = verdict.report
    if verdict.ready:
        return Said("True", "AsSpecified", "the node is as its spec says")
    if report is None:
        return Said("Unknown", "NoReport", _short(verdict.reasons))
    if not verdict.fresh:
        return Said("Unknown", "AgentSilent", "the agent does not vouch for the node; see: systemctl status trackbed")
    failing = [c for c in report.conditions if c.severity == "required" and c.status != "True"]
    return Said("False", _reason(failing), _short(verdict.reasons))


def _up_to_date(verdict: Verdict) -> Said:
    report = verdict.report
    if report is None or not verdict.fresh:
        return Said("Unknown", "AgentSilent")
    if report.up_to_date:
        return Said("True", "SpecDone")
    waiting = [c for c in report.conditions if c.type == "UpToDate" and c.status != "True"]
    return Said("False", _reason(waiting, "NotYet"), _short([c.message for c in waiting] or [report.refusal]))


def _reason(conditions: Sequence[Condition], otherwise: str = "NotReady") -> str:
    reason = conditions[0].reason if conditions else otherwise
    return reason if _REASON.fullmatch(reason) else otherwise


def _short(lines: Sequence[str], longest: int = LONGEST_MESSAGE) -> str:
    text = "; ".join(lines)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def turns(wanted: Wish, node: Node) -> bool:
    """Whether publishing it would change more than a message."""
    said = node.conditions
    statuses = any(
        (have := said.get(type)) is None or (have.get("status"), have.get("reason")) != (want.status, want.reason)
        for type, want in wanted.conditions.items()
    )
    return statuses or bool(node_patch(wanted, node))


def node_patch(wanted: Wish, node: Node) -> list[Operation]:
    """The JSON patch of the Node itself: labels and taint; empty if all is as wanted."""
    return [*label_patch(wanted, node), *taint_patch(wanted, node)]


def label_patch(wanted: Wish, node: Node) -> list[Operation]:
    """The part of :func:`node_patch` that is about labels."""
    operations: list[Operation] = []
    changed = {key: value for key, value in wanted.labels.items() if node.labels.get(key) != value}
    if changed and not node.has_labels:
        operations += [_test("/metadata/labels", None), _add("/metadata/labels", {})]
    for key, value in sorted(changed.items()):
        path = _path(key)
        operations += [_test(path, node.labels[key])] if key in node.labels else []
        operations.append(_add(path, value))
    for key in sorted(wanted.drop & node.labels.keys()):
        operations += [_test(_path(key), node.labels[key]), {"op": "remove", "path": _path(key)}]
    return operations


def _path(key: str) -> str:
    # RFC 6901: "~" and "/" are escaped.
    return f"/metadata/labels/{key.replace('~', '~0').replace('/', '~1')}"


def taint_patch(wanted: Wish, node: Node) -> list[Operation]:
    """The part of :func:`node_patch` that is about the taint."""
    taints = node.taints
    ours = [index for index, taint in enumerate(taints or ()) if is_ours(taint)]
    if wanted.taint is None or wanted.taint == bool(ours):
        return []
    if not wanted.taint:
        path, value = f"/spec/taints/{ours[0]}", dict((taints or ())[ours[0]])
        return [_test(path, value), {"op": "remove", "path": path}]
    taint = {"key": TAINT, "effect": EFFECT}
    if taints is None:
        return [_test("/spec/taints", None), _add("/spec/taints", [taint])]
    return [_add("/spec/taints/-", taint)]


def is_ours(taint: Mapping[str, Any]) -> bool:
    """Whether a taint is the reporter's."""
    return taint.get("key") == TAINT and taint.get("effect") == EFFECT and not taint.get("value")


def _test(path: str, value: Any) -> Operation:
    return {"op": "test", "path": path, "value": value}


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def status_patch(wanted: Wish, node: Node, now: float) -> dict[str, Any] | None:
    """The strategic merge patch of nodes/status: the conditions that differ; None if none does.

    :param now: seconds since the epoch.
    """
    stamp = time_stamp(now)
    changed = []
    for type, want in sorted(wanted.conditions.items()):
        have = node.conditions.get(type, {})
        content = {"status": want.status, "reason": want.reason, "message": want.message}
        if all(have.get(name, "") == value for name, value in content.items()):
            continue
        turned = have.get("lastTransitionTime", stamp) if have.get("status") == want.status else stamp
        changed.append({"type": type, **content, "lastHeartbeatTime": stamp, "lastTransitionTime": turned})
    return {"status": {"conditions": changed}} if changed else None


def time_stamp(now: float, micro: bool = False) -> str:
    """Seconds since the epoch as the API has times; ``micro``: as a Lease has them."""
    moment = datetime.fromtimestamp(min(max(now, 0.0), LAST_SECOND), timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


def notice_of(verdict: Verdict) -> str:
    """Why the node is not ready, as its Lease says it."""
    said = _ready(verdict)
    return _short([f"{said.reason}: {said.message}"], LONGEST_NOTICE)


def lease(
    settings: Settings, node: Node, report: Report, namespace: str, now: float, notice: str | None = None
) -> dict[str, Any]:
    """The node's Lease, renewed; it goes with its Node, and says which spec it follows by which agent.

    :param notice: why the node is not ready; None: that annotation is to be absent.
    """
    owner = {"apiVersion": "v1", "kind": "Node", "name": settings.node_name, "uid": node.uid}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": settings.node_name,
            "namespace": namespace,
            "annotations": {SPEC_HASH: report.spec_hash, AGENT_VERSION: report.agent_version, NOT_READY: notice},
            "ownerReferences": [owner],
        },
        "spec": {
            "holderIdentity": settings.node_name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": time_stamp(now, micro=True),
        },
    }


def difference(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that makes ``there`` have all that is wanted."""
    found = {}
    for key, value in wanted.items():
        beside = there.get(key)
        if isinstance(value, Mapping) and isinstance(beside, Mapping):
            value = difference(value, beside)
            if not value:
                continue
        elif value == beside:
            continue
        found[key] = value
    return found


def without_absent(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The object that a merge patch of nothing makes: what is to be absent is left out."""
    return {
        key: without_absent(value) if isinstance(value, Mapping) else value
        for key, value in wanted.items()
        if value is not None
    }


def plugin_resources(labels: Collection[Label]) -> tuple[str, ...]:
    """What the device plugins make allocatable."""
    return tuple(label.resource for label in labels if label.role == "plugin" and label.resource)
