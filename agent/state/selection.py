"""Which physical function each NIC of the spec means, and what the machine shows of conflicts between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agent.hardware.functions import REMEDY, UNREADABLE, Function, Wanted, WantedNic
from agent.report.records import Condition, Severity, Status
from agent.spec.nic import Nic, Selector
from agent.spec.node import NodeSpec


def _matches(selector: Selector, function: Function) -> bool:
    link = function.link
    checks: tuple[tuple[str | None, Collection[str | None]], ...] = (
        (selector.pci, [function.address]),
        (selector.mac, [link.permanent_mac] if link else []),
        (selector.netdev, [link.name, *link.altnames] if link else []),
        (selector.vendor, [function.vendor]),
        (selector.device, [function.device]),
        (selector.driver, [function.driver]),
        (selector.serial, function.serials),
    )
    return all(wanted is None or wanted in have for wanted, have in checks)


def _may_match(selector: Selector, function: Function) -> bool:
    """Whether a function of which nothing but its address could be read may be the one."""
    return bool(function.unreadable) and not function.vendor and selector.pci in (None, function.address)


def resolve(spec: NodeSpec, functions: tuple[Function, ...]) -> Wanted:
    """Find the function that each NIC of the spec means; a NIC that means none, several or another's is said to be missing."""
    nics: dict[str, WantedNic] = {}
    missing: list[Condition] = []
    unreadable: dict[str, Nic] = {}
    claims: dict[str, list[Nic]] = {}
    means = {nic.name: [function for function in functions if _matches(nic.select, function)] for nic in spec.nics}
    for nic in spec.nics:
        if len(means[nic.name]) == 1:
            claims.setdefault(means[nic.name][0].address, []).append(nic)
    for nic in spec.nics:
        found = means[nic.name]
        unknown = [] if found else [function for function in functions if _may_match(nic.select, function)]
        if len(found) == 1 and len(claims[found[0].address]) > 1:
            continue
        if (fault := _fault(nic, found, unknown, functions)) is None:
            nics[found[0].address] = WantedNic(nic, found[0])
            continue
        missing.append(fault)
        if fault.reason == UNREADABLE:
            unreadable |= {function.address: nic for function in found or unknown}
    missing += [_claimed_twice(address, claiming) for address, claiming in sorted(claims.items()) if len(claiming) > 1]
    missing += _without_shared_addresses(nics, functions)
    return Wanted(spec, nics, tuple(missing), unreadable)


def _fault(
    nic: Nic, found: Sequence[Function], unknown: Sequence[Function], functions: Sequence[Function]
) -> Condition | None:
    """Why a NIC has no function that can be used; None if it has one.

    :param found: the functions that its selector matches.
    :param unknown: those that it may match, if nothing but their address could be read.
    """
    if not found and unknown:
        listed = "; ".join(f"{function.address}: {function.unreadable}" for function in unknown)
        may_be = "is not there, unless it is one that cannot be read" if nic.select.pci is None else "cannot be read"
        return _lacking([nic], UNREADABLE, f"NIC {nic.name} ({nic.select}) {may_be} ({listed}); {REMEDY}", "Unknown")
    if not found:
        have = ", ".join(f"{f.address} ({f.link.name if f.link else f.driver or 'no driver'})" for f in functions)
        message = (
            f"NIC {nic.name} ({nic.select}) is not there; this node has {have or 'no network function'}: "
            "check the slot, the driver and the selector"
        )
        return _lacking([nic], "NicMissing", message)
    if len(found) > 1:
        several = ", ".join(function.address for function in found)
        message = f"NIC {nic.name} ({nic.select}) means {several}; select one of them by pci or mac"
        return _lacking([nic], "NicAmbiguous", message)
    (function,) = found
    if function.hung:
        message = (
            f"a call to {function.address} (NIC {nic.name}) never returned, so it is left alone for now; "
            "see the kernel's log for the driver's reason, and reset the device or reboot the node"
        )
        return _lacking([nic], "DeviceHung", message, "Unknown")
    if function.unreadable:
        message = (
            f"{function.address} (NIC {nic.name}) cannot be read, so it is left alone: {function.unreadable}; {REMEDY}"
        )
        return _lacking([nic], UNREADABLE, message, "Unknown")
    return None


def _claimed_twice(address: str, claiming: Sequence[Nic]) -> Condition:
    names = " and ".join(sorted(nic.name for nic in claiming))
    message = f"NICs {names} all mean {address}, which is left alone; keep one of them, or select another function"
    return _lacking(claiming, "NicClaimedTwice", message)


def _lacking(nics: Collection[Nic], reason: str, message: str, status: Status = "False") -> Condition:
    severity: Severity = "required" if any(nic.required for nic in nics) else "warn"
    return Condition("NicsPresent", status, reason, message, "device", severity)


def _without_shared_addresses(nics: dict[str, WantedNic], functions: tuple[Function, ...]) -> list[Condition]:
    """Leave out the NICs of which a VF would have the MAC of another function, given or derived; says which and why."""
    owners: dict[str, tuple[str, str | None]] = {
        function.link.permanent_mac: (function.address, None) for function in functions if function.link
    }
    shared: dict[tuple[str, ...], list[str]] = {}
    for address, nic in sorted(nics.items()):
        for index in range(nic.vf_count() or 0):
            mac, target = nic.vf(index).mac, f"{address}#{index}"
            if mac is None:
                continue
            other, device = owners.setdefault(mac, (target, address))
            if other != target:
                concerned = tuple(sorted({address, *([device] if device in nics else [])}))
                shared.setdefault(concerned, []).append(f"{other} and {target} would both have {mac}")
    told = []
    for concerned, found in sorted(shared.items()):
        names = " and ".join(nics[address].nic.name for address in concerned)
        message = f"NIC {names} is left alone: {found[0]}; give VFs addresses that no other function has (vfs.groups)"
        told.append(_lacking([nics[address].nic for address in concerned], "AddressGivenTwice", message))
    for address in {address for concerned in shared for address in concerned}:
        del nics[address]
    return told
