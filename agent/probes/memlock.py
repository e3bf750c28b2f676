"""Containers may lock memory: registering it for RDMA is charged to RLIMIT_MEMLOCK, which they inherit from their runtime.

A container with CAP_IPC_LOCK needs none of it. Read with prlimit(2) of the runtimes that run; on a node without one there is
nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.machine import Machine
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "ContainerMemlock"
STAGE: Stage = "cluster"
SEVERITY: Severity = "warn"  # their packages come with 8 MiB, and pods that have CAP_IPC_LOCK do without

RUNTIMES = {"containerd": "containerd", "dockerd": "docker", "crio": "crio"}
"""The units of container runtimes, by the name of their process."""


def read(machine: Machine, want: Wanted) -> Mapping[str, int]:
    """The limit of each runtime that runs, in bytes; -1 is none."""
    return machine.processes.memlock(frozenset(RUNTIMES))


def judge(want: Wanted, have: Snapshot, facts: Mapping[str, int]) -> list[Condition]:
    """False names the runtimes that have a limit."""
    limited = {name: limit for name, limit in sorted(facts.items()) if limit >= 0}
    if not limited:
        return [Condition(TYPE, "True", "Unlimited" if facts else "NoRuntime")]
    told = ", ".join(f"{name} {limit} bytes" for name, limit in limited.items())
    units = ", ".join(f"{RUNTIMES[name]}.service" for name in limited)
    remedy = (
        f"give {units} LimitMEMLOCK=infinity in a drop-in, and restart it: only containers started after that have it"
    )
    return [Condition(TYPE, "False", "MemlockLimited", f"locked memory of containers is limited: {told}; {remedy}")]
