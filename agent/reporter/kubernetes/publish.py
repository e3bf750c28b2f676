"""Publishes the report in Kubernetes: the Node's conditions, labels and taint, and the node's Lease.

It waits for changes, and writes only what differs. It has no queue: when it can write, it writes what the report says then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Lock

from attrs import define, evolve, field, frozen

from agent.report import published
from agent.report.published import Published
from agent.report.verdict import STALE, Verdict, judge
from agent.reporter.kubernetes.api import Api, Refused
from agent.reporter.kubernetes.backoff import LAST_URGENT_WAIT, LAST_WAIT
from agent.reporter.kubernetes.calm import NOT_CALM, Calm
from agent.reporter.kubernetes.identity import Identity
from agent.reporter.kubernetes.lease import LeaseWriter, notice_of
from agent.reporter.kubernetes.node import Node, desired, devices_ready
from agent.reporter.kubernetes.node_watch import NodeWatch
from agent.reporter.kubernetes.node_writer import NodeWriter
from agent.reporter.kubernetes.plugins import PluginLabels
from agent.reporter.kubernetes.quarantine import DeviceTaints
from agent.reporter.kubernetes.steps import LONGEST_SLEEP, Steps
from agent.reporter.settings import Label, Settings, read_labels
from agent.runtime import boot_id, notify, uptime

ON_NODE = ("ready", "taint", "condition")
"""The steps that write the Node. A report is published once those that were taken have succeeded."""

LOOK_EVERY = 10.0
"""Seconds between two looks at the report although nothing has changed: a third of the unit's WatchdogSec, so that systemd sees
that the publishing thread lives. It is also how late a change is seen of which inotify did not tell."""

Step = Callable[[Verdict, Node, float], float]
"""Publishes one part of the report at the clock's time (the last argument), and returns the seconds until it must run again."""


@frozen
class Files:
    """The files of a reporter: ``report`` and ``labels`` are read, ``acknowledgement`` and ``memory`` are written."""

    report: Path
    labels: Path
    acknowledgement: Path
    memory: Path


@define
class Acknowledgement:
    """Writes what is published.

    ``file`` is in memory, for the agent and `trackbed status`. ``memory`` is on a disk, for this reporter after a restart.
    ``now``: what is published, and may not be written yet. ``_written`` and ``_kept``: what the two files have; None: unknown.
    """

    file: Path
    memory: Path
    now: Published = field(init=False)
    _written: Published | None = field(default=None, init=False)
    _kept: Published | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        before = published.read(self.memory)
        self.now = _acknowledged(before) if before is not None and before.boot_id == boot_id() else Published()

    def write(self, time: float) -> None:
        """Write the files that differ from what is published.

        :param time: seconds since the epoch.
        """
        if self._written is None or _differ(self.now, self._written):
            self.now = evolve(self.now, since=time)
            self._written = self.now if published.write(self.file, self.now) else None
        # Each try during an outage may end with another error. A new error alone is not written to the disk.
        if self._kept is None or _differ(_acknowledged(self.now), _acknowledged(self._kept)):
            self._kept = self.now if published.write(self.memory, self.now) else None


def _acknowledged(one: Published) -> Published:
    return evolve(one, error="", refused=False)


def _differ(one: Published, other: Published) -> bool:
    return evolve(one, since=0.0) != evolve(other, since=0.0)


@define
class Publication:
    """Publishes one node's report.

    ``now``: the time of day, which is written. ``clock``: seconds since the boot, by which steps are due. Time servers may set
    the time of day back by hours, if the machine's own clock keeps local time: that must delay neither a retry nor the Lease.
    """

    settings: Settings
    identity: Identity
    files: Files
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = uptime
    watch: NodeWatch = field(init=False)
    steps: Steps = field(init=False)
    plugins: PluginLabels = field(init=False)
    acknowledged: Acknowledgement = field(init=False)
    _writer: NodeWriter = field(init=False)
    _lease: LeaseWriter = field(init=False)
    _device_taints: DeviceTaints = field(init=False)
    _devices_writer: NodeWriter = field(init=False)
    _calm: Calm = field(factory=Calm, init=False)
    _changed: Event = field(factory=Event, init=False)
    _published: Verdict | None = field(default=None, init=False)
    _turning: Lock = field(factory=Lock, init=False)
    _taken: frozenset[str] = field(default=frozenset(), init=False)
    _identity_due: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        name, server = self.settings.node_name, self.settings.server
        api = Api(server, self.identity.session, alive)
        self.watch = NodeWatch(Api(server, self.identity.session), name, self.wake)
        self.acknowledged = Acknowledgement(self.files.acknowledgement, self.files.memory)
        self.plugins = PluginLabels(self.acknowledged.now.devices)
        self.steps = Steps(self.clock, self._step_failed)
        self._writer = NodeWriter(name, api, self.watch, self.now)
        self._lease = LeaseWriter(self.settings, api, self.now)
        self._device_taints = DeviceTaints(self.settings, api)
        self._devices_writer = NodeWriter(name, api, self.watch, self.now)

    def wake(self) -> None:
        """Look again: the labels or the Node have changed."""
        self._changed.set()

    def report_written(self) -> None:
        """Look again if more of the report has changed than its heartbeat. A look is due anyway before a heartbeat is stale.

        If Ready is lost, give up what is being written: it may hang, and that the node is not ready must be written first.
        """
        verdict = judge(self.files.report)
        with self._turning:
            before = self._published
            if before is not None and before.ready and not verdict.ready:
                self._writer.api.abandon()
        if verdict.without_heartbeat() != before:
            self.wake()

    def run(self) -> None:
        """Publish until the process ends. Another thread runs ``watch.follow``."""
        while True:
            alive()
            self._changed.wait(min(self.turn(), LOOK_EVERY))
            self._changed.clear()

    def turn(self) -> float:
        """Write what differs. :returns: the seconds until there may be something to do although nothing has changed."""
        with self._turning:
            verdict = judge(self.files.report)
            self._published = verdict.without_heartbeat()
            self._writer.api.resume()
        hold = self._calm.hold(verdict.ready, self.clock())
        for name in ("absent", "calm"):
            self.steps.trouble.pop(name, None)
        # If the token cannot be renewed, the present one is used until it expires. A renewal delays no NotReady.
        identity = [("identity", self._keep_identity)]
        due = self.steps.take(identity) if verdict.ready else []
        node = self.watch.node
        if self.watch.known and node is not None:
            due += self._write(verdict, node, hold)
        elif self.watch.known:
            self.steps.trouble["absent"] = (
                f"the cluster has no Node {self.settings.node_name} yet, or node_name is wrong"
            )
        if not verdict.ready:
            due += self.steps.take(identity)
        self._acknowledge()
        return max(0.0, min(due))

    def _write(self, verdict: Verdict, node: Node, hold: float) -> list[float]:
        """Take the steps for a verdict. :returns: the seconds until each is due again.

        :param hold: seconds for which a Ready must not be published yet.
        """
        steps = self._steps(verdict)
        due = []
        if hold:
            # Renew the Lease and say what is bad only: the Node goes on saying NotReady.
            steps, due = [step for step in steps if step[0] != "ready"], [hold]
            self.steps.trouble["calm"] = NOT_CALM
        self._taken = frozenset(name for name, _ in steps)
        last = LAST_WAIT if verdict.ready else LAST_URGENT_WAIT
        due += self.steps.take([(name, partial(step, verdict, node)) for name, step in steps], last)
        report = verdict.report
        if report is not None and not hold and not self._node_differs():
            self.acknowledged.now = evolve(
                self.acknowledged.now, boot_id=report.boot_id, generation=report.generation, ready=verdict.ready
            )
        return due

    def _steps(self, verdict: Verdict) -> list[tuple[str, Step]]:
        """The steps for a verdict, in order. A step that is refused stops no other one, and has a back-off of its own.

        The Lease of a ready node comes first: if it had expired, a sweep would withdraw Ready again. The conditions, labels and
        taint are one step, so that the taint stays until the condition is True. If the node is not ready, the taint comes
        first: it keeps pods away. Ready and NotReady have steps of different names, so that the back-off of one never delays
        the other. The devices come last: they may take many writes, and a policy of an earlier version refuses them.
        """
        devices: list[tuple[str, Step]] = [("quarantine", self._device_taints.keep), ("devices", self._publish_devices)]
        if verdict.ready:
            return [("lease", self._renew), ("ready", self._publish_ready), *devices]
        return [("taint", self._withdraw), ("condition", self._publish_conditions), ("notice", self._renew), *devices]

    def _step_failed(self, name: str, error: Exception) -> None:
        self._writer.api.close()
        if isinstance(error, Refused) and error.status in (404, 409, 422) and name in ON_NODE:
            # What the watch has shown is out of date: the Node was replaced, or somebody has just written it.
            self.watch.relist()

    def _troubles(self) -> dict[str, str]:
        relevant = self._taken | {"identity", "absent", "calm", "labels"}
        return {name: trouble for name, trouble in self.steps.trouble.items() if name in relevant}

    def _node_differs(self) -> bool:
        return not self._troubles().keys().isdisjoint(ON_NODE)

    def _keep_identity(self, clock: float) -> float:
        if clock >= self._identity_due:
            # At most an hour: a token ends at a time of day, and somebody may set the clock.
            self._identity_due = clock + min(self.identity.keep(self.now(), self._writer.api), LONGEST_SLEEP)
        return self._identity_due - clock

    def _publish_ready(self, verdict: Verdict, node: Node, clock: float) -> float:
        """Say that the node is ready: conditions first, then labels and taint."""
        labels = read_labels(self.files.labels)
        self.steps.trouble.pop("labels", None)
        absent, labels_due = self._plugins_absent(verdict, labels, node, clock)
        wanted = desired(verdict, self.settings, labels, node, absent, self.now())
        node, conditions_due = self._writer.write_conditions(wanted, node, clock)
        self._writer.write_labels_and_taint(wanted, node, clock, apart=False)
        self.acknowledged.now = evolve(self.acknowledged.now, tainted_until=wanted.tainted_until)
        return min(labels_due, conditions_due, _stale_in(verdict))

    def _withdraw(self, verdict: Verdict, node: Node, clock: float) -> float:
        """Keep pods away from a node that is not ready: set the taint, and remove the label that says ready."""
        absent, due = False, LONGEST_SLEEP
        labels: tuple[Label, ...] = ()
        try:
            labels = read_labels(self.files.labels)
            absent, due = self._plugins_absent(verdict, labels, node, clock)
            self.steps.trouble.pop("labels", None)
        except ValueError as error:
            self.steps.trouble["labels"] = str(error)
        wanted = desired(verdict, self.settings, labels, node, absent)
        self._writer.write_labels_and_taint(wanted, node, clock, apart=True)
        return min(due, _stale_in(verdict))

    def _publish_conditions(self, verdict: Verdict, node: Node, clock: float) -> float:
        """Say in the conditions that the node is not ready. A policy may allow writes of nodes/status, but not of the Node."""
        node = self.watch.node or node
        _, due = self._writer.write_conditions(desired(verdict, self.settings, (), node, False), node, clock)
        return min(due, _stale_in(verdict))

    def _publish_devices(self, verdict: Verdict, node: Node, clock: float) -> float:
        """Say in a condition which NICs are not ready. It has a write of its own, which delays and endangers no other."""
        node = self.watch.node or node
        wanted = devices_ready(verdict, node)
        if wanted is None:
            return LONGEST_SLEEP
        _, due = self._devices_writer.write_conditions(wanted, node, clock)
        return min(due, _stale_in(verdict))

    def _plugins_absent(
        self, verdict: Verdict, labels: tuple[Label, ...], node: Node, clock: float
    ) -> tuple[bool, float]:
        devices = verdict.report.devices if verdict.fresh and verdict.report is not None else ""
        absent = self.plugins.absent(devices, labels, node, boot_id(), clock)
        self.acknowledged.now = evolve(self.acknowledged.now, devices=self.plugins.devices)
        return absent

    def _renew(self, verdict: Verdict, node: Node, clock: float) -> float:
        """Renew the Lease; if the Node cannot be made to say NotReady, the Lease's annotation does."""
        notice = notice_of(verdict) if not verdict.ready and self._node_differs() else None
        if not verdict.fresh or verdict.report is None:
            self._lease.lapse(notice)
            return LONGEST_SLEEP
        return self._lease.renew(node, verdict.report, notice, clock)

    def _acknowledge(self) -> None:
        """Record what is published, and why the rest is not."""
        troubles = [*self._troubles().values(), self.watch.trouble, self._device_taints.trouble]
        error = "; ".join(dict.fromkeys(filter(None, troubles)))
        refused = self._writer.api.refused or self.watch.api.refused
        self.acknowledged.now = evolve(self.acknowledged.now, error=error, refused=refused)
        self.acknowledged.write(self.now())


def alive() -> None:
    """Tell systemd that the publishing thread lives. No other thread may say so: systemd must replace one that hangs."""
    notify("WATCHDOG=1")


def _stale_in(verdict: Verdict) -> float:
    """Seconds until the heartbeat is stale. No file is written then that would wake the reporter."""
    return STALE - verdict.age + 1.0 if verdict.fresh else LONGEST_SLEEP
