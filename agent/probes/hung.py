"""Every device answers. One to which a call never returned, or that cannot be read, is left alone: nobody knows its state."""

from __future__ import annotations

from agent.hardware.functions import REMEDY, UNREADABLE
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "DevicesAnswer"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # a NIC of the spec among them is missing besides: NicsPresent, as required as the NIC is


def check(want: Wanted, have: Snapshot) -> list[Condition]:
    """Unknown names the devices that do not."""
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
