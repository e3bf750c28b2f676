"""The verdict on each NIC and its VFs, from the faults of the conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from attrs import evolve, frozen

from agent.kinds import links, vf_links
from agent.probes import link_flaps
from agent.report.reasons import condition
from agent.report.records import HOST, Certainty, Condition, FunctionFault, LinkState, NicVerdict, VfVerdict
from agent.report.target import device_of, vf_index
from agent.spec.nic import Nic
from agent.spec.node import Readiness
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

STATES: Mapping[str, LinkState] = {state.capitalize(): state for state in get_args(LinkState)}

SHOWN = 3
"""How many faults of a function its message has."""


@frozen
class _Found:
    condition: Condition
    fault: FunctionFault

    @property
    def certainty(self) -> Certainty:
        return "unknown" if self.condition.status == "Unknown" else self.fault.certainty


def nic_verdicts(want: Wanted, have: Snapshot, conditions: Sequence[Condition]) -> tuple[NicVerdict, ...]:
    """A verdict for each NIC of the spec, in its order. A fault of a PF concerns its VFs, and one of a VF only that VF."""
    by_device: dict[str, dict[str, list[_Found]]] = {}
    states: dict[str, LinkState] = {}
    for each in conditions:
        for fault in each.faults:
            if each.type == link_flaps.TYPE and fault.reason in STATES:
                states[fault.target] = STATES[fault.reason]
            if fault.severity == "required":
                by_target = by_device.setdefault(device_of(fault.target), {})
                by_target.setdefault(fault.target, []).append(_Found(each, fault))
    addresses = {nic.nic.name: address for address, nic in want.nics.items()}
    verdicts = []
    for nic in want.asked:
        address = addresses.get(nic.name, "")
        # A NIC without a usable function has its faults under its name.
        by_target = by_device.get(address or nic.name, {})
        verdicts.append(_verdict(nic, address, have, by_target, states.get(address, "good")))
    return tuple(verdicts)


def of_needed_nics(
    readiness: Readiness, conditions: Sequence[Condition], nics: Sequence[NicVerdict]
) -> Iterator[Condition]:
    """With granularity device: the conditions, of which those that only NICs fail warn, and then one about the NICs needed."""
    for each in conditions:
        of_nics = bool(each.faults) and all(fault.target != HOST for fault in each.faults)
        yield evolve(each, severity="warn") if of_nics and each.status != "True" else each
    lacking = [f"{nic.name} ({nic.reason})" for nic in nics if not nic.ready]
    ready = {nic.name for nic in nics if nic.ready}
    told = f"{len(ready)} of {len(nics)} NICs are ready"
    if readiness.at_least is not None:
        holds, needed = len(ready) >= readiness.at_least, f"at least {readiness.at_least} must be"
    else:
        holds, needed = ready.issuperset(readiness.these), f"{', '.join(readiness.these)} must be"
    message = f"{told}, {needed}: {', '.join(lacking)} not ready" if lacking else ""
    yield condition("NicsReady", "EnoughReady" if holds else "TooFewReady", message)


def _verdict(
    nic: Nic, address: str, have: Snapshot, by_target: Mapping[str, Sequence[_Found]], link: LinkState
) -> NicVerdict:
    found = by_target.get(address or nic.name)
    statuses: Mapping[str, links.LinkStatus] = have[vf_links.NAME].get(address, {})
    vfs = _addresses(statuses)
    if found:
        return NicVerdict(nic.name, address, nic.required, False, *_why(found), link=link, vfs=vfs)
    faulty = tuple(
        VfVerdict(vf_index(target), *_why(of_vf))
        for target, of_vf in sorted(by_target.items(), key=lambda each: vf_index(each[0]))
    )
    certainty: Certainty = "certain" if link == "good" else "likely"
    return NicVerdict(nic.name, address, nic.required, True, certainty=certainty, link=link, vfs=vfs, faulty_vfs=faulty)


def _addresses(statuses: Mapping[str, links.LinkStatus]) -> tuple[str, ...]:
    """The PCI addresses of VFs by index; empty for one that is away."""
    by_index = {vf_index(target): status.pci for target, status in statuses.items()}
    return tuple(by_index.get(index, "") for index in range(max(by_index, default=-1) + 1))


def _why(found: Sequence[_Found]) -> tuple[str, str, Certainty]:
    """The reason, message and certainty of a verdict, from its faults. A certain one comes before an unknown one."""
    ordered = sorted(found, key=lambda each: each.certainty == "unknown")
    messages = list(dict.fromkeys(each.fault.message for each in ordered))
    more = f" (and {len(messages) - SHOWN} more)" if len(messages) > SHOWN else ""
    return ordered[0].fault.reason, f"{'; '.join(messages[:SHOWN])}{more}", ordered[0].certainty
