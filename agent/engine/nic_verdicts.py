"""The verdict on each NIC and its VFs, from the faults of the conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from agent.kinds import links, vf_links
from agent.report.records import Certainty, Condition, FunctionFault, NicVerdict, VfVerdict
from agent.report.target import device_of, vf_index
from agent.spec.nic import Nic
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

SHOWN = 3
"""How many faults of a function its message has."""


@frozen
class _Found:
    condition: Condition
    fault: FunctionFault

    @property
    def certainty(self) -> Certainty:
        return "unknown" if self.condition.status == "Unknown" else "certain"


def nic_verdicts(want: Wanted, have: Snapshot, conditions: Sequence[Condition]) -> tuple[NicVerdict, ...]:
    """A verdict for each NIC of the spec, in its order. A fault of a PF concerns its VFs, and one of a VF only that VF."""
    by_device: dict[str, dict[str, list[_Found]]] = {}
    for condition in conditions:
        for fault in condition.faults:
            if fault.severity == "required":
                by_target = by_device.setdefault(device_of(fault.target), {})
                by_target.setdefault(fault.target, []).append(_Found(condition, fault))
    addresses = {nic.nic.name: address for address, nic in want.nics.items()}
    return tuple(_verdict(nic, addresses.get(nic.name, ""), have, by_device) for nic in want.asked)


def _verdict(
    nic: Nic, address: str, have: Snapshot, by_device: Mapping[str, Mapping[str, Sequence[_Found]]]
) -> NicVerdict:
    # A NIC without a usable function has its faults under its name.
    device = address or nic.name
    by_target = by_device.get(device, {})
    found = by_target.get(device)
    statuses: Mapping[str, links.LinkStatus] = have[vf_links.NAME].get(address, {})
    vfs = _addresses(statuses)
    if found:
        return NicVerdict(nic.name, address, nic.required, False, *_why(found), vfs=vfs)
    faulty = tuple(
        VfVerdict(vf_index(target), *_why(of_vf))
        for target, of_vf in sorted(by_target.items(), key=lambda each: vf_index(each[0]))
    )
    return NicVerdict(nic.name, address, nic.required, True, vfs=vfs, faulty_vfs=faulty)


def _addresses(statuses: Mapping[str, links.LinkStatus]) -> tuple[str, ...]:
    """The PCI addresses of VFs by index; empty for one that is away."""
    by_index = {vf_index(target): status.pci for target, status in statuses.items()}
    return tuple(by_index.get(index, "") for index in range(max(by_index, default=-1) + 1))


def _why(found: Sequence[_Found]) -> tuple[str, str, Certainty]:
    """The reason, message and certainty of a verdict. A fault that is certain stands first."""
    ordered = sorted(found, key=lambda each: each.certainty == "unknown")
    messages = list(dict.fromkeys(each.fault.message for each in ordered))
    more = f" (and {len(messages) - SHOWN} more)" if len(messages) > SHOWN else ""
    return ordered[0].fault.reason, f"{'; '.join(messages[:SHOWN])}{more}", ordered[0].certainty
