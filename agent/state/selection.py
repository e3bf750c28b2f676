"""Which physical function each NIC of the spec means, and what the machine shows of conflicts between them."""

from __future__ import annotations

from collections.abc import Collection

from agent.hardware.functions import Function, Wanted, WantedNic
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


def resolve(spec: NodeSpec, functions: tuple[Function, ...]) -> Wanted:
    """Find the function that each NIC of the spec means; a NIC that means none, or several, is said to be missing."""
    nics: dict[str, WantedNic] = {}
    missing: list[Condition] = []

    def lacks(nic: Nic, reason: str, message: str, status: Status = "False") -> None:
        missing.append(_lacking([nic], reason, message, status))

    means = {
        nic.name: [function.address for function in functions if _matches(nic.select, function)] for nic in spec.nics
    }
    claims: dict[str, list[Nic]] = {}
    for nic in spec.nics:
        if len(means[nic.name]) == 1:
            claims.setdefault(means[nic.name][0], []).append(nic)
    for nic in spec.nics:
        found = [function for function in functions if function.address in means[nic.name]]
        if not found:
            have = ", ".join(f"{f.address} ({f.link.name if f.link else f.driver or 'no driver'})" for f in functions)
            lacks(
                nic,
                "NicMissing",
                f"NIC {nic.name} ({nic.select}) is not there; this node has {have or 'no network function'}: "
                "check the slot, the driver and the selector",
            )
        elif len(found) > 1:
            several = ", ".join(function.address for function in found)
            lacks(
                nic,
                "NicAmbiguous",
                f"NIC {nic.name} ({nic.select}) means {several}; select one of them by pci or mac",
            )
        elif len(claims[found[0].address]) > 1:
            continue
        elif found[0].hung:
            lacks(
                nic,
                "DeviceHung",
                f"a call to {found[0].address} (NIC {nic.name}) never returned, so it is left alone for now; "
                "see the kernel's log for the driver's reason, and reset the device or reboot the node",
                "Unknown",
            )
        else:
            nics[found[0].address] = WantedNic(nic, found[0])
    for address, claiming in sorted(claims.items()):
        if len(claiming) > 1:
            names = " and ".join(sorted(nic.name for nic in claiming))
            message = (
                f"NICs {names} all mean {address}, which is left alone; keep one of them, or select another function"
            )
            missing.append(_lacking(claiming, "NicClaimedTwice", message))
    missing += _without_shared_addresses(nics, functions)
    return Wanted(spec, nics, tuple(missing))


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
