"""The DeviceTaintRules of reporters and of maintenances, as a sweep sees them: which it removes, and for which it evicts pods.

A reporter keeps new claims from a bad device, and evicts nobody: it cannot know whether its NIC is bad, or a switch, or
Trackbed itself, on all nodes at once. A sweep sees all nodes. It needs no memory: the rules say since when, and how many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

from attrs import frozen
from lightkube import ApiError
from lightkube.operators import exists
from lightkube.types import PatchType

from agent.report import names
from fleet.api import ABSENT, CONFLICTS, FORBIDDEN, Api, answers, code
from fleet.reading import PlainDeviceTaintRule, all_of, read_time

EVICTS = "NoExecute"


@frozen
class DeviceRule:
    """A rule. ``uid``: the rule's own. ``node``: the Node's name, and ``owner`` its uid.

    ``evict_after``: seconds from ``created``; None: never.
    ``maintains``: a maintenance of a NIC has made it (fleet/nic_devices.py), and no reporter.
    """

    name: str
    uid: str
    node: str
    owner: str
    device: str
    effect: str
    created: datetime | None
    evict_after: int | None
    maintains: bool = False

    def is_due(self, now: datetime) -> bool:
        """Whether the pods that use its device may be evicted."""
        if self.effect != "NoSchedule" or self.evict_after is None or self.created is None:
            return False
        return (now - self.created).total_seconds() >= self.evict_after


@frozen
class DevicePlan:
    """What a sweep would do. ``nodes``: those with a rule that evicts, or is due to; ``allowed``: how many they may be."""

    remove: tuple[DeviceRule, ...] = ()
    evict: tuple[DeviceRule, ...] = ()
    nodes: tuple[str, ...] = ()
    allowed: int = 0

    @property
    def refused(self) -> bool:
        """Whether devices of so many nodes are bad that the cause must be elsewhere. None of them is evicted then."""
        return len(self.nodes) > self.allowed


def plan(
    rules: Iterable[DeviceRule],
    uids: Mapping[str, str],
    silent: Collection[str],
    speaking: Collection[str],
    halted: bool,
    allowed: int,
    now: datetime,
    maintained: Collection[str] = (),
) -> DevicePlan:
    """Decide which rules to remove, and which devices to take from their users.

    Rules that evict already count, too. Otherwise a fault that spreads slowly would evict the whole fleet in small steps.

    :param uids: the uid of each Node.
    :param silent: the nodes without a heartbeat: nobody knows whether their devices are still bad, and the nodes are tainted.
    :param speaking: those whose condition says whether they are ready. Others have no fresh report, and evict nobody.
    :param maintained: those with the record of a maintenance. Rules of a maintenance without its record are left over.
    :param halted: more nodes are silent than may be, so nothing is done to these, nor is anybody evicted.
    """
    remove, due, evicting = [], [], set()
    for rule in sorted(rules, key=lambda each: each.name):
        if rule.maintains:
            if rule.node not in maintained:
                remove.append(rule)
        elif uids.get(rule.node) != rule.owner or (rule.node in silent and not halted):
            remove.append(rule)
        elif rule.node in speaking and rule.is_due(now):
            due.append(rule)
        elif rule.effect == EVICTS:
            evicting.add(rule.node)
    nodes = tuple(sorted(evicting | {rule.node for rule in due})) if due else ()
    evict = () if halted or len(nodes) > allowed else tuple(due)
    return DevicePlan(tuple(remove), evict, nodes, allowed)


def listed(api: Api) -> list[DeviceRule]:
    """List all rules of reporters and maintenances; none if the cluster has no such kind, or if this user may not list them."""
    try:
        return [rule for label in (names.OF_NODE, names.MAINTENANCE) for rule in labelled(api, label)]
    except ApiError as error:
        if code(error) not in (ABSENT, FORBIDDEN):
            raise
        return []


def labelled(api: Api, label: str) -> list[DeviceRule]:
    """List the rules with this label."""
    with answers(api.client):
        return all_of(api.client, PlainDeviceTaintRule, lambda found: [*map(read, found)], labels={label: exists()})


def remove(api: Api, rule: DeviceRule) -> bool:
    """Remove a rule; False: it is gone already, or there is another one of its name."""
    return _written(api, rule, lambda: api.delete(PlainDeviceTaintRule, rule.name, rule.uid))


def evict(api: Api, rule: DeviceRule) -> bool:
    """Have Kubernetes evict the pods that use the device; False: the rule is gone, is another one, or has another effect."""
    # Not the resourceVersion: Kubernetes writes each rule's status within seconds.
    effect = "/spec/taint/effect"
    body = [
        {"op": "test", "path": "/metadata/uid", "value": rule.uid},
        {"op": "test", "path": effect, "value": rule.effect},
        {"op": "replace", "path": effect, "value": EVICTS},
    ]
    return _written(
        api, rule, lambda: api.client.patch(PlainDeviceTaintRule, rule.name, body, patch_type=PatchType.JSON)
    )


def _written(api: Api, rule: DeviceRule, write: Callable[[], object]) -> bool:
    """Whether a rule is as it was when it was read, so that the write is made."""
    try:
        write()
    except ApiError as error:
        # The admission policy of a site may refuse a write with the same code.
        if code(error) in (*CONFLICTS, ABSENT) and rule not in listed(api):
            return False
        raise
    return True


def read(document: Mapping[str, Any]) -> DeviceRule:
    """Read a rule. A reporter's are bounded by fleet/cluster/devices-policy.yaml; a person may have changed one."""
    metadata, spec = document["metadata"], document["spec"]
    labels, selector = metadata.get("labels") or {}, spec.get("deviceSelector") or {}
    owners = metadata.get("ownerReferences") or [{}]
    evict_after = str(labels.get(names.EVICT_AFTER, ""))
    return DeviceRule(
        str(metadata["name"]),
        str(metadata["uid"]),
        str(labels.get(names.OF_NODE) or labels.get(names.MAINTENANCE, "")),
        str(owners[0].get("uid", "")),
        device_words(selector.get("driver", ""), selector.get("device", "")),
        str(spec["taint"].get("effect", "")),
        read_time(metadata.get("creationTimestamp")),
        int(evict_after) if evict_after.isdecimal() else None,
        names.MAINTENANCE in labels,
    )


def device_words(driver: str, device: str) -> str:
    """A device of a node, in words. No two devices of a node have the same."""
    return f"{device} of {driver}"
