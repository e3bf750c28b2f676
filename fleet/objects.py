"""Pure functions that read parts of API objects. Every part may be absent."""

from __future__ import annotations

from collections.abc import Iterable

from lightkube.models.core_v1 import NodeCondition, Taint
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node, Pod

from agent.report import names

Object = Node | Lease | Pod

IN_SERVICE = (names.READY, "Ready")
"""The conditions of a Node that takes pods."""

CHANGED = (names.READY, names.UP_TO_DATE, "Ready")
"""Those of one that also has all that its spec asks for."""


def metadata_of(thing: Object) -> ObjectMeta:
    """An object's metadata."""
    return thing.metadata or ObjectMeta()


def name_of(thing: Object) -> str:
    """An object's name."""
    return metadata_of(thing).name or ""


def version_of(thing: Object) -> str:
    """An object's resourceVersion. A patch that contains it fails if somebody has written the object meanwhile."""
    return metadata_of(thing).resourceVersion or ""


def annotations_of(thing: Object) -> dict[str, str]:
    """An object's annotations."""
    return dict(metadata_of(thing).annotations or {})


def labels_of(thing: Object) -> dict[str, str]:
    """An object's labels."""
    return dict(metadata_of(thing).labels or {})


def condition_of(node: Node, type: str) -> NodeCondition | None:
    """A Node's condition of a type. If there are several, as a client may write them, one that is not True counts."""
    conditions = conditions_of(node, type)
    return next((one for one in conditions if one.status != "True"), conditions[0] if conditions else None)


def conditions_of(node: Node, type: str) -> list[NodeCondition]:
    """All conditions of a type."""
    return [one for one in (node.status.conditions if node.status else None) or [] if one.type == type]


def boot_of(node: Node) -> str:
    """The ID of the boot in which a Node's kubelet last reported; empty if it has none."""
    return (node.status.nodeInfo.bootID if node.status and node.status.nodeInfo else "") or ""


def taints_of(node: Node) -> list[Taint]:
    """A Node's taints."""
    return list((node.spec.taints if node.spec else None) or [])


def is_tainted(node: Node) -> bool:
    """Whether a Node has Trackbed's taint."""
    return any((taint.key, taint.effect) == (names.TAINT, names.EFFECT) for taint in taints_of(node))


def is_cordoned(node: Node) -> bool:
    """Whether a Node is cordoned: no new pods are scheduled to it."""
    return bool(node.spec and node.spec.unschedulable)


def unready(node: Node, conditions: Iterable[str], boot_id: str = "") -> list[str]:
    """Why a Node is not ready to be used again; empty if it is.

    :param boot_id: the boot that the node is in now. After a short reboot the Node still has the conditions of before.
    """
    reasons = []
    if boot_id and boot_of(node) not in ("", boot_id):
        reasons.append("its kubelet has not reported since the boot")
    for type in conditions:
        condition = condition_of(node, type)
        if condition is None or condition.status != "True":
            state = f"{condition.status} ({condition.reason}): {condition.message}" if condition else "not there"
            reasons.append(f"{type} is {state}")
    return [*reasons, f"it has the taint {names.TAINT}"] if is_tainted(node) else reasons
