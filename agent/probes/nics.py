"""Checks of the NICs' PCI functions: they are there, they answer, and their PCIe links are as they should be."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

from agent.hardware.functions import HUNG, UNREADABLE, device_path
from agent.hardware.sysfs import read_or
from agent.machine import Files, Machine
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted


def _answer(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    hung = [function.address for function in have.functions if function.hung]
    unreadable = [f"{each.address} ({each.unreadable})" for each in have.functions if each.unreadable and not each.hung]
    parts = []
    if hung:
        parts.append(f"a call to {', '.join(hung)} never returned; left alone until that call ends, or the next boot")
    if unreadable:
        parts.append(f"left alone, since they cannot be read: {', '.join(unreadable)}")
    faults = [
        FunctionFault(each.address, HUNG if each.hung else UNREADABLE, each.unreadable or "a call to it never returned")
        for each in have.functions
        if each.hung or each.unreadable
    ]
    if not parts:
        return [condition("DevicesAnswer", "AllAnswer")]
    return [condition("DevicesAnswer", HUNG if hung else UNREADABLE, "; ".join(parts), faults=faults)]


@frozen
class PcieLink:
    """The lanes and gigatransfers per second of a link, as trained and as the device supports."""

    width: int
    max_width: int
    speed: float
    max_speed: float


def _read_links(machine: Machine, want: Wanted) -> Mapping[str, PcieLink]:
    """The link of each wanted function that has one, by PCI address.

    Functions without a link of their own (virtual, or integrated in the chipset) report 0, 255 or "Unknown".
    """
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


def _links(want: Wanted, have: Snapshot, facts: Mapping[str, PcieLink]) -> list[Condition]:
    """A link that trained to fewer lanes or a lower speed (a bad contact, a narrow slot) costs bandwidth.

    Nothing else reports it.
    """
    degraded = [
        FunctionFault(
            address,
            "PcieDegraded",
            f"{nic.nic.name} ({address}) has {_size(link.width, link.speed)} of {_size(link.max_width, link.max_speed)}",
        )
        for address, nic in sorted(want.nics.items())
        if (link := facts.get(address)) and (link.width < link.max_width or link.speed < link.max_speed)
    ]
    if not degraded:
        return [condition("PcieLink", "FullWidthAndSpeed")]
    return [condition("PcieLink", "PcieDegraded", "; ".join(fault.message for fault in degraded), faults=degraded)]


def _size(width: int, speed: float) -> str:
    return f"x{width} at {speed:g} GT/s"


PROBES = (
    Probe(
        name="nics",
        type="NicsPresent",
        stage="device",
        holds="Each NIC of the spec matches exactly one device.",
        # A NIC that is not required gives a warning.
        judge=lambda want, have, facts: list(want.missing) or [condition("NicsPresent", "AllPresent")],
    ),
    Probe(
        name="hung",
        type="DevicesAnswer",
        stage="device",
        # For a NIC of the spec, NicsPresent is False or Unknown too, with the NIC's own severity.
        severity="warn",
        holds="Every device answers. The agent leaves a device alone that cannot be read, or a call to which never returned.",
        judge=_answer,
    ),
    Probe(
        name="pcie_link",
        type="PcieLink",
        stage="device",
        severity="warn",  # a node with a slow link still works, and a slot may be narrower by design
        holds="Each NIC's PCIe link is as wide and as fast as the device supports.",
        read=_read_links,
        judge=_links,
        of_nics=True,
    ),
)
