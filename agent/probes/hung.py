"""Every device answers. The agent leaves a device alone that cannot be read, or a call to which never returned."""

from __future__ import annotations

from agent.hardware.functions import HUNG, UNREADABLE
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "DevicesAnswer"
STAGE: Stage = "device"
# For a NIC of the spec, NicsPresent is False or Unknown too, with the NIC's own severity.
SEVERITY: Severity = "warn"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """Unknown if some devices do not answer; the message names them."""
    hung = [function.address for function in have.functions if function.hung]
    unreadable = [f"{each.address} ({each.unreadable})" for each in have.functions if each.unreadable and not each.hung]
    parts = []
    if hung:
        parts.append(f"a call to {', '.join(hung)} never returned; left alone until that call ends, or the next boot")
    if unreadable:
        parts.append(f"left alone, since they cannot be read: {', '.join(unreadable)}")
    faults = [
        FunctionFault(each.address, HUNG if each.hung else UNREADABLE, each.unreadable or "a call to it never returned")
        for each in have.functions
        if each.hung or each.unreadable
    ]
    if not parts:
        return [condition(TYPE, "AllAnswer")]
    return [condition(TYPE, HUNG if hung else UNREADABLE, "; ".join(parts), faults=faults)]
