"""Pure functions: the conditions, labels and taint that a Node should have by a report, and the patches that set them.

A JSON patch tests each value that it replaces, so it fails if somebody else has changed the value meanwhile. Conditions are
merged by their type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from attrs import field, frozen

from agent.report.names import DEVICES_READY, EFFECT, LONGEST_MESSAGE, READY, READY_LABEL, TAINT, UP_TO_DATE
from agent.report.records import Condition, Report, Status
from agent.report.verdict import Verdict, warnings, with_warnings
from agent.reporter.settings import Label, Settings

MANAGER = "trackbed-reporter"
"""The field manager under which the reporter writes, so that the API server records which labels are the reporter's."""

LAST_SECOND = 32503679999.0
"""The end of the year 2999. The admission policy refuses later times; a clock that is wrong must not stop a NotReady."""

REPORTS_WITHIN = 60.0
"""Seconds within which a kubelet reports after its start: it tries at once, and then every 10 s (syncNodeStatus in
pkg/kubelet). One that has not reached the API server within 50 s is called unreachable by Kubernetes itself, which taints its
Node (NodeMonitorGracePeriod in pkg/controller/nodelifecycle)."""

CONDITIONS = (READY, UP_TO_DATE, DEVICES_READY)
"""The types of the reporter's conditions."""

# The pattern that metav1.Condition sets for a reason. The API server does not check it for a Node's conditions, but programs
# that read them expect it. The admission policy refuses longer reasons.
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?")
_ZERO = re.compile(r"0*(\.0*)?[A-Za-z]*")

Operation = dict[str, Any]


@frozen
class Content:
    """What a condition says."""

    status: Status
    reason: str
    message: str = ""


@frozen
class Node:
    """The parts of a Node that the reporter reads. ``ours``: keys of the labels that this reporter wrote.

    ``doubled``: the types that have several conditions. Other readers may read another one than the reporter.
    ``boot_id``: the boot in which the kubelet last reported; empty if the Node has none.
    ``kubelet_spoke``: when the kubelet last reported, by the node's clock (seconds since the epoch); None if unknown.
    """

    uid: str
    version: str
    labels: Mapping[str, str] = field(factory=dict)
    ours: frozenset[str] = frozenset()
    taints: tuple[Mapping[str, Any], ...] | None = None
    conditions: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    doubled: frozenset[str] = frozenset()
    allocatable: Mapping[str, str] = field(factory=dict)
    has_labels: bool = True
    boot_id: str = ""
    kubelet_spoke: float | None = None

    def can_give(self, resource: str) -> bool:
        """Whether an extended resource is allocatable."""
        return not _ZERO.fullmatch(self.allocatable.get(resource, "0"))

    def newer_than(self, other: Node | None) -> bool:
        """Whether this is a later version of the same Node, or a different Node."""
        if other is None or other.uid != self.uid:
            return True
        try:
            return int(self.version) > int(other.version)
        except ValueError:
            return self.version != other.version


def read_node(document: Mapping[str, Any]) -> Node:
    """Read the API server's JSON of a Node.

    :raises KeyError, TypeError, AttributeError: the document is not a Node.
    """
    metadata, status = document["metadata"], document.get("status", {})
    taints = document.get("spec", {}).get("taints")
    types = [condition["type"] for condition in status.get("conditions", [])]
    return Node(
        _text(metadata["uid"]),
        _text(metadata["resourceVersion"]),
        _texts(metadata.get("labels", {})),
        frozenset(_managed(metadata.get("managedFields", []))),
        None if taints is None else tuple(_mapping(taint) for taint in taints),
        {c["type"]: _condition(c) for c in status.get("conditions", []) if c["type"] in CONDITIONS},
        frozenset(type for type in CONDITIONS if types.count(type) > 1),
        # Extended resources have a slash in their names. Others (cpu, memory) change often and do not matter here.
        _texts({name: amount for name, amount in status.get("allocatable", {}).items() if "/" in name}),
        "labels" in metadata,
        _text(status.get("nodeInfo", {}).get("bootID", "")),
        _heartbeat(status.get("conditions", [])),
    )


def _condition(condition: Mapping[str, Any]) -> dict[str, str]:
    # The API server writes a time that was never set as null.
    return _texts({name: value for name, value in condition.items() if value is not None})


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.80} is not an object")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a text")
    return value


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in values.items()}


def _heartbeat(conditions: Sequence[Mapping[str, Any]]) -> float | None:
    """When the kubelet last renewed its own condition, Ready."""
    stamp = next((c.get("lastHeartbeatTime") for c in conditions if c["type"] == "Ready"), None)
    try:
        return datetime.strptime(f"{stamp}+0000", "%Y-%m-%dT%H:%M:%SZ%z").timestamp()
    except ValueError:
        return None


def _managed(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    ours = (entry.get("fieldsV1", {}) for entry in entries if entry.get("manager") == MANAGER)
    return {key[2:] for fields in ours for key in fields.get("f:metadata", {}).get("f:labels", {}) if key[:2] == "f:"}


@frozen
class Desired:
    """What a Node should have. ``drop``: labels to remove if present. ``taint`` None: leave the taint as it is.

    ``tainted_until``: what the taint of a ready node waits for; empty if the node has none, or is not ready.
    """

    conditions: Mapping[str, Content]
    labels: Mapping[str, str]
    drop: frozenset[str]
    taint: bool | None
    tainted_until: str = ""


def desired(
    verdict: Verdict, settings: Settings, labels: Sequence[Label], node: Node, away: bool, now: float = math.inf
) -> Desired:
    """Derive what the Node should say from the report.

    :param away: the labels that select device plugins must be absent for now.
    :param now: seconds since the epoch.
    """
    plugins = frozenset(label.key for label in labels if label.role == "plugin")
    conditions = {READY: ready_condition(verdict), UP_TO_DATE: _up_to_date(verdict)}
    if not verdict.ready:
        # A plugin's label stays: removing it would delete the plugin's pod.
        dropped = frozenset({READY_LABEL}) | (plugins if away else frozenset())
        return Desired(conditions, {}, dropped, _taint(settings, True))
    wanted = {label.key: label.value for label in labels if not (away and label.key in plugins)}
    wanted[READY_LABEL] = "true"
    # After a boot the Node shows what the kubelet reported before it, until the kubelet starts and reports again.
    booted = verdict.report is not None and node.boot_id not in ("", verdict.report.boot_id)
    # While the plugins' labels are absent, the allocatable resources are those of plugins that are ending. The kubelet would
    # refuse a pod that was scheduled by them.
    waits = [
        *(["the kubelet has reported in this boot"] if booted else []),
        *(["the restarted kubelet has reported"] if _restarted(verdict, node, now) else []),
        *(["the device plugins' labels are set again"] if away else []),
        *(f"{resource} is allocatable" for resource in settings.required_resources if not node.can_give(resource)),
    ]
    # A required resource that disappears later needs no taint: the scheduler sees that none is allocatable.
    keep = True if booted or READY_LABEL not in node.labels else None
    taint = _taint(settings, keep if waits else False)
    stays = taint or (taint is None and any(is_ours(each) for each in node.taints or ()))
    until = " and ".join(waits) if stays else ""
    return Desired(conditions, wanted, node.ours - wanted.keys(), taint, until)


def _restarted(verdict: Verdict, node: Node, now: float) -> bool:
    """Whether the kubelet was restarted and has not reported since: the Node shows resources of the kubelet before it.

    A start time in the future is ignored: the clock was set back after it was recorded.
    """
    started, spoke = verdict.report.kubelet if verdict.report is not None else 0.0, node.kubelet_spoke
    if spoke is None or not 0.0 < started <= now:
        return False
    # Heartbeats are in whole seconds, so one of the second of the start may be of either kubelet: if the new one has nothing
    # else to say in that second, its report changes nothing. One in the future was written before the clock was set back. The
    # new kubelet's report is here by a known time.
    if spoke == int(started) or spoke > now:
        return now < started + REPORTS_WITHIN
    return spoke < started


def _taint(settings: Settings, wanted: bool | None) -> bool | None:
    return wanted if settings.taint_lifted_by == "reporter" else None


def ready_condition(verdict: Verdict) -> Content:
    """The condition TrackbedReady. Its message contains no ages: they would change with each heartbeat."""
    report = verdict.report
    if verdict.ready:
        return Content("True", "AsSpecified", f"the node is as its spec says{_warned(report)}")
    if report is None:
        return Content("Unknown", "NoReport", shortened(verdict.reasons))
    if not verdict.fresh:
        return Content("Unknown", "AgentSilent", "the agent has not renewed its report; see: systemctl status trackbed")
    failing = [c for c in report.conditions if c.severity == "required" and c.status != "True"]
    return Content("False", _reason(failing), shortened(verdict.reasons))


def _warned(report: Report | None) -> str:
    """The number of warnings in a report, and their types."""
    conditions = report.conditions if report else ()
    types = ", ".join(condition.type for condition in warnings(conditions))
    return f"{with_warnings(conditions)}: {types}" if types else ""


def _up_to_date(verdict: Verdict) -> Content:
    report = verdict.report
    if report is None or not verdict.fresh:
        return Content("Unknown", "AgentSilent")
    if report.up_to_date:
        return Content("True", "SpecDone")
    waiting = [c for c in report.conditions if c.type == "UpToDate" and c.status != "True"]
    return Content("False", _reason(waiting, "NotYet"), shortened([c.text for c in waiting] or [report.refusal]))


def devices_ready(verdict: Verdict, node: Node) -> Desired | None:
    """The condition TrackbedDevicesReady, which names the NICs and VFs that are not ready; None: there is nothing to say."""
    nics = verdict.report.nics if verdict.fresh and verdict.report is not None else ()
    lacking: dict[str, str] = {}
    for nic in nics:
        lacking |= {} if nic.ready else {f"{nic.name} ({nic.reason})": nic.certainty}
        lacking |= {f"{nic.name} VF {vf.index} ({vf.reason})": vf.certainty for vf in nic.faulty_vfs}
    if nics and not lacking:
        said = Content("True", "AllReady")
    elif nics:
        unknown = set(lacking.values()) == {"unknown"}
        said = Content("Unknown" if unknown else "False", "SomeNotReady", shortened([*lacking]))
    elif DEVICES_READY in node.conditions:
        said = Content("Unknown", "NotYetRead" if verdict.fresh else "AgentSilent")
    else:
        return None
    return Desired({DEVICES_READY: said}, {}, frozenset(), None)


def _reason(conditions: Sequence[Condition], otherwise: str = "NotReady") -> str:
    reason = conditions[0].reason if conditions else otherwise
    return reason if _REASON.fullmatch(reason) else otherwise


def shortened(lines: Sequence[str], longest: int = LONGEST_MESSAGE) -> str:
    """The lines as one text, cut off if it is too long."""
    text = "; ".join(lines)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def changes_more_than_messages(wanted: Desired, node: Node) -> bool:
    """Whether the patches would change more than messages: a status, a reason, a label or the taint."""
    statuses = any(
        type in node.doubled
        or (have := node.conditions.get(type)) is None
        or (have.get("status"), have.get("reason")) != (want.status, want.reason)
        for type, want in wanted.conditions.items()
    )
    return statuses or bool(node_patch(wanted, node))


def node_patch(wanted: Desired, node: Node) -> list[Operation]:
    """The JSON patch for the Node's labels and taint; empty if nothing differs."""
    return [*label_patch(wanted, node), *taint_patch(wanted, node)]


def label_patch(wanted: Desired, node: Node) -> list[Operation]:
    """The JSON patch for the Node's labels; empty if nothing differs."""
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


def taint_patch(wanted: Desired, node: Node) -> list[Operation]:
    """The JSON patch for the Node's taint; empty if nothing differs."""
    taints = node.taints
    ours = [index for index, taint in enumerate(taints or ()) if is_ours(taint)]
    # The API server accepts one taint of a key and an effect. Another's, which has a value, keeps pods away as well.
    there = any((taint.get("key"), taint.get("effect")) == (TAINT, EFFECT) for taint in taints or ())
    if wanted.taint is None or (there if wanted.taint else not ours):
        return []
    if not wanted.taint:
        path, value = f"/spec/taints/{ours[0]}", dict((taints or ())[ours[0]])
        return [_test(path, value), {"op": "remove", "path": path}]
    taint = {"key": TAINT, "effect": EFFECT}
    if taints is None:
        return [_test("/spec/taints", None), _add("/spec/taints", [taint])]
    return [_add("/spec/taints/-", taint)]


def is_ours(taint: Mapping[str, Any]) -> bool:
    """Whether the reporter wrote this taint."""
    return taint.get("key") == TAINT and taint.get("effect") == EFFECT and not taint.get("value")


def _test(path: str, value: Any) -> Operation:
    return {"op": "test", "path": path, "value": value}


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def status_patch(wanted: Desired, node: Node, now: float) -> dict[str, Any] | None:
    """The strategic merge patch for nodes/status: the conditions that differ; None if none does.

    :param now: seconds since the epoch.
    """
    stamp = time_stamp(now)
    changed = []
    for type, want in sorted(wanted.conditions.items()):
        have = node.conditions.get(type, {})
        content = {"status": want.status, "reason": want.reason, "message": want.message}
        if type in node.doubled:
            changed.append({"$patch": "delete", "type": type})
        elif all(have.get(name, "") == value for name, value in content.items()):
            continue
        changed_at = have.get("lastTransitionTime", stamp) if have.get("status") == want.status else stamp
        changed.append({"type": type, **content, "lastHeartbeatTime": stamp, "lastTransitionTime": changed_at})
    return {"status": {"conditions": changed}} if changed else None


def time_stamp(now: float, micro: bool = False) -> str:
    """Seconds since the epoch as the API writes times; ``micro``: with microseconds, as in a Lease."""
    moment = datetime.fromtimestamp(min(max(now, 0.0), LAST_SECOND), timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")
