"""The clock is synchronised: certificates, leases and logs of several nodes depend on it. Judged as `timedatectl` does."""

from __future__ import annotations

from agent.machine import Machine
from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "ClockSynchronised"
STAGE: Stage = "device"
# A lost time service shows only after hours.
PERIOD = 900.0
# At boot the clock is set a moment after the first reading.
RECHECK = 60.0
# A reading may have to wait until D-Bus has started timedated.
DEADLINE = 90.0
SEVERITY: Severity = "warn"  # all nodes share the time service: its outage must not make a whole fleet unready


def read(machine: Machine, want: Wanted) -> bool:
    """Whether the clock is synchronised. Raises OSError while that is unknown, as early in a boot."""
    return machine.system.clock_synchronised()


def judge(want: Wanted, have: Snapshot, facts: bool) -> list[Condition]:
    """False if the clock is not synchronised."""
    if facts:
        return [condition(TYPE, "Synchronised")]
    return [condition(TYPE, "NotSynchronised", "nothing has set the clock for hours, or since the boot")]
