"""Keeps the Node as the report says: condition, labels, taint and Lease. It waits for changes, and writes only what differs.

Nothing is queued: whenever it can write, it writes what the report says then.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any

from attrs import define, evolve, field

from agent.report import published
from agent.report.published import Published
from agent.report.records import STALE
from agent.reporter.kubernetes.api import (
    JSON,
    JSON_PATCH,
    LAST_WAIT,
    MERGE_PATCH,
    STRATEGIC_PATCH,
    TROUBLE,
    Api,
    Backoff,
    NoCredentials,
    Refused,
    explain,
)
from agent.reporter.kubernetes.calm import TO_AND_FRO, Calm
from agent.reporter.kubernetes.identity import Identity
from agent.reporter.kubernetes.node import (
    MANAGER,
    NOT_READY,
    Node,
    Wish,
    desired,
    difference,
    label_patch,
    lease,
    node_patch,
    notice_of,
    plugin_resources,
    read_node,
    status_patch,
    taint_patch,
    turns,
    without_absent,
)
from agent.reporter.kubernetes.node_watch import NODES, Mirror
from agent.reporter.settings import Label, Settings, read_labels
from agent.reporter.verdict import Verdict, look
from agent.runtime import boot_id, uptime

NAMESPACE = "trackbed-system"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"

LEASE_EVERY = (300.0, 360.0)
"""Seconds between two renewals, drawn anew each time; three of them fit into the Lease's life."""

MESSAGE_EVERY = 60.0
"""Seconds that a condition's message must be old before it is written again for a change of nothing else."""

PLUGIN_PAUSE = 30.0
"""Seconds for which a plugin's label is away at least: its pod is deleted by somebody else, in his own time."""

PLUGIN_LONGEST = 600.0
"""Seconds after which a plugin's label comes back although its resource is still allocatable: it is another's plugin."""

LONGEST_SLEEP = 3600.0

ON_NODE = ("ready", "taint", "condition")
"""The steps that write the Node; all that were taken must have succeeded for a report to be published."""

JUDGED = (400, 403, 409, 422)
"""HTTP status codes by which a patch is refused for what is in it; a part of it may be taken."""

Step = Callable[[Verdict, Node, float], float]
"""Writes a part of what the report says; the seconds until there may be more to do. Its last argument is the clock's."""


@define
class Publication:
    """One node's. ``report``, ``labels``: files to read; ``out``: where to leave word of what was published.

    ``memory``: a file of the reporter's own, with what it must know of this boot after a restart. ``now``: the time of day, for
    what is written. ``clock``: seconds since the boot, for what is due: a machine that keeps local time is put back by hours
    once it asks a time server, and must neither wait so long for its next try nor let its Lease expire.
    """

    settings: Settings
    identity: Identity
    report: Path
    labels: Path
    out: Path
    memory: Path
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = uptime
    api: Api = field(init=False)
    mirror: Mirror = field(init=False)
    _backoffs: dict[str, Backoff] = field(factory=dict, init=False)
    said: Published = field(factory=Published, init=False)
    _written: Published | None = field(default=None, init=False)
    _awake: Event = field(factory=Event, init=False)
    _seen: Verdict | None = field(default=None, init=False)
    _trouble: dict[str, str] = field(factory=dict, init=False)
    _steps_now: frozenset[str] = field(default=frozenset(), init=False)
    _not_before: dict[str, float] = field(factory=dict, init=False)
    _identity_at: float = field(default=0.0, init=False)
    _renew_at: float = field(default=0.0, init=False)
    _wrote_status: float = field(default=-MESSAGE_EVERY, init=False)
    _lease_of: str = field(default="", init=False)
    _lease: dict[str, Any] = field(factory=dict, init=False)
    _away_since: float | None = field(default=None, init=False)
    _calm: Calm = field(factory=Calm, init=False)

    def __attrs_post_init__(self) -> None:
        self.api = Api(self.settings.server, self.identity.session)
        self.mirror = Mirror(Api(self.settings.server, self.identity.session), self.settings.node_name, self.wake)
        kept = published.read(self.memory)
        if kept is not None and kept.boot_id == boot_id():
            self.said = evolve(kept, error="")

    def wake(self) -> None:
        """Something has changed: the labels, or the Node."""
        self._awake.set()

    def hear(self) -> None:
        """The report was replaced: wake up, unless only its heartbeat is new; before that is stale, the turn is due."""
        if look(self.report).beyond_heartbeat() != self._seen:
            self.wake()

    def at_once(self) -> None:
        """What has failed, or is waited for, may be tried again now."""
        self._not_before.clear()
        self._identity_at = 0.0
        self.mirror.at_once()
        self.wake()

    def run(self) -> None:
        """Publish, until the process ends."""
        self.mirror.start()
        while True:
            self._awake.wait(min(self.turn(), LONGEST_SLEEP))
            self._awake.clear()

    def turn(self) -> float:
        """Write what differs; the seconds until there may be something to do although nothing has changed."""
        verdict = look(self.report)
        self._seen = verdict.beyond_heartbeat()
        hold = self._calm.hold(verdict.ready, self.clock())
        for what in ("absent", "calm"):
            self._trouble.pop(what, None)
        # A certificate that cannot be renewed is no reason to say nothing with the one there is.
        due = [self._try("identity", self._keep_identity)]
        if self.mirror.known and (node := self.mirror.node) is not None:
            steps = self._steps(verdict)
            if hold:
                # The heartbeat alone: the Node goes on saying NotReady until Ready has lasted.
                steps, due = steps[:1], [*due, hold]
                self._trouble["calm"] = TO_AND_FRO
            self._steps_now = frozenset(what for what, _ in steps)
            due += [self._try(what, partial(step, verdict, node)) for what, step in steps]
            report = verdict.report
            if report is not None and not hold and not self._unpublished():
                self.said = evolve(self.said, boot_id=report.boot_id, generation=report.generation, ready=verdict.ready)
        elif self.mirror.known:
            self._trouble["absent"] = f"the cluster has no Node {self.settings.node_name} yet"
        self._say()
        return max(0.0, min(due))

    def _steps(self, verdict: Verdict) -> list[tuple[str, Step]]:
        """What to write, and in which order. A step that fails stops no other one, and has a back-off of its own.

        A node that is ready gets its heartbeat first, or a sweep would take back what is said; its condition, labels and taint
        are one step, so that the taint stays until the condition is True. A node that is not ready gets what keeps pods away
        first. Its steps are others, so that no back-off of a write that says ready delays one that takes it back.
        """
        if verdict.ready:
            return [("lease", self._renew), ("ready", self._publish)]
        return [("taint", self._withdraw), ("condition", self._turn_condition), ("notice", self._renew)]

    def _troubles(self) -> dict[str, str]:
        """What is in the way of what is to be said now, by step."""
        now = self._steps_now | {"identity", "absent", "calm", "labels"}
        return {what: trouble for what, trouble in self._trouble.items() if what in now}

    def _unpublished(self) -> bool:
        """Whether the Node does not say yet what the report does."""
        return not self._troubles().keys().isdisjoint(ON_NODE)

    def _try(self, what: str, step: Callable[[float], float]) -> float:
        """Take a step unless it has failed lately; the seconds until it is due again."""
        now = self.clock()
        if (left := self._not_before.get(what, 0.0) - now) > 0:
            return left
        backoff = self._backoffs.setdefault(what, Backoff())
        try:
            wait = step(now)
        except TROUBLE as error:
            self._trouble[what] = explain(error)
            self.api.close()
            if isinstance(error, Refused) and error.status in (404, 409, 422) and what in ON_NODE:
                # The Node is another than we thought, or somebody else has just written it.
                self.mirror.doubt()
            wait = backoff.failed(error.retry_after if isinstance(error, Refused) else 0.0)
        except ValueError as error:
            # A file of the deploy's that cannot be read.
            self._trouble[what], wait = str(error), LAST_WAIT
        else:
            backoff.succeeded()
            self._trouble.pop(what, None)
            return wait
        self._not_before[what] = self.clock() + wait
        return wait

    def _keep_identity(self, now: float) -> float:
        """Ask for what is needed to identify oneself; the seconds until it is due again."""
        if now >= self._identity_at:
            had = self._is_known()
            # An hour at most: when a certificate ends is told by the time of day.
            self._identity_at = now + min(self.identity.keep(self.now()), LONGEST_SLEEP)
            if self._is_known() and not had:
                self.at_once()
        return self._identity_at - now

    def _is_known(self) -> bool:
        try:
            self.identity.session()
        except NoCredentials:
            return False
        return True

    def _publish(self, verdict: Verdict, node: Node, now: float) -> float:
        """Say that the node is ready: condition, labels, and the taint at last; the seconds until there may be more to do."""
        labels = read_labels(self.labels)
        self._trouble.pop("labels", None)
        away, again = self._plugins_away(verdict, labels, node, now)
        wanted = desired(verdict, self.settings, labels, node, away, self.now())
        node, due = self._put_condition(wanted, node, now)
        self._patch_node(node_patch(wanted, node), node)
        return min(again, due, _stale_in(verdict))

    def _withdraw(self, verdict: Verdict, node: Node, now: float) -> float:
        """Keep pods away from a node that is not ready: the taint, and no label that says ready."""
        away, again = False, LONGEST_SLEEP
        labels: tuple[Label, ...] = ()
        try:
            labels = read_labels(self.labels)
            away, again = self._plugins_away(verdict, labels, node, now)
            self._trouble.pop("labels", None)
        except ValueError as error:
            self._trouble["labels"] = str(error)
        wanted = desired(verdict, self.settings, labels, node, away)
        parts = [part for part in (taint_patch(wanted, node), label_patch(wanted, node)) if part]
        try:
            self._patch_node([operation for part in parts for operation in part], node)
        except Refused as error:
            if error.status not in JUDGED or len(parts) < 2:
                raise
            # Somebody forbids one of the two, or has just changed a label: the other is written nevertheless.
            for part in parts:
                with suppress(Refused):
                    node = self._patch_node(part, node)
            if node_patch(wanted, node):
                raise
        return min(again, _stale_in(verdict))

    def _turn_condition(self, verdict: Verdict, node: Node, now: float) -> float:
        """Write the conditions of a node that is not ready; nodes/status may be open to us where the Node itself is not."""
        node = self.mirror.node or node
        _, due = self._put_condition(desired(verdict, self.settings, (), node, False), node, now)
        return min(due, _stale_in(verdict))

    def _put_condition(self, wanted: Wish, node: Node, now: float) -> tuple[Node, float]:
        """Write the conditions that differ; the seconds until one may be written whose message alone is another."""
        body = status_patch(wanted, node, self.now())
        if body is None:
            return node, LONGEST_SLEEP
        if not turns(wanted, node) and now < self._wrote_status + MESSAGE_EVERY:
            return node, self._wrote_status + MESSAGE_EVERY - now
        node = self._patched(f"{NODES}/{self.settings.node_name}/status", body, STRATEGIC_PATCH)
        self._wrote_status = now
        return node, LONGEST_SLEEP

    def _patch_node(self, operations: list[dict[str, Any]], node: Node) -> Node:
        if not operations:
            return node
        return self._patched(f"{NODES}/{self.settings.node_name}", operations, JSON_PATCH)

    def _patched(self, path: str, body: Any, content_type: str) -> Node:
        answer = self._ask("PATCH", path, body, content_type)
        try:
            node = read_node(answer)
        except (KeyError, TypeError, AttributeError) as error:
            raise Refused(200, f"what is no Node: {error!r}") from None
        self.mirror.took(node)
        return node

    def _ask(self, method: str, path: str, body: Any, content_type: str) -> dict[str, Any]:
        return self.api.ask(method, path, {"fieldManager": MANAGER}, body, content_type)

    def _plugins_away(self, verdict: Verdict, labels: tuple[Label, ...], node: Node, now: float) -> tuple[bool, float]:
        """Whether the plugins' labels must be away, since a plugin does not follow a change of its devices; until when."""
        fresh = verdict.report if verdict.fresh else None
        devices = (fresh.devices if fresh else "") or self.said.devices
        keys = {label.key for label in labels if label.role == "plugin"}
        remains = any(node.can_give(resource) for resource in plugin_resources(labels))
        # A label that is away while its plugin is still there was taken away by the reporter that ran before this one.
        fresh_start = self._away_since is None and not keys & node.labels.keys() and not remains
        if not self.said.devices or fresh_start:
            # Nothing was started yet: whatever starts finds the devices of now.
            self.said = evolve(self.said, devices=devices)
            return False, LONGEST_SLEEP
        if devices == self.said.devices and self._away_since is None:
            return False, LONGEST_SLEEP
        if self._away_since is None:
            self._away_since = now
        left, longest = (self._away_since + seconds - now for seconds in (PLUGIN_PAUSE, PLUGIN_LONGEST))
        if left <= 0 and (longest <= 0 or not remains):
            self._away_since = None
            self.said = evolve(self.said, devices=devices)
            return False, LONGEST_SLEEP
        return True, max(left if left > 0 else longest, 1.0)

    def _renew(self, verdict: Verdict, node: Node, now: float) -> float:
        """Renew the Lease if it is due, and have it say what the Node cannot be made to; the seconds until it is due again."""
        notice = notice_of(verdict) if not verdict.ready and self._unpublished() else None
        if not verdict.fresh or verdict.report is None:
            self._renew_at = 0.0
            if notice is not None:
                self._put_lease({"metadata": {"annotations": {NOT_READY: notice}}}, create=False)
            return LONGEST_SLEEP
        told = self._lease.get("metadata", {}).get("annotations", {}).get(NOT_READY)
        if now >= self._renew_at or self._lease_of != node.uid or notice != told:
            self._put_lease(lease(self.settings, node, verdict.report, NAMESPACE, self.now(), notice))
            self._renew_at, self._lease_of = now + random.uniform(*LEASE_EVERY), node.uid  # noqa: S311  no secret
        return self._renew_at - now

    def _put_lease(self, wanted: dict[str, Any], create: bool = True) -> None:
        """Write what differs from the Lease that the API server told last: the time alone, as a rule."""
        path = f"{LEASES}/{self.settings.node_name}"
        try:
            # Once more if somebody has changed the rest since; who keeps another Lease than we ask for is not fought.
            for _ in range(2):
                if patch := difference(wanted, self._lease):
                    self._lease = self._ask("PATCH", path, patch, MERGE_PATCH)
        except Refused as error:
            self._lease = {}
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            if create:
                self._lease = self._ask("POST", LEASES, without_absent(wanted), JSON)

    def _say(self) -> None:
        """Leave word of what was published, and of what is in the way."""
        troubles = [*self._troubles().values(), self.mirror.trouble]
        self.said = evolve(self.said, error="; ".join(dict.fromkeys(filter(None, troubles))))
        before = self._written
        if before is None or evolve(self.said, since=0.0) != evolve(before, since=0.0):
            self.said = self._written = evolve(self.said, since=self.now())
            if not published.write(self.out, self.said):
                self._written = None
            # It is on a disk, and an outage tells something else with each try.
            if before is None or evolve(self.said, since=0.0, error="") != evolve(before, since=0.0, error=""):
                published.write(self.memory, self.said)


def _stale_in(verdict: Verdict) -> float:
    """Seconds until the heartbeat would be stale: nothing is written then that would wake us."""
    return STALE - verdict.age + 1.0 if verdict.fresh else LONGEST_SLEEP
