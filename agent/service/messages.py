"""The worker's messages to the supervisor: JSON objects, one a line, most of them reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from threading import Lock
from typing import Any, TextIO

from attrs import define, evolve, field

from agent.engine.converge import Pass
from agent.kinds import bindings
from agent.report.records import Change, Condition, Report, to_plain
from agent.report.verdict import is_ready
from agent.service.spec_in_force import SpecInForce
from agent.sha256 import digest
from agent.spec.node import NodeSpec, spec_hash

UP_TO_DATE = "UpToDate"


@define
class Output:
    """Writes the messages. Two threads share it: the one that runs passes, and the inbox's."""

    _stream: TextIO
    _lock: Lock = field(factory=Lock, init=False)
    _last: Report | None = field(default=None, init=False)

    def write(self, message: Report | Mapping[str, Any]) -> None:
        """Write a message; a report only if it differs from the last one, since the supervisor must not wake up for nothing."""
        if message == self._last:
            return
        with self._lock:
            self._stream.write(json.dumps(to_plain(message)) + "\n")
            self._stream.flush()
        self._last = message if isinstance(message, Report) else self._last

    def forget(self) -> None:
        """Write the next report even if it equals the last one."""
        self._last = None


def of_pass(result: Pass, in_force: SpecInForce, kubelet_started: float) -> Report:
    """The report after a complete pass."""
    conditions = (*result.conditions, _up_to_date(result, in_force))
    report = _report(result.want.spec, conditions, in_force)
    devices = _devices(result)
    return evolve(report, outcomes=result.outcomes, devices=devices, kubelet=kubelet_started, nics=result.nics)


def of_announcement(change: Change, announcement: str, last: Pass | None, in_force: SpecInForce) -> Report:
    """The report before the first change of a pass is made: the node must not count as ready while it is changed."""
    converging = Condition("Converged", "False", "Converging", str(change))
    others = tuple(c for c in last.conditions if c.type != converging.type) if last else ()
    nics = tuple(
        evolve(nic, ready=False, reason=converging.reason, message=str(change), certainty="certain")
        if nic.pci == change.device
        else nic
        for nic in (last.nics if last else ())
    )
    return evolve(_report(in_force.spec, (converging, *others), in_force), announcement=announcement, nics=nics)


def of_failed_pass(reason: str, message: str, in_force: SpecInForce) -> Report:
    """The report after a pass that ended early: nothing is known of the devices."""
    observes = in_force.spec is not None and in_force.spec.mode == "observe"
    # In observe mode no condition is required, as after a complete pass.
    unknown = Condition("Converged", "Unknown", reason, message, severity="warn" if observes else "required")
    return _report(in_force.spec, (unknown,), in_force)


def without_spec(in_force: SpecInForce) -> Report:
    """The report while there is no usable spec."""
    return _report(None, (Condition("Converged", "False", "NoSpec", in_force.refusal),), in_force)


def _up_to_date(result: Pass, in_force: SpecInForce) -> Condition:
    """``UpToDate``: False if the newest spec was refused, or a part of it waits for the users of a device."""
    if in_force.refusal:
        return Condition(UP_TO_DATE, "False", "Refused", in_force.refusal, severity="warn")
    if result.waiting:
        message = "; ".join(f"{outcome.change}: {outcome.error}" for outcome in result.waiting)
        return Condition(UP_TO_DATE, "False", "Deferred", message, severity="warn")
    return Condition(UP_TO_DATE, "True", "SpecDone", severity="warn")


def _devices(result: Pass) -> str:
    """A hash of the spec's PFs and the driver of each of their VFs; empty while one of them hangs or cannot be read.

    If it changes, device plugins start again: sriov-network-device-plugin lists VFs when it starts, by their drivers.
    """
    if any(each.address in result.want.left_alone and (each.hung or each.unreadable) for each in result.have.functions):
        return ""
    of_pfs: Mapping[str, bindings.Bindings] = result.have[bindings.NAME]
    drivers = {pf: sorted((index, vf.driver) for index, vf in each.vfs.items()) for pf, each in of_pfs.items()}
    present = [(pf, drivers.get(pf, [])) for pf in sorted(result.want.nics)]
    return digest(json.dumps(present).encode()).hex()[:12]


def _report(spec: NodeSpec | None, conditions: tuple[Condition, ...], in_force: SpecInForce) -> Report:
    """The part of a report that all have. The supervisor adds the boot, the agent's version and the times."""
    return Report(
        node_name=spec.node_name if spec else "",
        spec_hash=spec_hash(spec) if spec else "",
        boot_id="",
        agent_version="",
        ready=is_ready(conditions),
        up_to_date=all(c.status == "True" for c in conditions if c.type == UP_TO_DATE) and not in_force.refusal,
        refusal=in_force.refusal,
        conditions=conditions,
    )
