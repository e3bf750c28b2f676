"""Makes the changes of NICs that wait for pods. Taints end the pods of such a NIC, as those of `fleet maintain --device` do.

It runs before the tasks that read the hardware, so that they read what the changes have made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import gevent
from attrs import frozen
from pyinfra.api.command import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from agent.report.records import Change, Disruption
from agent.spec.nic import Nic
from agent.spec.node import NodeSpec, spec_hash
from agent.spec.selector import MOST_NICS, name_of
from tasks import disruption
from tasks.common.commands import Commands, fail
from tasks.common.connection import BY_CONTROL_HOST, deploys_itself
from tasks.common.status import NodeStatus, Status
from tasks.common.turns import Turns
from tasks.kubernetes import KUBERNETES, maintenance
from tasks.node_spec import planned
from tasks.readiness import TIMEOUT

_turns: WeakKeyDictionary[State, Turns] = WeakKeyDictionary()
"""One host after the other, until one fails: the PodDisruptionBudgets count what the host before has evicted."""


@frozen
class _Step:
    """The maintenance of a NIC, with the level that is allowed; None: one that is left from an earlier deploy is undone."""

    nic: str
    allow: Disruption | None


def maintain(spec: NodeSpec, version: str) -> None:
    """Change the NICs whose changes wait for pods, if the inventory asks for that, one after the other."""
    key = KUBERNETES.here()
    if key is not None and key.maintain_nics and spec.nics and spec.mode == "enforce":
        # Whatever the inventory sets: what is not done is deferred, and what fails is not tried again.
        strict: Any = {"_retries": 0, "_ignore_errors": False, "_continue_on_error": False}
        change(name="NICs in use", spec=spec, version=version, ready_timeout=TIMEOUT.here(), **strict)


@operation()
def change(spec: NodeSpec, version: str, ready_timeout: int) -> Commands:
    """End what an earlier deploy has left, then change each NIC in use.

    :param ready_timeout: seconds until the node must be ready with its spec; changes of the spec may still wait then.
    """
    left = _left(spec)
    if not host.state.is_executing:
        plan = planned(spec, version)
        if left or _due(spec, plan.changes if plan else (), host.get_fact(NodeStatus)):
            yield FunctionCommand(_carry_out, (), {})
        return
    if left:
        _await(spec, version, ready_timeout, ready=False)
        yield FunctionCommand(_carry_out, (left,), {})
    yield from _in_turn(lambda: _waiting(spec, version, ready_timeout))


def _await(spec: NodeSpec, version: str, timeout: int, ready: bool) -> Status | None:
    """Wait until the agent has judged the spec, or until the node is ready with it; None: not in time."""
    end, wanted = time.monotonic() + timeout, (version, spec_hash(spec))
    while True:
        status: Status | None = host.get_fact(NodeStatus)
        judged = status and status.report.nics and (status.report.agent_version, status.report.spec_hash) == wanted
        if status and judged and (status.ready or not ready):
            return status
        if time.monotonic() >= end:
            return None
        gevent.sleep(maintenance.POLL_INTERVAL)


def _waiting(spec: NodeSpec, version: str, timeout: int) -> list[_Step]:
    """The NICs to change, by the node's report. Until the node is ready, the agent may still give the spec up."""
    if (status := _await(spec, version, timeout, ready=True)) is None:
        return []
    for each in status.report.nics:
        disruption.settle(_step(each.name))
    return _due(spec, [each.change for each in status.report.outcomes if each.result == "deferred"], status)


def _left(spec: NodeSpec) -> _Step | None:
    """What an earlier deploy has left: it goes on if its level is still allowed."""
    if deploys_itself(host) or (found := maintenance.left_nic()) is None:
        return None
    name, level = found
    nic = _entry(spec, name)
    allow, why = disruption.of_nic(spec, nic, level) if nic else (level, "the spec has no such NIC")
    if why:
        disruption.defer(_step(name), f"{why}; what an earlier deploy has begun is undone")
    return _Step(name, None if why else allow)


def _due(spec: NodeSpec, changes: Iterable[Change], status: Status | None) -> list[_Step]:
    """The NICs to change now: pods alone have them, and their policies allow it. Others are deferred, and named."""
    waiting: dict[str, list[Change]] = {}
    for each in changes:
        if each.required and each.affected:
            waiting.setdefault(each.device, []).append(each)
    found = []
    for verdict in status.report.nics if status else ():
        if (nic := _entry(spec, verdict.name)) and (of_nic := waiting.get(verdict.pci)):
            level = max(each.disruption for each in of_nic)
            allow, why = disruption.of_nic(spec, nic, level)
            if why := why or _hindrance(verdict.name, of_nic):
                disruption.defer(_step(verdict.name), why)
            else:
                found.append(_Step(verdict.name, allow))
    return found


def _step(nic: str) -> str:
    return f"maintenance of {nic}"


def _entry(spec: NodeSpec, name: str) -> Nic | None:
    """Find the entry of the spec's `nics` that gives a NIC this name."""
    return next(
        (
            entry
            for entry in spec.nics
            if name in ([name_of(entry.name, n) for n in range(MOST_NICS)] if entry.select.each else [entry.name])
        ),
        None,
    )


def _hindrance(nic: str, changes: Iterable[Change]) -> str:
    if deploys_itself(host):
        return f"a host that deploys itself maintains no NIC; {BY_CONTROL_HOST}"
    if others := _others(changes):
        return f"in use: {', '.join(others)}"
    return maintenance.why_no_nic(nic)


def _others(changes: Iterable[Change]) -> list[str]:
    """The users that no eviction ends: those of functions that no pod has. A pod's processes are named beside the pod."""
    users = sorted({user for each in changes for user in each.affected})
    of_pods = {_function(user) for user in users if user.startswith("pod ")}
    return [user for user in users if _function(user) not in of_pods]


def _function(user: str) -> str:
    """The function that a user has, as `0000:3b:00.0#1` in `pod ml/job (0000:3b:00.0#1)`."""
    return user.rpartition(" (")[2]


def _in_turn(find: Callable[[], list[_Step]]) -> Commands:
    """Wait for this host's turn, then carry out the steps that ``find`` returns."""
    if not (steps := find()):
        host.noop("no change of a NIC waits for pods")
        return
    hosts = [*host.state.inventory.get_active_hosts()]
    turns = _turns.setdefault(host.state, Turns(len(hosts), at_once=1, stop_at=1))
    when = turns.take(host.name)
    if when == "never":
        for step in steps:
            disruption.defer(
                _step(step.nic), f"the same step on {', '.join(turns.failed)} has failed; mend that, and deploy again"
            )
        return
    succeeded: bool | None = None
    try:
        # Meanwhile a window may have ended.
        for step in find() if when == "later" else steps:
            succeeded = False
            yield FunctionCommand(_carry_out, (step,), {})
            succeeded = True
    finally:
        # Also when pyinfra leaves this generator, since a step has failed.
        turns.end(host.name, succeeded)


def _carry_out(state: State, host: Host, step: _Step) -> bool:
    if step.allow is None:
        result, why = maintenance.give_back()
    else:
        result, why = maintenance.change_nic(step.nic, step.allow, disruption.forced())
        if result == "undone":
            disruption.defer(_step(step.nic), why)
    return result in ("done", "undone") or fail(host, f"{_step(step.nic)}: {why}")
