"""Each NIC of the spec is there, and is one."""

from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "NicsPresent"
STAGE: Stage = "device"
SEVERITY: Severity = "required"


def check(want: Wanted, have: Snapshot) -> list[Condition]:
    """One condition for each NIC that could not be found; a NIC that is not required is only warned of."""
    return list(want.missing) or [Condition(TYPE, "True", "AllPresent")]
