"""The NICs have passed the fabric test with the firmware, driver and port that they have now.

``deploys/fabric.py`` runs the test, and writes its results to the node. Without results there is no condition.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from attrs import frozen

from agent.hardware.functions import device_path, driver
from agent.hardware.rdma import Reader
from agent.hardware.sysfs import read_or, target_of
from agent.machine import Files, Machine
from agent.probes import Probe
from agent.report.fabric import RESULTS_FILE, FabricResults, identity, results_from_json
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "FabricProven"

FAILED, CHANGED, UNTESTED = "TestFailed", "ChangedSinceTest", "NotTested"
DAY = 86400.0


@frozen
class Facts:
    """The results of the last test, what the NICs have now, by PCI address, and how many days ago the test was."""

    results: FabricResults
    now: Mapping[str, Mapping[str, str]]
    days: int


def read(machine: Machine, want: Wanted) -> Facts | str | None:
    """The results and the present NICs; a text if the results cannot be read; None if there are none."""
    text = read_or(machine.files, RESULTS_FILE, "")
    if not text:
        return None
    try:
        results = results_from_json(text)
    except ValueError as error:
        return str(error)
    now = {seen.pci: _identity(machine.files, seen.pci, seen.device) for seen in results.nics}
    return Facts(results, now, int(max(0.0, time.time() - results.time) // DAY))


def _identity(files: Files, pci: str, device: str) -> Mapping[str, str]:
    reader = Reader(files)
    if device not in reader.below(pci):
        return {}
    rdma_device = reader.device(device, ())
    port = rdma_device.ports[0] if rdma_device.ports else None
    name = driver(files, pci)
    module = target_of(files, f"{device_path(pci)}/driver/module") or ""
    version = read_or(files, f"/sys/module/{module}/srcversion", "") or read_or(files, "/proc/sys/kernel/osrelease", "")
    return identity(
        name,
        version,
        rdma_device.firmware,
        rdma_device.node_guid,
        port.link_layer if port else None,
        port.rate if port else None,
    )


def judge(want: Wanted, have: Snapshot, facts: Facts | str | None) -> list[Condition]:
    """False if a NIC has failed the test. Unknown if a NIC was not tested, or is not as it was during the test."""
    if facts is None:
        return []
    if isinstance(facts, str):
        return [condition(TYPE, "ResultUnreadable", facts)]
    failed = [
        FunctionFault(seen.pci, FAILED, f"{seen.nic} ({seen.pci}): {seen.message}")
        for seen in facts.results.nics
        if not seen.good
    ]
    if failed:
        return [_failing(failed)]
    changed = [
        FunctionFault(
            seen.pci, CHANGED, f"{seen.nic} ({seen.pci}): {', '.join(_changes(seen.identity, facts.now[seen.pci]))}"
        )
        for seen in facts.results.nics
        if seen.identity != facts.now[seen.pci]
    ]
    if changed:
        return [_failing(changed)]
    tested = {seen.nic for seen in facts.results.nics}
    untested = {
        nic.nic.name: FunctionFault(address, UNTESTED, "it was not tested")
        for address, nic in want.nics.items()
        if nic.nic.rdma and nic.nic.name not in tested
    }
    if untested:
        message = f"not tested: {', '.join(sorted(untested))}"
        return [condition(TYPE, UNTESTED, message, faults=untested.values())]
    age = "today" if facts.days == 0 else f"{facts.days} days ago" if facts.days > 1 else "a day ago"
    return [condition(TYPE, "TestPassed", f"tested {age}: {', '.join(sorted(tested))}")]


def _failing(faults: list[FunctionFault]) -> Condition:
    return condition(TYPE, faults[0].reason, "; ".join(fault.message for fault in faults), faults=faults)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    if not now:
        return ["its RDMA device is gone"]
    return [f"{name} was {before.get(name)}, is {now[name]}" for name in now if before.get(name) != now[name]]


# Severity: a new driver on all nodes would make all of them unready at once.
PROBES = (Probe(name="fabric", type=TYPE, stage="network", severity="warn", read=read, judge=judge, of_nics=True),)
