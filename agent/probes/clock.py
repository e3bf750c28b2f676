"""The clock is synchronised: certificates, leases and logs of several nodes depend on it.

As `timedatectl` judges it: the kernel's own bound of the clock's error (adjtimex(2), ``maxerror``) is below 16 s. The
kernel lets it grow by 500 µs a second, and it reaches that bound nine hours after the last correction. The flag
STA_UNSYNC is not asked: chrony sets it on a synchronised clock, too, unless it has ``rtcsync``.
"""

from __future__ import annotations

from agent.change import Condition, Severity, Stage
from agent.machine import Machine
from agent.nics import Wanted
from agent.snapshot import Snapshot

TYPE = "ClockSynchronised"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # all nodes share the time service: its outage must not take a fleet down

BOUND = 16_000_000
"""Microseconds: NTP_PHASE_LIMIT of the kernel's include/linux/timex.h, beyond which it gives up."""


def read(machine: Machine, want: Wanted) -> int | None:
    """The bound of the clock's error in microseconds; None if the kernel does not tell us."""
    try:
        return machine.system.clock_error()
    except PermissionError:
        return None  # the unit's sandbox (ProtectClock=) refuses even to read it: asking again is of no use


def judge(want: Wanted, have: Snapshot, facts: int | None) -> list[Condition]:
    """False if nobody disciplines the clock; Unknown where it cannot be asked."""
    if facts is None:
        return [Condition(TYPE, "Unknown", "NotTold", "the agent may not ask the kernel (adjtimex); see `timedatectl`")]
    if facts < BOUND:
        return [Condition(TYPE, "True", "Synchronised")]
    remedy = "start chronyd or systemd-timesyncd, and see `timedatectl` and whether its servers are reached"
    return [
        Condition(TYPE, "False", "NotSynchronised", f"nothing has set the clock for hours, or since the boot; {remedy}")
    ]
