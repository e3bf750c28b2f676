"""Each NIC of the spec matches exactly one device."""

from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "NicsPresent"
STAGE: Stage = "device"
SEVERITY: Severity = "required"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """One condition for each NIC that was not found; its severity is a warning if the NIC is not required."""
    return list(want.missing) or [condition(TYPE, "AllPresent")]
