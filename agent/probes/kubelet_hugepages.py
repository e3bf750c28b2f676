"""The running kubelet has counted the huge pages that there are now.

It counts them only when it starts. If the agent changes a pool after that, the Node keeps the old number.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.kinds.host import hugepages
from agent.machine import Machine
from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "KubeletHugepages"
STAGE: Stage = "cluster"
SEVERITY: Severity = "warn"  # pods that ask for no huge pages do not notice


def read(machine: Machine, want: Wanted) -> Mapping[str, tuple[int, int]]:
    """The sizes of which the running kubelet has counted another number of pages."""
    return hugepages.stale(machine)


def judge(want: Wanted, have: Snapshot, facts: Mapping[str, tuple[int, int]]) -> list[Condition]:
    """False if the pools were changed since the kubelet has started. No condition where nobody asks for huge pages."""
    if not facts:
        return [condition(TYPE, "Counted")] if want.spec.hugepages else []
    listed = ", ".join(f"{counted} of {size}, and there are {now}" for size, (counted, now) in sorted(facts.items()))
    return [condition(TYPE, "CountedBefore", f"the kubelet has counted these huge pages at its start: {listed}")]
