"""Each NIC's PCIe link is as wide and as fast as the device supports.

A link that trained to fewer lanes or a lower speed (a bad contact, a narrow slot) costs bandwidth, and nothing else reports it.
sysfs has ``current_link_width``, ``current_link_speed``, ``max_link_width`` and ``max_link_speed``. Functions without a link of
their own (virtual, or integrated in the chipset) report 0, 255 or "Unknown", and are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

from agent.hardware.functions import device_path
from agent.hardware.sysfs import read_or
from agent.machine import Files, Machine
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "PcieLink"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # a node with a slow link still works, and a slot may be narrower by design
OF_NICS = True

DEGRADED = "PcieDegraded"


@frozen
class PcieLink:
    """The lanes and gigatransfers per second of a link, as trained and as the device supports."""

    width: int
    max_width: int
    speed: float
    max_speed: float


def read(machine: Machine, want: Wanted) -> Mapping[str, PcieLink]:
    """The link of each wanted function that has one, by PCI address."""
    links = {}
    for address in want.nics:
        names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
        width, most, speed, fastest = (_number(machine.files, f"{device_path(address)}/{name}") for name in names)
        if width >= 1 and 1 <= most < 255 and speed and fastest:
            links[address] = PcieLink(int(width), int(most), speed, fastest)
    return links


def _number(files: Files, path: str) -> float:
    """The number at the beginning of a file: ``8`` lanes, ``16.0 GT/s PCIe``. 0 if there is none."""
    first = read_or(files, path, "").partition(" ")[0]
    return float(first) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", first) else 0.0


def judge(want: Wanted, have: Snapshot, facts: Mapping[str, PcieLink]) -> list[Condition]:
    """False if a NIC's link is narrower or slower than the device supports; the message names the NIC."""
    degraded = [
        FunctionFault(
            address,
            DEGRADED,
            f"{nic.nic.name} ({address}) has {_size(link.width, link.speed)} of {_size(link.max_width, link.max_speed)}",
        )
        for address, nic in sorted(want.nics.items())
        if (link := facts.get(address)) and (link.width < link.max_width or link.speed < link.max_speed)
    ]
    if not degraded:
        return [condition(TYPE, "FullWidthAndSpeed")]
    return [condition(TYPE, DEGRADED, "; ".join(fault.message for fault in degraded), faults=degraded)]


def _size(width: int, speed: float) -> str:
    return f"x{width} at {speed:g} GT/s"
