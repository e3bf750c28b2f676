"""Takes a node out of service, changes it, and brings it back.

An annotation of the Node records each step, in the same patch that makes the step. So another run, on any control host, can
resume or undo a maintenance. A maintenance that fails before the change on the node has begun is undone, and so is one whose
change fails while the node is still ready. If it fails otherwise, the node stays cordoned, with the record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic
from typing import Any, Literal, TypeVar

import httpx2
from attrs import evolve, field, frozen
from lightkube import ApiError
from lightkube.resources.core_v1 import Node

from agent.report import names
from agent.report.records import Disruption
from fleet import nic_devices, node_patch
from fleet.api import ABSENT, FORBIDDEN, Api, Failed, answers, code, errors
from fleet.eviction import CannotDrain, Rules, drain
from fleet.inventory import Hosts
from fleet.maintenance_record import KEPT, Record, Step, annotated, finished, not_finished, record_of
from fleet.nic_devices import NicDevices
from fleet.node_patch import if_temporary
from fleet.objects import CHANGED, IN_SERVICE, annotations_of, is_cordoned, metadata_of, name_of, unready
from fleet.pods import NodePods
from fleet.standing import nothing_waits, standing

MARGIN = 60.0
"""Seconds that the connection to a node may take beyond the change."""

T = TypeVar("T")

NodeResult = Literal["done", "undone", "failed", "interrupted", "not started"]


class Interrupted(Exception):
    """The command is to stop."""


class Lost(Exception):
    """The node has no maintenance of this run, or no longer; the message says why."""


class NothingWaits(Exception):
    """No change of the node waits, by its report."""


@frozen
class Maintenance:
    """How nodes are maintained: the connections, what the agents may do, and the timeouts in seconds.

    ``resume``: continue, or undo, the maintenance of a node that an earlier run has begun. ``again``: in words, what resumes a
    maintenance, if it is not this command; then only records with these words are resumed. ``conditions``: those that a node
    must have to be uncordoned. ``boot_id``: see :func:`unready`. ``nic``: the only NIC to change; then its devices are tainted,
    and no node is cordoned. ``since``: when this run began, which tells its records from others.
    ``_written``: the nodes whose record this run, or an earlier step of the same deploy, has written. This user may write them.
    """

    api: Api
    hosts: Hosts
    allow: Disruption
    rules: Rules
    drain_timeout: float
    apply_timeout: float
    ready_timeout: float
    tell: Callable[[str], object]
    resume: bool = False
    stop: Event = field(factory=Event)
    again: str = ""
    conditions: tuple[str, ...] = CHANGED
    boot_id: str = ""
    nic: str = ""
    since: str = field(init=False)
    _written: set[str] = field(factory=set, init=False)

    @since.default
    def _(self) -> str:
        return self.api.now.isoformat()

    def run(self, nodes: Sequence[str], at_once: int) -> dict[str, tuple[NodeResult, str]]:
        """Maintain nodes, so many at the same time, until one fails. Returns the result and its reason by node."""
        results: dict[str, tuple[NodeResult, str]] = dict.fromkeys(nodes, ("not started", ""))
        failed = Event()

        def maintain_unless_stopped(node: str) -> None:
            if not failed.is_set() and not self.stop.is_set():
                try:
                    results[node] = self.maintain(node)
                except NothingWaits:
                    results[node] = "done", "by its report no change waits, so it is left as it is"
                    self.tell(f"{node}: {results[node][1]}")
                finally:
                    if results[node][0] != "done":
                        failed.set()

        with ThreadPoolExecutor(at_once) as pool:
            waiting = [pool.submit(maintain_unless_stopped, node) for node in nodes]
        for future in waiting:
            future.result()
        return results

    def give_back(self, name: str) -> tuple[NodeResult, str]:
        """Undo a node's maintenance; the result and its reason."""
        if self.stop.is_set():
            return "not started", ""
        return self._step(name, lambda: self._undo(name), "")

    def take_out(self, name: str) -> tuple[NodeResult, str]:
        """Cordon and drain a node, so that it can be changed; the result and its reason. A drain that fails is undone."""
        # Also if it was not cordoned when it was read: a request without an answer may still be carried out.
        began = self._step(name, lambda: self._begin(name), "it may be")
        return self._step(name, lambda: self._empty(name, began)) if isinstance(began, Record) else began

    def bring_back(self, name: str) -> tuple[NodeResult, str]:
        """Wait until a node that was taken out is ready, and uncordon it; the result and its reason."""
        self._written.add(name)
        return self._step(name, lambda: self._return(name, self.resumes))

    def resumes(self, record: Record) -> bool:
        """Whether this run goes on with the maintenance that an earlier one has recorded."""
        return self.resume and self.again in ("", record.again)

    def _is_own(self, record: Record) -> bool:
        return (record.by, record.since) == (self.api.user, self.since)

    def maintain(self, name: str) -> tuple[NodeResult, str]:
        """Take a node out, change it, and bring it back; the result and its reason."""
        result = self.take_out(name)
        return result if result[0] != "done" else self._step(name, lambda: self._change(name))

    @property
    def _held(self) -> str:
        return f"in maintenance, with {self.nic} tainted" if self.nic else "cordoned"

    def _go_on(self, name: str) -> str:
        device = f" --device {self.nic}" if self.nic else ""
        return self.again or f"trackbed fleet maintain {name} {self.hosts.words} --allow {self.allow}{device} --resume"

    def _step(self, name: str, step: Callable[[], T], left: str = "it stays") -> T | tuple[NodeResult, str]:
        """Run a step of a node's maintenance. Returns the step's result; if it fails, the node's result and the reason.

        :param left: the reason's words before "cordoned" or "in maintenance", such as "it stays"; empty: it does not say that.
        """
        go_on, undo = self._go_on(name), f"trackbed fleet maintain {name} --undo"
        try:
            with errors(), answers(self.api.client):
                try:
                    return step()
                except ApiError as error:
                    if code(error) != ABSENT:
                        raise
                    raise Lost(f"there is no Node {name}: {error.status.message}; see: trackbed fleet status") from None
        except Interrupted:
            return "interrupted", f"{left} {self._held}; go on: {go_on}; or give it back: {undo}"
        except Lost as error:
            return "failed", str(error)
        except Failed as error:
            return "failed", f"{error.message}; {left} {self._held}; then {go_on}, or {undo}" if left else error.message

    def _undo(self, name: str) -> tuple[NodeResult, str]:
        self._end(name, self.resumes)
        return "undone", ""

    def _empty(self, name: str, began: Record) -> tuple[NodeResult, str]:
        # What a killed run has left of the rules is not known, so a NIC is tainted again, unless nothing is left to change.
        if began.step == "drain" or self.nic:
            try:
                with answers(self.api.client):
                    self._drain(name, began.step != "drain")
                self._check_stop()
            except (Interrupted, Failed, ApiError) as error:
                if began.step != "drain":
                    raise
                self._end(name, self._is_own)
                return "undone", str(error) or "interrupted before anything was changed"
            self._note(name, "apply", self._is_own)
        self._check_stop()
        return "done", ""

    def _change(self, name: str) -> tuple[NodeResult, str]:
        try:
            self._apply(name)
        except Failed as error:
            unharmed = (
                nic_devices.is_good(self.hosts, name, self.nic) if self.nic else not self._unready(name, IN_SERVICE)
            )
            if not unharmed:
                raise
            # Nothing was harmed, and to stay cordoned frees no device: a pod of a DaemonSet has one, which the message names.
            self._end(name, self._is_own)
            return "undone", error.message
        return self._return(name, self._is_own)

    def _return(self, name: str, takes: Callable[[Record], bool]) -> tuple[NodeResult, str]:
        # The NIC is as its spec says, by the command on the node. Other NICs may wait for a maintenance of their own.
        if not self.nic:
            self._note(name, "wait", takes)
            self._wait(name)
        self._end(name, self._is_own)
        return "done", ""

    def _begin(self, name: str) -> Record:
        """Cordon the node and write the record; to resume, take over the record of an earlier run.

        :raises Interrupted: the command is to stop, and the node has no record of this run.
        :raises Lost: there is a record, and this run resumes none.
        :raises NothingWaits: it has no record, and is to be changed only.
        """

        def change(node: Node) -> tuple[dict[str, Any] | None, Record]:
            recorded = record_of(node)
            if recorded and self._is_own(recorded):
                return None, recorded
            self._check_stop()
            if recorded and not (self.resumes(recorded) and recorded.device == self.nic):
                # It was not there when the command began.
                raise Lost(not_finished(name, recorded))
            # A deploy may be ahead of the report, or drain for a reboot.
            if not (recorded or self.again or self.nic) and self._nothing_waits(node):
                raise NothingWaits
            uncordoned = not (self.nic or is_cordoned(node))
            cordoned = uncordoned or (recorded is not None and recorded.cordoned)
            # Do not drain again after a drain: a drain that fails is undone, but the node may be half changed by now. But a
            # node that somebody has uncordoned since has pods again.
            step = recorded.step if recorded and not uncordoned else "drain"
            kept = tuple(key for key in KEPT if not (self.nic or key in annotations_of(node)))
            kept = recorded.kept if recorded else kept
            record = Record(self.api.user, self.since, step, cordoned, str(self.allow), self.again, self.nic, kept)
            return {**annotated(record), **({} if self.nic else {"spec": {"unschedulable": True}})}, record

        record = self._patch(name, change)
        self._written.add(name)
        self.tell(f"{name}: the maintenance of {self.nic} begins" if self.nic else f"{name}: cordoned")
        return record

    def _nothing_waits(self, node: Node) -> bool:
        """Whether the node's report says that no change waits. If that is not known, say so."""
        name, why = name_of(node), "its Node does not say"
        nothing = nothing_waits(node)
        if nothing:
            try:
                lease, fault = self.api.lease(name)
            except ApiError as error:
                if code(error) != FORBIDDEN:
                    raise
                why = "this user may not read its Lease (rights: docs/fleet.md)"
            else:
                one = standing(name, node, lease, self.api.now, fault)
                if not one.expired:
                    return not one.notice
                why = one.message
        if nothing is not False:
            self.tell(f"{name}: it is not known whether a change waits: {why}")
        return False

    def _note(self, name: str, step: Step, takes: Callable[[Record], bool]) -> None:
        """Record a step. The record is then this run's own; ``takes``: which one this run may write.

        :raises Lost: there is no record, or one that this run may not write.
        """

        def change(node: Node) -> tuple[dict[str, Any], None]:
            record = self._recorded(node, takes)
            return annotated(evolve(record, by=self.api.user, since=self.since, step=step)), None

        self._patch(name, change)
        self._written.add(name)

    def _recorded(self, node: Node, takes: Callable[[Record], bool]) -> Record:
        """The record of the node's maintenance; ``takes``: which one this run may write.

        :raises Lost: there is no record, or one that this run may not write.
        """
        if (record := record_of(node)) is None:
            if self.nic:
                # Also the rules that this run has made since.
                nic_devices.release(self.api, name_of(node), recorded=True)
            raise Lost("its maintenance was undone by somebody else")
        if not takes(record):
            raise Lost(not_finished(name_of(node), record))
        return record

    def _end(self, name: str, takes: Callable[[Record], bool]) -> None:
        """Remove the record, and uncordon the node if the maintenance cordoned it; ``takes``: which record this run may end.

        :raises Lost: there is a record that this run may not end.
        """

        def change(node: Node) -> tuple[dict[str, Any] | None, str]:
            if (record := record_of(node)) and not takes(record):
                raise Lost(not_finished(name, record))
            body, said = finished(node)
            # An undo that was killed may have removed the record and left rules.
            of_nic = bool(record.device) if record else bool(self.nic) or (self.resume and not self.again)
            if of_nic:
                said += nic_devices.release(self.api, name, record is not None)
            return body, said

        self.tell(f"{name}: {self._patch(name, change)}")

    def blockers(self, name: str) -> tuple[str, ...]:
        """Why a drain of the node would be refused; empty: it would not."""
        try:
            return drain(self._pods(name).read(), self.rules).blockers
        except CannotDrain as error:
            return (str(error),)

    def _pods(self, name: str) -> NodePods:
        return NodePods(self.api, name, self.rules, self.api.now, self.tell, self._check_stop)

    def _drain(self, name: str, begun: bool = False) -> None:
        taken: NodePods | NicDevices | None = None
        check: Callable[[ApiError | httpx2.TransportError], str] = if_temporary
        pods, deadline = self._pods(name), monotonic() + self.drain_timeout
        while True:
            self._check_stop()
            try:
                # If somebody has uncordoned the node meanwhile, the pods that are evicted from it come back.
                node, _ = self.api.node(name)
                self._recorded(node, self._is_own)
                if not (self.nic or is_cordoned(node)):
                    raise CannotDrain("somebody has uncordoned it")
                taken = taken or (self._devices(node, pods, begun) if self.nic else pods)
                left, why = taken.take()
                check = self._if_temporary(name)
            except (ApiError, httpx2.TransportError) as error:
                left, why = "its pods", check(error)
            if not left:
                return
            if monotonic() >= deadline:
                raise CannotDrain(f"after {self.drain_timeout:.0f} s there are still {left}: {why}")
            self._pause()

    def _devices(self, node: Node, pods: NodePods, begun: bool) -> NicDevices:
        nic = nic_devices.ask(self.hosts, name_of(node), self.nic)
        return NicDevices(pods, metadata_of(node).uid or "", nic, begun)

    def _apply(self, name: str) -> None:
        self.tell(f"{name}: making the changes of its spec, up to {self.allow}")
        words = [names.COMMAND, "apply", "--allow", str(self.allow), "--timeout", f"{self.apply_timeout:.0f}"]
        words += ["--device", self.nic] if self.nic else []
        ran = self.hosts.run(name, words, self.apply_timeout + MARGIN)
        if ran.failed:
            raise Failed(f"trackbed apply on the node failed: {ran.output}")

    def _wait(self, name: str) -> None:
        deadline = monotonic() + self.ready_timeout
        while reasons := self._unready(name, self.conditions):
            if monotonic() >= deadline:
                raise Failed(f"not ready after {self.ready_timeout:.0f} s: {'; '.join(reasons)}")
            self._pause()
        self.tell(f"{name}: ready")

    def _unready(self, name: str, conditions: tuple[str, ...]) -> list[str]:
        try:
            return unready(self.api.node(name)[0], conditions, self.boot_id)
        except (ApiError, httpx2.TransportError) as error:
            # The change may interrupt the connection to the API server: go on waiting.
            return [self._if_temporary(name)(error)]

    def _patch(self, name: str, change: Callable[[Node], tuple[dict[str, Any] | None, T]]) -> T:
        return node_patch.patch(self.api, name, change, self.stop, self.ready_timeout, self._if_temporary(name))

    def _if_temporary(self, name: str) -> Callable[[ApiError | httpx2.TransportError], str]:
        """As if_temporary. An API server that starts also forbids what this user may do, until it has read all roles."""

        def check(error: ApiError | httpx2.TransportError) -> str:
            if isinstance(error, ApiError) and code(error) == FORBIDDEN and name in self._written:
                return f"the API server forbids it now: {error.status.message}"
            return if_temporary(error)

        return check

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Interrupted

    def _pause(self) -> None:
        if self.stop.wait(node_patch.CHECK_INTERVAL):
            raise Interrupted
