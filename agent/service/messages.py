"""The worker's messages to the supervisor: JSON objects, one a line, most of them the body of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from threading import Lock
from typing import Any, TextIO

from attrs import define, field

from agent.engine.converge import Pass
from agent.kinds import vfs
from agent.report.records import Change, Condition, Outcome, to_plain
from agent.report.verdict import is_ready
from agent.service.spec_in_force import SpecInForce
from agent.spec.node import NodeSpec, spec_hash

UP_TO_DATE = "UpToDate"

Body = dict[str, Any]
"""The part of a report that the worker makes; the supervisor adds the rest."""


@define
class Output:
    """Writes the messages. Two threads share it: the one that runs passes, and the listener's."""

    _stream: TextIO
    _lock: Lock = field(factory=Lock, init=False)
    _last: Mapping[str, Any] = field(factory=dict, init=False)

    def write(self, message: Mapping[str, Any]) -> None:
        """Write a message, whatever was written before."""
        with self._lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()

    def publish(self, body: Mapping[str, Any]) -> None:
        """Write a body, unless it equals the last one: the supervisor must not wake up for nothing."""
        if body != self._last:
            self.write(body)
            self._last = body

    def forget(self) -> None:
        """Write the next body even if it equals the last one."""
        self._last = {}


def of_pass(result: Pass, in_force: SpecInForce, kubelet_started: float) -> Body:
    """The body after a complete pass."""
    conditions = (*result.conditions, _up_to_date(result, in_force))
    present = {"devices": _devices(result), "kubelet": kubelet_started}
    return {**_body(result.want.spec, result.outcomes, conditions, in_force), **present}


def of_announcement(change: Change, announcement: str, last: Pass | None, in_force: SpecInForce) -> Body:
    """The body before the first change of a pass is made: the node must not count as ready while it is changed."""
    converging = Condition("Converged", "False", "Converging", str(change))
    others = tuple(c for c in last.conditions if c.type != converging.type) if last else ()
    return {**_body(in_force.spec, (), (converging, *others), in_force), "announcement": announcement}


def of_failed_pass(reason: str, message: str, in_force: SpecInForce) -> Body:
    """The body after a pass that ended early: nothing is known of the devices."""
    observes = in_force.spec is not None and in_force.spec.mode == "observe"
    # In observe mode no condition is required, as after a complete pass.
    unknown = Condition("Converged", "Unknown", reason, message, severity="warn" if observes else "required")
    return _body(in_force.spec, (), (unknown,), in_force)


def without_spec(in_force: SpecInForce) -> Body:
    """The body while there is no usable spec."""
    return _body(None, (), (Condition("Converged", "False", "NoSpec", in_force.refusal),), in_force)


def _up_to_date(result: Pass, in_force: SpecInForce) -> Condition:
    """``UpToDate``: False if the newest spec was refused, or a part of it waits for the users of a device."""
    if in_force.refusal:
        return Condition(UP_TO_DATE, "False", "Refused", in_force.refusal, severity="warn")
    if result.waiting:
        message = "; ".join(f"{outcome.change}: {outcome.error}" for outcome in result.waiting)
        return Condition(UP_TO_DATE, "False", "Deferred", message, severity="warn")
    return Condition(UP_TO_DATE, "True", "SpecDone", severity="warn")


def _devices(result: Pass) -> str:
    """A hash of the spec's PFs and their numbers of VFs. When these change, device plugins must be started again."""
    counts: Mapping[str, vfs.VfCount] = result.have[vfs.NAME]
    present = sorted((address, counts[address].count if address in counts else 0) for address in result.want.nics)
    return sha256(json.dumps(present).encode()).hexdigest()[:12]


@lru_cache(maxsize=256)
def _plain(condition: Condition) -> Body:
    """A condition as JSON data, which the caller must not change. It is cached: most conditions are as in the last report."""
    plain: Body = to_plain(condition)
    return plain


def _body(
    spec: NodeSpec | None, outcomes: tuple[Outcome, ...], conditions: tuple[Condition, ...], in_force: SpecInForce
) -> Body:
    return {
        "node_name": spec.node_name if spec else "",
        "spec_hash": spec_hash(spec) if spec else "",
        "ready": is_ready(conditions),
        "up_to_date": all(c.status == "True" for c in conditions if c.type == UP_TO_DATE) and not in_force.refusal,
        "refusal": in_force.refusal,
        "outcomes": to_plain(outcomes),
        "conditions": [_plain(condition) for condition in conditions],
    }
