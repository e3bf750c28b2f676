"""The record of a maintenance in the Node's annotation, which another run resumes or undoes, on any control host."""

from __future__ import annotations

import json
from typing import Any, Literal

import cattrs
from attrs import frozen
from lightkube.resources.core_v1 import Node

from agent.documents import LARGEST_SPEC, load
from agent.report import names
from fleet.api import Failed
from fleet.objects import annotations_of, is_cordoned, metadata_of

Step = Literal["drain", "apply", "wait"]

KEPT = ("cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt")
"""Annotations with which an autoscaler does not delete a node because it is empty, or not ready for long, as in a reboot."""


@frozen
class Record:
    """The annotation's content. ``cordoned``: the maintenance cordoned the node, so it also uncordons it.

    ``again``: in words, what resumes the maintenance, if it is not `trackbed fleet maintain --resume`. ``device``: the NIC
    whose devices it taints; empty: it is of the whole node. ``kept``: the annotations of KEPT that the maintenance has set.
    """

    by: str
    since: str
    step: Step
    cordoned: bool
    allow: str
    again: str = ""
    device: str = ""
    kept: tuple[str, ...] = ()


def record_of(node: Node) -> Record | None:
    """The record of an unfinished maintenance; None: there is none.

    :raises Failed: the annotation cannot be read.
    """
    text = annotations_of(node).get(names.MAINTENANCE)
    if text is None:
        return None
    try:
        return cattrs.structure(load(text, LARGEST_SPEC), Record)
    except (ValueError, cattrs.BaseValidationError, TypeError):
        raise Failed(
            f"{metadata_of(node).name}: its annotation {names.MAINTENANCE} cannot be read: {text[:200]!r}; a newer trackbed's? "
            "Remove it, and uncordon the node if it should be"
        ) from None


def not_finished(name: str, record: Record) -> str:
    """Why a node with this record gets no other maintenance, and the remedy."""
    again = f"{record.again}, or " if record.again else ""
    device = f"--device {record.device} " if record.device else ""
    return (
        f"{record.by} began to maintain {name} at {record.since} and has not finished; if that run is over, {again}give "
        f"{device}--resume or --undo"
    )


def annotated(record: Record) -> dict[str, Any]:
    """The patch of a Node that writes its record."""
    written = json.dumps(cattrs.unstructure(record), sort_keys=True)
    return {"metadata": {"annotations": {names.MAINTENANCE: written, **dict.fromkeys(record.kept, "true")}}}


def finished(node: Node) -> tuple[dict[str, Any] | None, str]:
    """The patch that ends a node's maintenance, and what it does."""
    record = record_of(node)
    if record is None:
        return None, f"no maintenance is recorded, and it is {'' if is_cordoned(node) else 'not '}cordoned"
    body: dict[str, Any] = {"metadata": {"annotations": dict.fromkeys((names.MAINTENANCE, *record.kept))}}
    if record.device:
        return body, f"the maintenance of {record.device} has ended"
    if not record.cordoned:
        return body, "left cordoned, as it was before"
    return {**body, "spec": {"unschedulable": None}}, "uncordoned"
