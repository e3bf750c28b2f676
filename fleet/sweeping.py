"""Taints nodes whose reporter has stopped, and sets their condition to Unknown.

Kubernetes does not notice that a reporter has stopped: the condition would stay True for ever. A sweep reads all Leases.
For each one that has expired it taints the Node and sets the condition to Unknown. A Lease may also say that its node is
not ready, because the reporter may not write the Node: then the Node is tainted and the condition becomes False. Each write
fails if somebody has written the same Node since it was read; then the Node is read again. Two sweeps at the same time
therefore do the same as one. A reporter that returns sees that its Node was changed, and publishes again.

A sweep also removes the DeviceTaintRules of silent and deleted nodes, and those of a maintenance without its record, and raises
those that are due (fleet/device_rules.py).

A Lease that was deleted says nothing about its node. The reporter renews it only every six minutes, so a sweep may come
first. The sweep then creates another Lease, and the node has its full duration to renew it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from http import HTTPStatus
from threading import Event
from typing import Any

from attrs import evolve, field, frozen
from lightkube import ApiError
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node
from lightkube.types import PatchType

from agent.report import names
from fleet import device_rules
from fleet.api import ABSENT, Api, Failed, answers, code, errors
from fleet.device_rules import DevicePlan, DeviceRule
from fleet.node_patch import past_conflicts
from fleet.objects import (
    annotations_of,
    condition_of,
    conditions_of,
    is_tainted,
    labels_of,
    metadata_of,
    taints_of,
    version_of,
)
from fleet.reading import PlainNodeStatus
from fleet.standing import UNREADABLE, Standing, standing, standings, unreadable

ALWAYS = 5
"""Up to this number of silent nodes, or half of a smaller fleet, are swept whatever the share is. An attacker on one node can
keep that node silent: this must not stop the sweep of the others."""


@frozen
class Plan:
    """What a sweep would do. ``expired``: all nodes without a heartbeat. ``allowed``: how many may be without one.

    ``taint``: the nodes to sweep now: those that lost their heartbeat, and those that are not ready by their Lease.
    ``renew``: the nodes that get another Lease, since theirs was deleted. ``devices``: what is done to DeviceTaintRules.
    """

    fleet: int
    allowed: int
    expired: tuple[str, ...]
    taint: tuple[str, ...]
    renew: tuple[str, ...] = ()
    devices: DevicePlan = field(factory=DevicePlan)

    @property
    def refused(self) -> bool:
        """Whether so many nodes lost their heartbeat that the cause must be elsewhere. None of them is tainted then."""
        return len(self.expired) > self.allowed


def plan(listed: Sequence[Standing], share: float) -> Plan:
    """Decide which nodes to sweep, if at most the given share of the fleet is without a heartbeat.

    Nodes that were swept before count, too. Otherwise a network fault that lets one Lease after the other expire would
    taint the whole fleet in small steps.
    """
    joined = [one for one in listed if one.joined]
    expired = [one for one in joined if one.expired]
    allowed = at_most(share, len(joined))
    sweepable = {one.name for one in expired if not (one.swept or one.missing)} if len(expired) <= allowed else set()
    # No limit applies to these: each node itself has said that it is not ready.
    sweepable |= {one.name for one in joined if one.withdrawn}
    taint = tuple(one.name for one in joined if one.name in sweepable)
    renew = tuple(one.name for one in expired if one.missing and not one.swept)
    return Plan(len(joined), allowed, tuple(one.name for one in expired), taint, renew)


def at_most(share: float, fleet: int) -> int:
    """How many nodes a sweep may act on, by their share of the fleet."""
    # In binary, 0.29 of 100 is a little less than 29.
    return max(min(ALWAYS, (fleet + 1) // 2), math.floor(share * fleet + 1e-9))


@frozen
class SweepResult:
    """What a sweep did. ``failed``: errors by node. ``left``: nodes and rules that it did not come to, since it was to stop.

    ``removed``: the DeviceTaintRules that it removed; ``evicting``: those by which pods are evicted now.
    """

    plan: Plan
    tainted: tuple[str, ...] = ()
    recovered: tuple[str, ...] = ()
    renewed: tuple[str, ...] = ()
    removed: tuple[DeviceRule, ...] = ()
    evicting: tuple[DeviceRule, ...] = ()
    failed: dict[str, str] = field(factory=dict)
    left: tuple[str, ...] = ()


def decide(api: Api, share: float, evict_share: float = 0.0) -> Plan:
    """Read the fleet, and decide which nodes to sweep, and which devices to take from their users."""
    # Rules come first: one that is read after the Nodes may be of a newer Node.
    rules = device_rules.listed(api)
    nodes, leases = api.nodes(), api.leases()
    faults = unreadable(nodes.faults, leases.faults)
    listed = standings(nodes.objects, leases.objects, api.now, faults)
    decided = plan(listed, share)
    speaking = {one.name for one in listed if one.condition in ("True", "False") and not one.expired}
    uids = {name: metadata_of(node).uid or "" for name, node in nodes.objects.items()}
    # A Node that cannot be read at all still exists, so its rules stay.
    rules = [rule for rule in rules if rule.node in uids or rule.node not in nodes.faults]
    allowed = at_most(evict_share, decided.fleet)
    maintained = {name for name, node in nodes.objects.items() if names.MAINTENANCE in annotations_of(node)}
    devices = device_rules.plan(rules, uids, decided.expired, speaking, decided.refused, allowed, api.now, maintained)
    return evolve(decided, devices=devices)


def sweep(api: Api, decided: Plan, stop: Event) -> SweepResult:
    """Sweep the nodes of a plan, until ``stop`` is set."""
    tainted: list[str] = []
    recovered: list[str] = []
    renewed: list[str] = []
    removed: list[DeviceRule] = []
    evicting: list[DeviceRule] = []
    failed: dict[str, str] = {}
    rules = [(rule, device_rules.remove, removed) for rule in decided.devices.remove]
    rules += [(rule, device_rules.evict, evicting) for rule in decided.devices.evict]
    left = [*decided.taint, *decided.renew, *(rule.name for rule, _, _ in rules)]
    for name in decided.taint:
        if not stop.is_set():
            left.remove(name)
            with _noting(api, failed, name):
                (tainted if _sweep_node(api, name) else recovered).append(name)
    for name in decided.renew:
        if not stop.is_set():
            left.remove(name)
            with _noting(api, failed, name, "its Lease was deleted and cannot be created again: "):
                (renewed if _create_lease(api, name) else recovered).append(name)
    # While a silent node is not tainted, or has just come back, its rules stay.
    kept = {*failed, *recovered}
    for rule, act, done in rules:
        if not stop.is_set():
            left.remove(rule.name)
            with _noting(api, failed, rule.node, f"its DeviceTaintRule {rule.name}: "):
                if rule.node not in kept and act(api, rule):
                    done.append(rule)
    acted = (tuple(removed), tuple(evicting))
    return SweepResult(decided, tuple(tainted), tuple(recovered), tuple(renewed), *acted, failed, tuple(left))


@contextmanager
def _noting(api: Api, failed: dict[str, str], name: str, what: str = "") -> Iterator[None]:
    """Note the error of a node, so that the sweep goes on with the next one."""
    try:
        with errors(), answers(api.client):
            yield
    except Failed as error:
        failed[name] = f"{what}{error.message}"


def _sweep_node(api: Api, name: str) -> bool:
    """Sweep one node; False: its reporter has returned meanwhile, or the Node is gone."""
    fault = ""

    def attempt() -> bool:
        nonlocal fault
        node, node_fault = api.node(name)
        lease, lease_fault = api.lease(name)
        faults = unreadable({name: node_fault} if node_fault else {}, {name: lease_fault} if lease_fault else {})
        # A fault counts even after remove_bad_times() has removed the unreadable part.
        fault = fault or faults.get(name, "")
        one = standing(name, node, lease, api.now, fault)
        if one.missing or not (one.expired or one.withdrawn):
            return False
        if one.swept and not one.withdrawn:
            return True
        if node_fault:
            api.remove_bad_times(name)
            node, _ = api.node(name)
        if patch := taint_patch(node):
            node = api.patch_node(name, patch, PatchType.JSON)
        wanted = unknown(node, one, api.now) if one.expired else not_ready(one, api.now)
        conditions = [wanted]
        if len(conditions_of(node, names.READY)) > 1:
            conditions = [{"$patch": "delete", "type": names.READY}, wanted]
        body = {"metadata": {"resourceVersion": version_of(node)}, "status": {"conditions": conditions}}
        api.client.patch(PlainNodeStatus, name, body, patch_type=PatchType.STRATEGIC)
        if lease_fault:
            # This comes last: even a user who may not write Leases has swept the node by now.
            api.remove_bad_lease_times(name)
        return True

    try:
        return past_conflicts(attempt)
    except ApiError as error:
        if code(error) != ABSENT:
            raise
        return False


def _create_lease(api: Api, name: str) -> bool:
    """Create another Lease for a node; False: there is one again, or the Node is gone."""
    try:
        node, _ = api.node(name)
    except ApiError as error:
        if code(error) == ABSENT:
            return False
        raise
    owner = OwnerReference(apiVersion="v1", kind="Node", name=name, uid=metadata_of(node).uid or "")
    # The API server requires a fraction of a second here, and the client leaves out one that is zero.
    now = api.now.replace(microsecond=1)
    spec = LeaseSpec(holderIdentity=name, leaseDurationSeconds=names.LEASE_DURATION, renewTime=now)
    metadata = ObjectMeta(name=name, namespace=names.NAMESPACE, ownerReferences=[owner])
    try:
        api.client.create(Lease(metadata=metadata, spec=spec))
    except ApiError as error:
        # If it is absent (404), the namespace is.
        if code(error) == HTTPStatus.CONFLICT:
            return False
        raise
    return True


def taint_patch(node: Node) -> list[dict[str, Any]]:
    """The JSON patch that adds the taint and removes the ready label; empty if nothing is left to do."""
    steps: list[dict[str, Any]] = []
    if not is_tainted(node):
        taint = {"key": names.TAINT, "effect": names.EFFECT}
        where = ("/spec/taints/-", taint) if taints_of(node) else ("/spec/taints", [taint])
        steps.append({"op": "add", "path": where[0], "value": where[1]})
    if names.READY_LABEL in labels_of(node):
        steps.append({"op": "remove", "path": f"/metadata/labels/{names.READY_LABEL.replace('/', '~1')}"})
    same = {"op": "test", "path": "/metadata/resourceVersion", "value": version_of(node)}
    return [same, *steps] if steps else []


def unknown(node: Node, one: Standing, now: datetime) -> dict[str, str]:
    """The condition of a node that has lost its heartbeat."""
    was = condition_of(node, names.READY)
    before = f"{was.status} ({was.reason})"[: names.LONGEST_NOTE] if was and was.status != "Unknown" else ""
    last = f"; it was {before} before" if before else ""
    silent = ": the agent, its reporter, the node or its network is down"
    message = f"{one.message[: names.LONGEST_MESSAGE // 2]}{'' if one.reason == UNREADABLE else silent}{last}; "
    return _condition("Unknown", names.EXPIRED, message + "see: systemctl status trackbed trackbed-reporter", now)


def not_ready(one: Standing, now: datetime) -> dict[str, str]:
    """The condition of a node whose Lease says that it is not ready."""
    return _condition("False", names.NOTICE, f"its Lease says: {one.notice}"[: names.LONGEST_MESSAGE], now)


def _condition(status: str, reason: str, message: str, now: datetime) -> dict[str, str]:
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": names.READY,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": stamp,
    }
