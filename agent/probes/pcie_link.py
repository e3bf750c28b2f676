"""Each NIC's PCIe link is as wide and as fast as the device can have it.

A link trained down (a bad contact, a slot with fewer lanes) costs bandwidth and nothing else tells of it. Read from sysfs'
``current_link_width``, ``current_link_speed`` and their ``max_`` counterparts; functions without a link of their own (virtual
ones, those integrated in the chipset) say 0, 255 or "Unknown" and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from agent.hardware.functions import device_path
from agent.hardware.sysfs import read_or
from agent.machine import Machine
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "PcieLink"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # a node with a slow link still works, and a slot may be narrower by design


@frozen
class PcieLink:
    """Lanes and gigatransfers per second of a link, as trained and as the device can have it."""

    width: int
    max_width: int
    speed: float
    max_speed: float


def read(machine: Machine, want: Wanted) -> Mapping[str, PcieLink]:
    """The link of each wanted function that has one, by PCI address."""
    found = {}
    for address in want.nics:

        def told(name: str, folder: str = device_path(address)) -> float:
            # "8" lanes, "16.0 GT/s PCIe"
            first = read_or(machine.files, f"{folder}/{name}", "").partition(" ")[0]
            return float(first) if first.replace(".", "", 1).isdigit() else 0.0

        width, most = int(told("current_link_width")), int(told("max_link_width"))
        speed, fastest = told("current_link_speed"), told("max_link_speed")
        if width > 0 and 0 < most < 255 and speed and fastest:
            found[address] = PcieLink(width, most, speed, fastest)
    return found


def judge(want: Wanted, have: Snapshot, facts: Mapping[str, PcieLink]) -> list[Condition]:
    """False names the NICs whose link is narrower or slower than the device's own limit."""
    degraded = [
        f"{nic.nic.name} ({address}) has {_say(link.width, link.speed)} of {_say(link.max_width, link.max_speed)}"
        for address, nic in sorted(want.nics.items())
        if (link := facts.get(address)) and (link.width < link.max_width or link.speed < link.max_speed)
    ]
    if not degraded:
        return [Condition(TYPE, "True", "FullWidthAndSpeed")]
    remedy = "reseat the card, and compare with the slot: lspci -vv, LnkCap and LnkSta"
    return [Condition(TYPE, "False", "PcieDegraded", f"{'; '.join(degraded)}; {remedy}")]


def _say(width: int, speed: float) -> str:
    return f"x{width} at {speed:g} GT/s"
