"""Watches the node's own Node object."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Event, Lock

from attrs import define, field

from agent.reporter.kubernetes.api import TROUBLE, Api, Refused, explain
from agent.reporter.kubernetes.backoff import Backoff
from agent.reporter.kubernetes.node import Node, read_node

NODES = "/api/v1/nodes"
GONE = 410

SPREAD = 10.0
"""Seconds within which a watch that the server has ended is begun again, at a random time: an API server that stops ends the
watches of all nodes at the same moment."""


@define
class NodeWatch:
    """The Node as last received. ``known`` False: not read yet, or out of date. ``node`` None: there is no such Node."""

    api: Api
    name: str
    changed: Callable[[], None]
    known: bool = field(default=False, init=False)
    node: Node | None = field(default=None, init=False)
    trouble: str = field(default="", init=False)
    _lock: Lock = field(factory=Lock, init=False)
    _again: Event = field(factory=Event, init=False)

    def answered(self, node: Node) -> None:
        """Take over the Node from the answer to another request."""
        with self._lock:
            if node.newer_than(self.node):
                self.node = node

    def relist(self) -> None:
        """Read the Node again: what is known of it is out of date."""
        self.known = False
        self._again.set()
        self.api.interrupt()

    def follow(self) -> None:
        """Follow the Node, in a thread of its own. This never returns."""
        backoff = Backoff()
        while True:
            wait = 0.0
            try:
                version = self._list()
                backoff.succeeded()
                self._watch(version)
                wait = random.uniform(0.1, SPREAD)  # noqa: S311  no secret
            except TROUBLE as error:
                self._failed(explain(error))
                wait = backoff.failed(error.retry_after if isinstance(error, Refused) else 0.0)
            except (KeyError, TypeError, AttributeError) as error:
                # A proxy may send malformed objects. They must not end this thread: the reporter would miss all later changes.
                self._failed(f"the API server sent a Node that cannot be read: {error!r}")
                wait = backoff.failed()
            self._again.wait(wait)
            self._again.clear()

    def _list(self) -> str:
        before = self.node
        selector = {"fieldSelector": f"metadata.name={self.name}", "resourceVersion": "0"}
        listing = self.api.ask("GET", NODES, selector)
        items = listing.get("items") or []
        # The old Node may have the higher version: an etcd that was restored from a backup counts from a lower one.
        self._received(read_node(items[0]) if items else None, before)
        return str(listing["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> None:
        query = {"fieldSelector": f"metadata.name={self.name}", "resourceVersion": version}
        for event in self.api.watch(NODES, query):
            match event["type"]:
                case "ADDED" | "MODIFIED":
                    self._received(read_node(event["object"]))
                case "DELETED":
                    self._received(None)
                case "ERROR" if event["object"].get("code") == GONE:
                    return
                case "ERROR":
                    raise Refused(event["object"].get("code", 0), str(event["object"].get("message", "")))
            if not self.known:
                return

    def _received(self, node: Node | None, instead_of: Node | None = None) -> None:
        with self._lock:
            if node is None or not self.known or self.node is instead_of or node.newer_than(self.node):
                self.node = node
            self.known, self.trouble = True, ""
        self.changed()

    def _failed(self, why: str) -> None:
        self.trouble = why
        self.changed()
