"""Writes the Node: conditions, labels and taint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from attrs import define, field

from agent.reporter.kubernetes.api import JSON_PATCH, STRATEGIC_PATCH, Api, Refused
from agent.reporter.kubernetes.node import (
    MANAGER,
    Desired,
    Node,
    Operation,
    changes_more_than_messages,
    label_patch,
    node_patch,
    read_node,
    status_patch,
    taint_patch,
)
from agent.reporter.kubernetes.node_watch import NODES, NodeWatch
from agent.reporter.kubernetes.restorations import Restorations
from agent.reporter.kubernetes.steps import LONGEST_SLEEP

MESSAGE_EVERY = 60.0
"""Seconds between two writes of the conditions if nothing but a message has changed."""

REFUSED_BY_CONTENT = (400, 403, 409, 422)
"""HTTP status codes that refuse a patch for its content: a part of it may be accepted."""


@define
class NodeWriter:
    """Sends patches of the Node, and keeps the watch up to date with the answers. ``now``: the time of day."""

    name: str
    api: Api
    watch: NodeWatch
    now: Callable[[], float]
    _status_written: float = field(default=-MESSAGE_EVERY, init=False)
    _conditions: Restorations = field(init=False)
    _labels_and_taint: Restorations = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._conditions = Restorations("the Node's conditions", self.name)
        self._labels_and_taint = Restorations("the Node's labels or taint", self.name)

    def write_conditions(self, desired: Desired, node: Node, clock: float) -> tuple[Node, float]:
        """Write the conditions that differ.

        :param clock: seconds since the boot.
        :returns: the Node after it, and the seconds until a message that differs may be written.
        :raises Contested: somebody else changes them again and again.
        """
        self._conditions.wants((node.uid, desired.conditions))
        body = status_patch(desired, node, self.now())
        if body is None:
            return node, LONGEST_SLEEP
        if not changes_more_than_messages(desired, node) and clock < self._status_written + MESSAGE_EVERY:
            return node, self._status_written + MESSAGE_EVERY - clock
        self._conditions.check(clock)
        node = self._patch(f"{NODES}/{self.name}/status", body, STRATEGIC_PATCH)
        self._conditions.wrote(clock)
        self._status_written = clock
        return node, LONGEST_SLEEP

    def write_labels_and_taint(self, desired: Desired, node: Node, clock: float, apart: bool) -> None:
        """Write the labels and the taint that differ, in one patch.

        :param clock: seconds since the boot.
        :param apart: if the patch's content is refused, read the Node, and write each of the two by itself.
        :raises Contested: somebody else changes them again and again.
        """
        # Only a Node that is not ready gets no label. What the Node loses depends on what others have written, too.
        self._labels_and_taint.wants((node.uid, desired.labels))
        parts = [part for part in (taint_patch(desired, node), label_patch(desired, node)) if part]
        if not parts:
            return
        self._labels_and_taint.check(clock)
        try:
            self._write_node([operation for part in parts for operation in part])
        except Refused as error:
            if not apart or error.status not in REFUSED_BY_CONTENT:
                raise
            # Somebody has just changed what the patch tests, or a policy forbids one of the two. The taint must not wait until
            # the watch has brought the Node as it is, and each is written without the other.
            node = self._received(self.api.ask("GET", f"{NODES}/{self.name}"))
            for patch in (taint_patch, label_patch):
                if operations := patch(desired, node):
                    with suppress(Refused):
                        node = self._write_node(operations)
            if node_patch(desired, node):
                raise
        self._labels_and_taint.wrote(clock)

    def _write_node(self, operations: list[Operation]) -> Node:
        return self._patch(f"{NODES}/{self.name}", operations, JSON_PATCH)

    def _patch(self, path: str, body: Any, content_type: str) -> Node:
        return self._received(self.api.ask("PATCH", path, {"fieldManager": MANAGER}, body, content_type))

    def _received(self, answer: dict[str, Any]) -> Node:
        try:
            node = read_node(answer)
        except (KeyError, TypeError, AttributeError) as error:
            raise Refused(200, f"something that is not a Node: {error!r}") from None
        self.watch.answered(node)
        return node
