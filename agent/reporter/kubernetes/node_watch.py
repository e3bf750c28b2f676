"""The node's own Node object, as the API server last told it: a watch in a thread of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Event, Lock, Thread

from attrs import define, field

from agent.reporter.kubernetes.api import TROUBLE, Api, Backoff, Refused, explain
from agent.reporter.kubernetes.node import Node, read_node

NODES = "/api/v1/nodes"
GONE = 410

SPREAD = 10.0
"""Seconds within which a watch that the server has ended is begun anew: one that is stopped ends those of all nodes at once."""


@define
class Mirror:
    """What the Node is like now. ``node`` None: there is no such Node; ``known`` False: it is not known whether."""

    api: Api
    name: str
    changed: Callable[[], None]
    known: bool = field(default=False, init=False)
    node: Node | None = field(default=None, init=False)
    trouble: str = field(default="", init=False)
    _lock: Lock = field(factory=Lock, init=False)
    _again: Event = field(factory=Event, init=False)

    def start(self) -> None:
        """Follow the Node from now on."""
        Thread(target=self._follow, name=f"watch {self.name}", daemon=True).start()

    def took(self, node: Node) -> None:
        """The API server has answered a patch with this."""
        with self._lock:
            if node.newer_than(self.node):
                self.node = node

    def at_once(self) -> None:
        """What has failed may be tried again now."""
        self._again.set()

    def doubt(self) -> None:
        """What is known of the Node was wrong: ask again."""
        self.known = False
        self._again.set()
        self.api.interrupt()

    def _follow(self) -> None:
        backoff = Backoff()
        while True:
            wait = 0.0
            try:
                version = self._list()
                backoff.succeeded()
                self._listen(version)
                wait = random.uniform(0.1, SPREAD)  # noqa: S311  no secret
            except TROUBLE as error:
                self._troubled(explain(error))
                wait = backoff.failed(error.retry_after if isinstance(error, Refused) else 0.0)
            except (KeyError, TypeError, AttributeError) as error:
                # Of whoever is in between. A thread that ended by it would leave a reporter that hears of nothing any more.
                self._troubled(f"what the API server says of the Node is not understood: {error!r}")
                wait = backoff.failed()
            self._again.wait(wait)
            self._again.clear()

    def _list(self) -> str:
        before = self.node
        selector = {"fieldSelector": f"metadata.name={self.name}", "resourceVersion": "0"}
        found = self.api.ask("GET", NODES, selector)
        items = found.get("items") or []
        # What was there before may be the newer one by its version, and is not: an etcd that was restored counts from less.
        self._saw(read_node(items[0]) if items else None, before)
        return str(found["metadata"]["resourceVersion"])

    def _listen(self, version: str) -> None:
        query = {"fieldSelector": f"metadata.name={self.name}", "resourceVersion": version}
        for event in self.api.watch(NODES, query):
            match event["type"]:
                case "ADDED" | "MODIFIED":
                    self._saw(read_node(event["object"]))
                case "DELETED":
                    self._saw(None)
                case "ERROR" if event["object"].get("code") == GONE:
                    return
                case "ERROR":
                    raise Refused(event["object"].get("code", 0), str(event["object"].get("message", "")))
            if not self.known:
                return

    def _saw(self, node: Node | None, instead_of: Node | None = None) -> None:
        with self._lock:
            if node is None or not self.known or self.node is instead_of or node.newer_than(self.node):
                self.node = node
            self.known, self.trouble = True, ""
        self.changed()

    def _troubled(self, why: str) -> None:
        self.trouble = why
        self.changed()
