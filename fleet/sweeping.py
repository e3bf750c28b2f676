"""Taking readiness from nodes whose reporter has gone silent.

In Kubernetes nothing notices a reporter that stopped: its condition stays True for ever. A sweep reads all Leases, and for
each that has expired it taints the Node and turns its condition Unknown. Each write fails if somebody has written the same Node
since it was read; then all is read again. So two sweeps at once do what one does. A reporter that comes back sees its Node
changed, and publishes anew what holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from attrs import field, frozen
from lightkube import ApiError
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node
from lightkube.types import PatchType

from agent.report import names
from fleet.api import ABSENT, CONFLICTS, Api, Failed, code
from fleet.objects import condition_of, is_tainted, labels_of, taints_of, version_of
from fleet.reading import PlainLease, PlainNodeStatus, read
from fleet.standing import UNREADABLE, Standing, standing, standings, unreadable

TRIES = 3
"""How often a node is read again that somebody writes to at the same time; the next sweep finds it, too."""


@frozen
class Plan:
    """What a sweep would do. ``expired`` are all nodes without a heartbeat, swept before or not; ``allowed`` how many may be.

    ``taint`` are those that are to be swept now.
    """

    fleet: int
    allowed: int
    expired: tuple[str, ...]
    taint: tuple[str, ...]

    @property
    def refused(self) -> bool:
        """Whether so many have expired that the fault is elsewhere: then none is tainted."""
        return len(self.expired) > self.allowed


def plan(found: Sequence[Standing], share: float) -> Plan:
    """Decide which nodes to sweep, where at most the given share of the fleet may be without a heartbeat.

    Nodes that were swept before count: otherwise a fault of the network that lets Leases expire one after the other would
    taint the whole fleet in small steps. One node may always be swept, however small the fleet.
    """
    joined = [one for one in found if one.joined]
    expired = [one for one in joined if one.expired]
    allowed = max(1, math.floor(share * len(joined)))
    doomed = [one.name for one in expired if not one.swept] if len(expired) <= allowed else []
    return Plan(len(joined), allowed, tuple(one.name for one in expired), tuple(doomed))


@frozen
class Result:
    """What a sweep did; ``failed`` are the errors by node."""

    plan: Plan
    tainted: tuple[str, ...] = ()
    recovered: tuple[str, ...] = ()
    failed: dict[str, str] = field(factory=dict)


def sweep(api: Api, share: float, dry: bool) -> Result:
    """Sweep the fleet once."""
    nodes, leases = api.nodes(), api.leases()
    faults = unreadable(nodes.faults, leases.faults)
    decided = plan(standings(nodes.objects, leases.objects, api.now, faults), share)
    if dry:
        return Result(decided)
    tainted: list[str] = []
    recovered: list[str] = []
    failed: dict[str, str] = {}
    for name in decided.taint:
        try:
            (tainted if _sweep_node(api, name) else recovered).append(name)
        except ApiError as error:
            failed[name] = error.status.message or str(error)
        except Failed as error:
            failed[name] = error.message
    return Result(decided, tuple(tainted), tuple(recovered), failed)


def _sweep_node(api: Api, name: str) -> bool:
    """Whether it had expired still, and is swept."""
    fault = ""
    for left in reversed(range(TRIES)):
        try:
            node, found = api.node(name)
            lease, lease_fault = _lease(api, name)
            faults = unreadable({name: found} if found else {}, {name: lease_fault} if lease_fault else {})
            # It counts still once it is mended.
            fault = fault or faults.get(name, "")
            one = standing(name, node, lease, api.now, fault)
            if not one.expired:
                return False
            if one.swept:
                return True
            if found:
                api.mend_node(name)
                node, _ = api.node(name)
            if patch := taint_patch(node):
                node = api.patch_node(name, patch, PatchType.JSON)
            wanted = unknown(node, one, api.now)
            body = {"metadata": {"resourceVersion": version_of(node)}, "status": {"conditions": [wanted]}}
            api.client.patch(PlainNodeStatus, name, body, patch_type=PatchType.STRATEGIC)
            return True
        except ApiError as error:
            if code(error) == ABSENT:
                return False
            if code(error) not in CONFLICTS or not left:
                raise
    return False


def _lease(api: Api, name: str) -> tuple[Lease | None, str]:
    """A node's Lease, and what cannot be read of it."""
    try:
        return read(api.client.get(PlainLease, name, namespace=names.NAMESPACE), Lease)
    except ApiError as error:
        if code(error) == ABSENT:
            return None, ""
        raise


def taint_patch(node: Node) -> list[dict[str, Any]]:
    """The JSON patch that gives the Node our taint and takes its ready label; empty if both are so."""
    steps: list[dict[str, Any]] = []
    if not is_tainted(node):
        taint = {"key": names.TAINT, "effect": "NoSchedule"}
        where = ("/spec/taints/-", taint) if taints_of(node) else ("/spec/taints", [taint])
        steps.append({"op": "add", "path": where[0], "value": where[1]})
    if names.READY_LABEL in labels_of(node):
        steps.append({"op": "remove", "path": f"/metadata/labels/{names.READY_LABEL.replace('/', '~1')}"})
    same = {"op": "test", "path": "/metadata/resourceVersion", "value": version_of(node)}
    return [same, *steps] if steps else []


def unknown(node: Node, one: Standing, now: datetime) -> dict[str, str]:
    """The condition of a node that is not heard of."""
    was = condition_of(node, names.READY)
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    last = f"; it was {was.status} ({was.reason}) before" if was and was.status != "Unknown" else ""
    silent = ": the agent, its reporter, the node or its network is down"
    message = f"{one.message}{'' if one.reason == UNREADABLE else silent}{last}; "
    return {
        "type": names.READY,
        "status": "Unknown",
        "reason": names.EXPIRED,
        "message": message + "see: systemctl status trackbed trackbed-reporter",
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": stamp,
    }
