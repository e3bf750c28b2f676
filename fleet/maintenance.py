"""Taking a node out of service, changing it, and bringing it back.

What has been done is written down on the Node itself, in an annotation, in the same patch that does it: whoever comes next,
on any control host, can go on or undo it. Until the change on the node begins, a maintenance that cannot go on is undone by
itself; after that the node stays cordoned, with the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic
from typing import Any, Literal, TypeVar

import cattrs
import httpx2
from attrs import evolve, field, frozen
from lightkube import ALL_NS, ApiError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node, Pod
from lightkube.types import PatchType

from agent.report import names
from agent.report.records import Disruption
from fleet.api import ABSENT, CONFLICTS, Api, Failed, code, errors
from fleet.eviction import Rules, drain, is_terminating, say
from fleet.inventory import Inventory
from fleet.objects import annotations_of, condition_of, is_cordoned, is_tainted, metadata_of, version_of
from fleet.reading import PlainPod, read

COMMAND = "/usr/local/bin/trackbed"
"""On the node; by its path: sudo's on RHEL leaves /usr/local/bin out."""

LOOK = 2.0
"""Seconds between two looks at a node's pods or conditions."""

MARGIN = 60.0
"""Seconds that the connection to a node may take beyond the change."""

TRIES = 5
"""How often a patch of a Node is tried that somebody else writes to at the same time."""

REFUSED = 429
"""HTTP status code of an eviction that a PodDisruptionBudget forbids for now."""

PASSING = (429, 503, 504)
"""HTTP status codes of an API server that is overloaded or is being restarted: asked again, it may answer."""

T = TypeVar("T")

Step = Literal["drain", "apply", "wait"]
Result = Literal["done", "undone", "failed", "interrupted", "not started"]


@frozen
class Record:
    """What the annotation says. ``cordoned``: we did it, so we undo it; else it was so before, and stays so."""

    by: str
    since: str
    step: Step
    cordoned: bool
    allow: str


def record_of(node: Node) -> Record | None:
    """What was done to the node and is not undone yet; None: nothing.

    :raises Failed: the annotation is not ours to understand.
    """
    text = annotations_of(node).get(names.MAINTENANCE)
    if text is None:
        return None
    try:
        return cattrs.structure(json.loads(text), Record)
    except (ValueError, cattrs.BaseValidationError, TypeError):
        raise Failed(
            f"{metadata_of(node).name}: its annotation {names.MAINTENANCE} cannot be read: {text!r}; a newer trackbed's? "
            "Remove it, and uncordon the node if it should be"
        ) from None


class Interrupted(Exception):
    """The operator wants to stop."""


class CannotDrain(Exception):
    """The node's pods cannot be evicted; the message says which, and the remedy."""


@frozen
class Maintenance:
    """How nodes are maintained: who does it, what the agents may do, and for how long (seconds)."""

    api: Api
    inventory: Inventory
    allow: Disruption
    rules: Rules
    drain_timeout: float
    apply_timeout: float
    ready_timeout: float
    tell: Callable[[str], None]
    stop: Event = field(factory=Event)

    def run(self, nodes: Sequence[str], at_once: int) -> dict[str, tuple[Result, str]]:
        """Maintain nodes, so many at once; after the first failure none is begun. The result and its reason, by node."""
        results: dict[str, tuple[Result, str]] = dict.fromkeys(nodes, ("not started", ""))
        failed = Event()

        def one(node: str) -> None:
            if not failed.is_set() and not self.stop.is_set():
                results[node] = self._one(node)
                if results[node][0] != "done":
                    failed.set()

        with ThreadPoolExecutor(at_once) as pool:
            waiting = [pool.submit(one, node) for node in nodes]
            try:
                for future in waiting:
                    future.result()
            except KeyboardInterrupt:
                self.tell("stopping; a change that has begun on a node is seen through")
                self.stop.set()
        return results

    def undo(self, name: str) -> None:
        """Give a node back as it was before its maintenance."""
        record = _patch(self.api, name, lambda node: _finished(node, record_of(node)))
        if record is not None:
            self.tell(f"{name}: {'uncordoned' if record.cordoned else 'left cordoned, as it was before'}")

    def _one(self, name: str) -> tuple[Result, str]:
        again = f"trackbed fleet maintain {name}"
        try:
            with errors():
                return self._steps(name)
        except Interrupted:
            return "interrupted", f"it stays cordoned; go on: {again} --resume; or give it back: {again} --undo"
        except Failed as error:
            return "failed", f"{error.message}; then {again} --resume, or --undo"

    def _steps(self, name: str) -> tuple[Result, str]:
        began = self._begin(name)
        if began.step == "drain":
            try:
                self._drain(name)
            except (CannotDrain, Interrupted, ApiError) as error:
                self.undo(name)
                return "undone", str(error) or "interrupted before anything was changed"
            self._note(name, "apply")
        self._apply(name)
        self._note(name, "wait")
        self._wait(name)
        self.undo(name)
        return "done", ""

    def _begin(self, name: str) -> Record:
        """Cordon the node and write it down, or take up what an earlier run has left."""

        def change(node: Node) -> tuple[dict[str, Any], Record]:
            found = record_of(node)
            cordoned = found.cordoned if found else not is_cordoned(node)
            # What has been drained is not drained again: a drain that fails is undone, and the node is half changed by now.
            step = found.step if found else "drain"
            record = Record(self.api.user, self.api.now.isoformat(), step, cordoned, str(self.allow))
            return {**_annotated(record), "spec": {"unschedulable": True}}, record

        record = _patch(self.api, name, change)
        self.tell(f"{name}: cordoned")
        return record

    def _note(self, name: str, step: Step) -> None:
        def change(node: Node) -> tuple[dict[str, Any], None]:
            record = record_of(node)
            if record is None:
                raise Failed("its maintenance was undone by somebody else")
            return _annotated(evolve(record, step=step)), None

        _patch(self.api, name, change)

    def _drain(self, name: str) -> None:
        deadline = monotonic() + self.drain_timeout
        asked: set[str] = set()
        while True:
            if self.stop.is_set():
                raise Interrupted
            try:
                left, why = self._evict_all(name, asked)
            except (ApiError, httpx2.TransportError) as error:
                left, why = "its pods", _passing(error)
            if not left:
                return
            if monotonic() >= deadline:
                raise CannotDrain(f"after {self.drain_timeout:.0f} s there are still {left}: {why}")
            self._pause()

    def _evict_all(self, name: str, asked: set[str]) -> tuple[str, str]:
        """Ask for the eviction of what is left on a node: which pods those are, and why they do not go."""
        plan = drain(self._pods(name), self.rules)
        if plan.blockers:
            raise CannotDrain("; ".join(plan.blockers))
        refused = [self._evict(name, pod, asked) for pod in plan.evict if not is_terminating(pod)]
        return ", ".join(map(say, plan.evict)), "; ".join(dict.fromkeys(filter(None, refused))) or "they do not end"

    def _pods(self, name: str) -> list[Pod]:
        found = []
        for document in self.api.client.list(PlainPod, namespace=ALL_NS, fields={"spec.nodeName": name}):
            pod, fault = read(document, Pod)
            if pod is None:
                raise CannotDrain(f"{document['metadata']['name']} cannot be read: {fault}")
            found.append(pod)
        return found

    def _evict(self, node: str, pod: Pod, asked: set[str]) -> str:
        """Ask for a pod's eviction; why it is refused, or an empty text."""
        metadata = metadata_of(pod)
        body = Pod.Eviction(metadata=ObjectMeta(name=metadata.name, namespace=metadata.namespace))
        try:
            self.api.client.create(body, metadata.name or "", namespace=metadata.namespace or "")
        except ApiError as error:
            if code(error) == ABSENT:
                return ""
            if code(error) == REFUSED:
                return f"{say(pod)}: {_budget(error)}"
            if code(error) in PASSING:
                raise
            raise CannotDrain(f"{say(pod)}: {error.status.message}") from None
        if say(pod) not in asked:
            asked.add(say(pod))
            self.tell(f"{node}: evicting {say(pod)}")
        return ""

    def _apply(self, name: str) -> None:
        self.tell(f"{name}: changing what its spec wants, up to {self.allow}")
        words = [COMMAND, "apply", "--allow", str(self.allow), "--timeout", f"{self.apply_timeout:.0f}"]
        ran = self.inventory.run(name, words, self.apply_timeout + MARGIN)
        if ran.failed:
            raise Failed(f"trackbed apply on the node failed, and it stays cordoned: {ran.said}")

    def _wait(self, name: str) -> None:
        deadline = monotonic() + self.ready_timeout
        while reasons := self._unready(name):
            if monotonic() >= deadline:
                raise Failed(f"not ready after {self.ready_timeout:.0f} s, and it stays cordoned: {'; '.join(reasons)}")
            self._pause()
        self.tell(f"{name}: ready")

    def _unready(self, name: str) -> list[str]:
        try:
            return unready(self.api.node(name)[0])
        except (ApiError, httpx2.TransportError) as error:
            # The change may have cut us off; it is what we wait for.
            return [_passing(error)]

    def _pause(self) -> None:
        if self.stop.wait(LOOK):
            raise Interrupted


def unready(node: Node) -> list[str]:
    """Why a Node is not ready to be used again; empty if it is."""
    reasons = []
    for type in (names.READY, names.UP_TO_DATE, "Ready"):
        found = condition_of(node, type)
        if found is None or found.status != "True":
            said = f"{found.status} ({found.reason}): {found.message}" if found else "not there"
            reasons.append(f"{type} is {said}")
    return [*reasons, f"it has the taint {names.TAINT}"] if is_tainted(node) else reasons


def _passing(error: ApiError | httpx2.TransportError) -> str:
    """What is the matter with the API server, if it may be over in a moment; else the error is raised again."""
    if isinstance(error, ApiError):
        if code(error) not in PASSING:
            raise error
        return f"the API server answers {code(error)}: {error.status.message}"
    return f"the API server cannot be reached: {str(error) or type(error).__name__}"


def _budget(error: ApiError) -> str:
    details = error.status.details
    causes = [cause.message for cause in (details.causes if details else None) or () if cause.message]
    return " ".join([error.status.message or "refused", *causes])


def _annotated(record: Record) -> dict[str, Any]:
    return {"metadata": {"annotations": {names.MAINTENANCE: json.dumps(cattrs.unstructure(record), sort_keys=True)}}}


def _finished(node: Node, record: Record | None) -> tuple[dict[str, Any] | None, Record | None]:
    if record is None:
        return None, None
    schedulable = {"spec": {"unschedulable": None}} if record.cordoned else {}
    return {"metadata": {"annotations": {names.MAINTENANCE: None}}, **schedulable}, record


def _patch(api: Api, name: str, change: Callable[[Node], tuple[dict[str, Any] | None, T]]) -> T:
    """Patch the Node as ``change`` says of what it is now; again if somebody else was faster. Its second value is returned."""
    left = TRIES
    while True:
        left -= 1
        node, _ = api.node(name)
        body, result = change(node)
        if body is None:
            return result
        body["metadata"] = {**body.get("metadata", {}), "resourceVersion": version_of(node)}
        try:
            api.patch_node(name, body, PatchType.MERGE)
        except ApiError as error:
            if code(error) not in CONFLICTS or not left:
                raise
        else:
            return result
