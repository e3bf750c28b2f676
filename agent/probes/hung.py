"""Every device answers. The agent does not touch a device to which a call never returned, or that cannot be read."""

from __future__ import annotations

from agent.hardware.functions import REMEDY, UNREADABLE
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "DevicesAnswer"
STAGE: Stage = "device"
SEVERITY: Severity = (
    "warn"  # for a NIC of the spec, NicsPresent is False or Unknown as well, with the NIC's own severity
)


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """Unknown if some devices do not answer; the message names them."""
    hung = [function.address for function in have.functions if function.hung]
    unreadable = [f"{each.address} ({each.unreadable})" for each in have.functions if each.unreadable and not each.hung]
    parts = (
        [f"a call to {', '.join(hung)} never returned; left alone until that call ends, or the next boot"]
        if hung
        else []
    )
    parts += [f"left alone, since they cannot be read: {', '.join(unreadable)}; {REMEDY}"] if unreadable else []
    if not parts:
        return [Condition(TYPE, "True", "AllAnswer")]
    return [Condition(TYPE, "Unknown", "DeviceHung" if hung else UNREADABLE, "; ".join(parts))]
