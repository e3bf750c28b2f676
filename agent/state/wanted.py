"""The spec applied to this machine: which physical function each NIC is, and what its VFs should be."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import evolve, field, frozen

from agent.hardware.functions import REMEDY, UNREADABLE, VFIO, Function
from agent.report.records import Condition, Severity, Status
from agent.spec.nic import Nic, Selector, VfAttributes
from agent.spec.node import NodeSpec
from agent.spec.ranges import parse_ranges


@frozen
class WantedNic:
    """A NIC of the spec, and its physical function."""

    nic: Nic
    function: Function
    _vfs: dict[int, VfAttributes] = field(factory=dict, init=False, eq=False, repr=False)
    # Keyed by the attributes in the spec: the VFs of a group, perhaps a thousand, differ only in their MACs.
    _filled: dict[VfAttributes, VfAttributes] = field(factory=dict, init=False, eq=False, repr=False)

    def vf_count(self) -> int | None:
        """How many VFs it should have; None if the spec does not say."""
        return None if self.nic.vfs is None else self.nic.vfs.count

    def vf(self, index: int) -> VfAttributes:
        """The attributes that VF ``index`` should have, defaults filled in."""
        if index not in self._vfs:
            self._vfs[index] = self._with_address(index)
        return self._vfs[index]

    def _with_address(self, index: int) -> VfAttributes:
        assert self.nic.vfs is not None  # noqa: S101  callers iterate over vf_count()
        given = self.nic.vfs.attributes(index)
        if given not in self._filled:
            self._filled[given] = self._fill(given)
        filled = self._filled[given]
        link = self.function.link
        permanent = link.permanent_mac if link and self.nic.vfs.derive_macs else ""
        # An InfiniBand PF has an address of 20 octets, and its VFs have GUIDs instead of MACs.
        if filled.mac or len(permanent) != len("00:00:00:00:00:00"):
            return filled
        return _with_derived_mac(filled, permanent, index)

    def _fill(self, given: VfAttributes) -> VfAttributes:
        has_netdev = given.driver != VFIO
        return evolve(
            given,
            # VLAN 0 means no VLAN, and then there is no VLAN priority.
            qos=0 if given.vlan == 0 and given.qos is None else given.qos,
            mtu=(given.mtu or self.nic.mtu) if has_netdev else None,
            state=(given.state or self.nic.state) if has_netdev else None,
            txqueuelen=(given.txqueuelen or self.nic.txqueuelen) if has_netdev else None,
            owner=given.owner or "taker",
        )

    def settings(self, key: str) -> dict[str, Any]:
        """What the spec sets under ``key`` for the netdevs of the PF and its VFs, by target; unset ones are left out."""
        address, vfs = self.function.address, self.nic.vfs
        given = {address: getattr(self.nic, key)}
        if vfs is not None:
            # The same as vfs.attributes(index) for each VF, but fast for a thousand.
            if (default := getattr(vfs.defaults, key)) is not None:
                given |= {f"{address}#{index}": default for index in range(vfs.count)}
            for group in vfs.groups:
                if (value := getattr(group, key)) is not None:
                    given |= {f"{address}#{index}": value for index in parse_ranges(group.index)}
        return {target: value for target, value in given.items() if value is not None}

    def vf_wanted(self, index: int) -> VfAttributes:
        """:meth:`vf`, and nothing of a VF that the spec does not have."""
        return self.vf(index) if index < (self.vf_count() or 0) else VfAttributes()


@frozen
class Wanted:
    """The spec, resolved against the machine's functions. ``missing``: a condition for each NIC without a usable one.

    ``unreadable``: the NICs among them whose function cannot be read, by its address.
    """

    spec: NodeSpec
    nics: Mapping[str, WantedNic] = field(factory=dict)
    missing: tuple[Condition, ...] = ()
    unreadable: Mapping[str, Nic] = field(factory=dict)


@lru_cache(maxsize=16384)
def _with_derived_mac(filled: VfAttributes, permanent: str, index: int) -> VfAttributes:
    """Cached: a node may have thousands of VFs, and each pass asks for the same MACs."""
    return evolve(filled, mac=derived_mac(permanent, index))


def derived_mac(permanent: str, index: int) -> str:
    """A MAC for a VF, derived from the permanent MAC of its PF: locally administered, and the same after every reload.

    It has the PF's last three octets, the VF's index (10 bits) and a hash of the vendor's prefix (12 bits), so VFs of two PFs
    of one vendor never have the same MAC as long as each PF has at most 1,024 VFs.
    """
    octets = bytes.fromhex(permanent.replace(":", ""))
    prefix = int.from_bytes(hashlib.sha256(octets[:3]).digest()[:2], "big")
    made = bytes([prefix >> 8 & 0xFC | 0x02, prefix & 0xFC | index >> 8 & 0x03, index & 0xFF, *octets[3:]])
    return made.hex(":")


def asks_serials(spec: NodeSpec) -> bool:
    """Whether a selector uses a serial number. If not, none is read: Vital Product Data can take a tenth of a second."""
    return any(nic.select.serial for nic in spec.nics)


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
    """Whether a function that could not be read at all may be the selected one: only its address can be compared."""
    return bool(function.unreadable) and not function.vendor and selector.pci in (None, function.address)


def resolve(spec: NodeSpec, functions: tuple[Function, ...]) -> Wanted:
    """Find the function of each NIC of the spec. A NIC that selects none, several or another NIC's is missing."""
    nics: dict[str, WantedNic] = {}
    missing: list[Condition] = []
    unreadable: dict[str, Nic] = {}
    claims: dict[str, list[Nic]] = {}
    selected = {nic.name: [function for function in functions if _matches(nic.select, function)] for nic in spec.nics}
    for nic in spec.nics:
        if len(selected[nic.name]) == 1:
            claims.setdefault(selected[nic.name][0].address, []).append(nic)
    for nic in spec.nics:
        matching = selected[nic.name]
        possible = [] if matching else [function for function in functions if _may_match(nic.select, function)]
        if len(matching) == 1 and len(claims[matching[0].address]) > 1:
            continue
        if (fault := _fault(nic, matching, possible, functions)) is None:
            nics[matching[0].address] = WantedNic(nic, matching[0])
            continue
        missing.append(fault)
        if fault.reason == UNREADABLE:
            unreadable |= {function.address: nic for function in matching or possible}
    missing += [_claimed_twice(address, claiming) for address, claiming in sorted(claims.items()) if len(claiming) > 1]
    missing += _without_shared_addresses(nics, functions)
    return Wanted(spec, nics, tuple(missing), unreadable)


def _fault(
    nic: Nic, matching: Sequence[Function], possible: Sequence[Function], functions: Sequence[Function]
) -> Condition | None:
    """Why a NIC has no usable function; None if it has one.

    :param matching: the functions that its selector matches.
    :param possible: the unreadable functions that it may match; used only if ``matching`` is empty.
    """
    if not matching and possible:
        listed = "; ".join(f"{function.address}: {function.unreadable}" for function in possible)
        may_be = "does not exist, or is a function that cannot be read" if nic.select.pci is None else "cannot be read"
        return _lacking([nic], UNREADABLE, f"NIC {nic.name} ({nic.select}) {may_be} ({listed}); {REMEDY}", "Unknown")
    if not matching:
        have = ", ".join(f"{f.address} ({f.link.name if f.link else f.driver or 'no driver'})" for f in functions)
        message = (
            f"NIC {nic.name} ({nic.select}) is not there; this node has {have or 'no network function'}: "
            "check the slot, the driver and the selector"
        )
        return _lacking([nic], "NicMissing", message)
    if len(matching) > 1:
        several = ", ".join(function.address for function in matching)
        message = f"NIC {nic.name} ({nic.select}) matches {several}; select one of them by pci or mac"
        return _lacking([nic], "NicAmbiguous", message)
    (function,) = matching
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
    message = f"NICs {names} all select {address}, which is left alone; keep one of them, or select another function"
    return _lacking(claiming, "NicClaimedTwice", message)


def _lacking(nics: Collection[Nic], reason: str, message: str, status: Status = "False") -> Condition:
    severity: Severity = "required" if any(nic.required for nic in nics) else "warn"
    return Condition("NicsPresent", status, reason, message, "device", severity)


def _without_shared_addresses(nics: dict[str, WantedNic], functions: tuple[Function, ...]) -> list[Condition]:
    """Remove the NICs with a VF that would have the MAC of another function; return a condition for each group of them."""
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
                addresses = tuple(sorted({address, *([device] if device in nics else [])}))
                shared.setdefault(addresses, []).append(f"{other} and {target} would both have {mac}")
    conditions = []
    for addresses, reasons in sorted(shared.items()):
        names = " and ".join(nics[address].nic.name for address in addresses)
        message = f"NIC {names} is left alone: {reasons[0]}; give VFs addresses that no other function has (vfs.groups)"
        conditions.append(_lacking([nics[address].nic for address in addresses], "AddressGivenTwice", message))
    for address in {address for addresses in shared for address in addresses}:
        del nics[address]
    return conditions
