"""Every device answers: one to which a call never returned is left alone, and nobody knows its state."""

from __future__ import annotations

from agent.hardware.functions import Wanted
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot

TYPE = "DevicesAnswer"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # a NIC of the spec among them is missing besides: NicsPresent, as required as the NIC is


def check(want: Wanted, have: Snapshot) -> list[Condition]:
    """Unknown names the devices that do not."""
    hung = [function.address for function in have.functions if function.hung]
    if not hung:
        return [Condition(TYPE, "True", "AllAnswer")]
    message = f"a call to {', '.join(hung)} never returned; left alone until that call ends, or the next boot"
    return [Condition(TYPE, "Unknown", "DeviceHung", message)]
