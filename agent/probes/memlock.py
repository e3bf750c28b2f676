"""Containers may lock memory without limit.

Memory that is registered for RDMA counts against RLIMIT_MEMLOCK, which a container inherits from its runtime unless it has
CAP_IPC_LOCK. The limit is read with prlimit(2) from the running container runtimes; without one the condition is True.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.machine import Machine
from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "ContainerMemlock"
STAGE: Stage = "cluster"
SEVERITY: Severity = "warn"  # the runtimes' packages set 8 MiB, and pods with CAP_IPC_LOCK have no limit

RUNTIMES = {"containerd": "containerd", "dockerd": "docker", "crio": "crio"}
"""The units of container runtimes, by the name of their process."""


def read(machine: Machine, want: Wanted) -> Mapping[str, int]:
    """The limit of each running runtime in bytes; -1 is unlimited."""
    return machine.processes.memlock(frozenset(RUNTIMES))


def judge(want: Wanted, have: Snapshot, facts: Mapping[str, int]) -> list[Condition]:
    """False if a runtime has a limit; the message names it."""
    limited = {name: limit for name, limit in sorted(facts.items()) if limit >= 0}
    if not limited:
        return [condition(TYPE, "Unlimited" if facts else "NoRuntime")]
    listed = ", ".join(f"{name} {limit} bytes ({RUNTIMES[name]}.service)" for name, limit in limited.items())
    return [condition(TYPE, "MemlockLimited", f"locked memory of containers is limited: {listed}")]
