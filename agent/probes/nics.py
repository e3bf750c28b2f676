"""Each NIC of the spec is there, and is one."""

from agent.change import Condition
from agent.machine import Machine
from agent.nics import Wanted
from agent.snapshot import Snapshot


def check(machine: Machine, want: Wanted, have: Snapshot) -> list[Condition]:
    """``NicsPresent``, once for each NIC that could not be found."""
    return list(want.missing) or [Condition("NicsPresent", "True", "AllPresent")]
