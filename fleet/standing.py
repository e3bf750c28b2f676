"""Pure functions: the state of each node, derived from its Node and its Lease."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from attrs import frozen
from lightkube.models.core_v1 import NodeCondition
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node

from agent.report import names
from agent.report.age import say_age
from fleet.objects import annotations_of, condition_of, is_cordoned, is_tainted, metadata_of, name_of

AHEAD = 300.0
"""Seconds by which a renewal may be ahead of the API server's clock: several API servers have several clocks, and a long list
takes time. A time further ahead is forged: a node can write any time there."""

UNREADABLE = "Unreadable"
"""The reason of a node whose Node or Lease cannot be read in full."""


KUBELET = "KubeletNotReady"
"""The reason of a node whose reporter says that it is ready, and whose kubelet does not."""


@frozen
class Standing:
    """The state of one node. ``ready`` is Unknown once its Lease has expired, even if the condition still says True.

    ``joined``: there is a Node of this name. Without one, the node has not joined the cluster yet, or its Node was deleted.
    ``renewed``: when the Lease was last renewed, by the API server's clock; None: there is no Lease.
    ``condition``: the status of its condition TrackbedReady; None: it has no such condition.
    ``swept``: it is tainted and its condition is Unknown, by a sweep, or by a reporter without a fresh report of its agent.
    ``missing``: it has the condition, but no Lease.
    ``notice``: why it is not ready, if its Lease says so, since the reporter could not write the Node; else empty.
    """

    name: str
    ready: str
    since: datetime | None
    reason: str
    message: str
    up_to_date: str
    condition: str | None
    joined: bool
    renewed: datetime | None
    expired: bool
    swept: bool
    tainted: bool
    cordoned: bool
    maintenance: bool
    spec_hash: str
    agent_version: str
    missing: bool = False
    notice: str = ""

    @property
    def withdrawn(self) -> bool:
        """Whether its Lease says that it is not ready, while its Node still admits pods or does not say so.

        An expired Lease says nothing: its node is silent.
        """
        # A sweep's own condition has the same reason.
        unsaid = self.reason == names.NOTICE and self.condition != "False"
        return self.joined and self.notice != "" and not self.expired and (not self.tainted or unsaid)


def standings(
    nodes: Mapping[str, Node],
    leases: Mapping[str, Lease],
    now: datetime,
    faults: Mapping[str, str] | None = None,
    expected: Iterable[str] = (),
) -> list[Standing]:
    """The state of each node that Trackbed manages, sorted by name. Other Nodes and other Leases are left out.

    :param faults: what cannot be read of a Node or Lease, by the node's name.
    :param expected: names to include although there may be no Node: it never joined, or was deleted.
    """
    unread = faults or {}
    known = {name for name in {*nodes, *leases, *unread} if is_managed(nodes.get(name), leases.get(name))}
    return [
        standing(name, nodes.get(name), leases.get(name), now, unread.get(name, ""))
        for name in sorted({*known, *expected})
    ]


def unreadable(nodes: Mapping[str, str], leases: Mapping[str, str]) -> dict[str, str]:
    """What cannot be read of each node: of its Node, and of its Lease."""
    faults = {name: f"its Lease cannot be read: {fault}" for name, fault in leases.items()}
    return {**faults, **{name: f"its Node cannot be read: {fault}" for name, fault in nodes.items()}}


def is_managed(node: Node | None, lease: Lease | None) -> bool:
    """Whether Trackbed manages the node with these objects. If nothing of them can be read, it may, so it counts."""
    if node is None and lease is None:
        return True
    there = node or Node()
    return condition_of(there, names.READY) is not None or is_tainted(there) or is_heartbeat(lease or Lease())


def is_heartbeat(lease: Lease) -> bool:
    """Whether a Lease is a reporter's: its holder is the node that it is named after. Other programs may keep Leases, too."""
    return lease.spec is not None and lease.spec.holderIdentity == name_of(lease)


def standing(name: str, node: Node | None, lease: Lease | None, now: datetime, fault: str = "") -> Standing:
    """The state of one node at the API server's time ``now``.

    :param fault: what cannot be read of its objects. Such a node is not ready, and its heartbeat does not count.
    """
    if lease and node and not _is_of(lease, node):
        lease = None
    there = node or Node()
    ready, up_to_date = condition_of(there, names.READY), condition_of(there, names.UP_TO_DATE)
    at = renewed(lease) if lease else None
    age = (now - at).total_seconds() if at else None
    notes = annotations_of(lease or Lease())
    # A node that is tainted and has no condition has just registered: it has no heartbeat that could be lost.
    expired = age > duration(lease) if age is not None and lease else ready is not None
    if not fault and age is not None and age < -AHEAD:
        fault = f"its Lease cannot be read: it says that it is renewed in {say_age(-age)}"
    expired = expired or bool(fault)
    status, since, reason, message = _judged(node, lease, at, now, fault, expired)
    return Standing(
        name=name,
        ready=status,
        since=since,
        # Only what a reporter writes is bounded by the admission policies.
        reason=reason[: names.LONGEST_MESSAGE],
        message=message[: names.LONGEST_MESSAGE],
        up_to_date=up_to_date.status if up_to_date else "Unknown",
        condition=ready.status if ready else None,
        joined=node is not None,
        renewed=at,
        expired=expired,
        swept=is_tainted(there) and ready is not None and ready.status == "Unknown",
        tainted=is_tainted(there),
        cordoned=is_cordoned(there),
        maintenance=names.MAINTENANCE in annotations_of(there),
        spec_hash=notes.get(names.SPEC_HASH, "")[: names.LONGEST_NOTE],
        agent_version=notes.get(names.AGENT_VERSION, "")[: names.LONGEST_NOTE],
        missing=lease is None and ready is not None and not fault,
        notice=_notice(lease),
    )


def _is_of(lease: Lease, node: Node) -> bool:
    """Whether a Lease is this Node's. For a while there may still be one of a deleted Node with the same name."""
    owners = metadata_of(lease).ownerReferences or ()
    return not owners or any(owner.uid == metadata_of(node).uid for owner in owners)


def _judged(
    node: Node | None, lease: Lease | None, at: datetime | None, now: datetime, fault: str, expired: bool
) -> tuple[str, datetime | None, str, str]:
    """Status, since when, reason and message, by the first fault. ``at``: when the Lease was renewed."""
    if fault:
        return "Unknown", None, UNREADABLE, fault
    there = node or Node()
    ready, kubelet, notice = condition_of(there, names.READY), condition_of(there, "Ready"), _notice(lease)
    if expired and (ready is None or ready.status != "Unknown"):
        if at is not None:
            return "Unknown", at, names.EXPIRED, f"no heartbeat for {say_age((now - at).total_seconds())}"
        return "Unknown", at, names.EXPIRED, "its Lease is gone" if lease is None else "its Lease was never renewed"
    if node is not None and notice and not expired and not _says_not_ready(ready):
        return "False", None, names.NOTICE, notice
    if ready is not None and ready.status == "True":
        if kubelet is None:
            return "Unknown", None, KUBELET, "the Node has no condition Ready: its kubelet has not started"
        if kubelet.status != "True":
            why = kubelet.message or kubelet.reason or "no reason given"
            message = f"the kubelet's condition Ready is {kubelet.status}: {why}"
            return _plain(kubelet.status), kubelet.lastTransitionTime, KUBELET, message
    if ready is not None:
        status = "True" if ready.status == "True" else _plain(ready.status)
        return status, ready.lastTransitionTime, ready.reason or "", ready.message or ""
    if node is not None:
        return "Unknown", None, "NotPublished", "its reporter has published nothing yet"
    message = "the cluster has no Node of this name: it has not joined yet, its Node was deleted, or node_name is wrong"
    return "Unknown", None, "NotJoined", message


def _says_not_ready(ready: NodeCondition | None) -> bool:
    """Whether the reporter has written to the Node that it is not ready. Unknown after a lost heartbeat is a sweep's."""
    return ready is not None and (
        ready.status == "False" or (ready.status == "Unknown" and ready.reason != names.EXPIRED)
    )


def _notice(lease: Lease | None) -> str:
    """Why the node is not ready, as its Lease says; empty if it does not say so."""
    return annotations_of(lease or Lease()).get(names.NOT_READY, "")[: names.LONGEST_MESSAGE]


def _plain(status: str) -> str:
    """False, or Unknown for every other status."""
    return status if status == "False" else "Unknown"


def renewed(lease: Lease) -> datetime | None:
    """When the Lease was last renewed, by the API server's clock.

    The API server records when each field manager last wrote. The time in the Lease itself is the node's: by that, a node whose
    clock is wrong would seem silent, or alive long after its end.
    """
    entries = metadata_of(lease).managedFields or []
    stamped = [entry.time for entry in entries if entry.time and _owns(entry.fieldsV1, "f:spec", "f:renewTime")]
    return max(stamped) if stamped else (lease.spec.renewTime if lease.spec else None)


def _owns(fields: object, *path: str) -> bool:
    for step in path:
        if not isinstance(fields, Mapping) or step not in fields:
            return False
        fields = fields[step]
    return True


def duration(lease: Lease) -> float:
    """Seconds for which a renewal counts: what the Lease says, but never more than a reporter writes."""
    given = lease.spec.leaseDurationSeconds if lease.spec else None
    return float(min(given, names.LEASE_DURATION) if given is not None else names.LEASE_DURATION)


def nothing_waits(node: Node) -> bool | None:
    """Whether by its conditions no change of the node waits; None: they do not say. They may be of long ago."""
    ready, up_to_date, devices = (
        condition_of(node, type) for type in (names.READY, names.UP_TO_DATE, names.DEVICES_READY)
    )
    statuses = [one.status if one else "" for one in (ready, up_to_date)]
    # A reporter that knows no NIC writes no condition of devices. A NIC that is not required may wait on a node that is ready.
    statuses += [devices.status] if devices else []
    if "False" in statuses:
        return False
    return True if set(statuses) == {"True"} else None


def unready(listed: Iterable[Standing]) -> list[Standing]:
    """The nodes that are not ready."""
    return [one for one in listed if one.ready != "True"]


def since(one: Standing, now: datetime) -> str:
    """For how long a node has been in its state."""
    return say_age((now - one.since) / timedelta(seconds=1)) if one.since else "-"
