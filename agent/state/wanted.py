"""The spec applied to this machine: which physical function each NIC is, and what its VFs should be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import evolve, field, frozen

from agent.driver_families import VFIO
from agent.hardware.functions import HUNG, UNREADABLE, Asked, Function
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault, Severity
from agent.report.target import vf_target
from agent.sha256 import digest
from agent.spec.nic import Nic, VfAttributes
from agent.spec.node import NodeSpec
from agent.spec.ranges import parse_ranges
from agent.state.guids import derived_guid, port_guid
from agent.state.selection import Selection, may_be, selections, unknown, with_other_port


@frozen
class WantedNic:
    """A NIC of the spec with its own name, and its physical function.

    ``index`` is its number among the NICs of an entry with ``select.each``, from 0 in the order of their PCI addresses; None
    for an entry of one function. The rail's number (``nic.rail``) follows from it.
    """

    nic: Nic
    function: Function
    index: int | None = None
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
        if self.nic.vfs.derive_guids and (guid := port_guid(link)):
            return _with_derived_guids(filled, guid, index)
        permanent = link.permanent_mac if link and self.nic.vfs.derive_macs else ""
        # An InfiniBand PF has an address of 20 octets, and its VFs have GUIDs instead of MACs.
        if filled.mac or len(permanent) != len("00:00:00:00:00:00"):
            return filled
        return _with_derived_mac(filled, permanent, index)

    def _fill(self, given: VfAttributes) -> VfAttributes:
        has_netdev = given.driver != VFIO
        return given.having(
            # VLAN 0 means no VLAN, and then there is no VLAN priority. Without both there is no protocol: drivers drop one.
            qos=0 if given.vlan == 0 and given.qos is None else given.qos,
            vlan_protocol=given.vlan_protocol if given.vlan or given.qos else None,
            mtu=(given.mtu or self.nic.mtu) if has_netdev else None,
            state=(given.state or self.nic.state) if has_netdev else None,
            txqueuelen=(given.txqueuelen or self.nic.txqueuelen) if has_netdev else None,
            owner=given.owner or "user",
        )

    def settings(self, key: str) -> dict[str, Any]:
        """What the spec sets under ``key`` for the netdevs of the PF and its VFs, by target; unset ones are left out."""
        own = getattr(self.nic, key)
        return ({} if own is None else {self.function.address: own}) | self.vf_settings(key)

    def vf_settings(self, key: str) -> dict[str, Any]:
        """What the spec sets under ``key`` for the VFs, by target."""
        address, vfs, given = self.function.address, self.nic.vfs, dict[str, Any]()
        if vfs is not None:
            # The same as vfs.attributes(index) for each VF, but fast for a thousand.
            if (default := getattr(vfs.defaults, key)) is not None:
                given |= {vf_target(address, index): default for index in range(vfs.count)}
            for group in vfs.groups:
                if (value := getattr(group, key)) is not None:
                    given |= {vf_target(address, index): value for index in parse_ranges(group.index)}
        return given

    def vf_wanted(self, index: int) -> VfAttributes:
        """:meth:`vf`, or no attributes for a VF that the spec does not have."""
        return self.vf(index) if index < (self.vf_count() or 0) else VfAttributes()


@frozen
class Wanted:
    """The spec, resolved against the machine's functions. ``missing``: a condition for each NIC without a usable one.

    ``unreadable``: the NICs among them whose function cannot be read, by its address. ``left_alone``: the addresses of all
    functions that such NICs are, or may be: nothing is changed there.
    ``asked``: all NICs, missing ones too, with their own names. An entry with ``select.each`` that could not be resolved
    stands there as it is.
    """

    spec: NodeSpec
    nics: Mapping[str, WantedNic] = field(factory=dict)
    missing: tuple[Condition, ...] = ()
    unreadable: Mapping[str, Nic] = field(factory=dict)
    left_alone: frozenset[str] = frozenset()
    asked: tuple[Nic, ...] = ()


@lru_cache(maxsize=16384)
def _with_derived_mac(filled: VfAttributes, permanent: str, index: int) -> VfAttributes:
    """Cached: a node may have thousands of VFs, and each pass needs the same MACs."""
    return filled.having(mac=derived_mac(permanent, index))


@lru_cache(maxsize=16384)
def _with_derived_guids(filled: VfAttributes, guid: str, index: int) -> VfAttributes:
    derived = derived_guid(guid, index)
    return filled.having(node_guid=filled.node_guid or derived, port_guid=filled.port_guid or derived)


def derived_mac(permanent: str, index: int) -> str:
    """A MAC for a VF, derived from the permanent MAC of its PF: locally administered, and the same after every reload.

    It has the PF's last three octets, the VF's index (10 bits) and a hash of the vendor's prefix (12 bits), so VFs of two PFs
    of one vendor never have the same MAC as long as each PF has at most 1,024 VFs.
    """
    octets = bytes.fromhex(permanent.replace(":", ""))
    prefix = int.from_bytes(digest(octets[:3])[:2], "big")
    made = bytes([prefix >> 8 & 0xFC | 0x02, prefix & 0xFC | index >> 8 & 0x03, index & 0xFF, *octets[3:]])
    return made.hex(":")


def asked(spec: NodeSpec) -> Asked:
    """What the selectors of a spec need of Vital Product Data, and whether its interrupts follow the load."""
    selectors = [nic.select for nic in spec.nics]
    serials, bridges = any(each.serial for each in selectors), any(each.each for each in selectors)
    return Asked(serials, bridges, load=spec.irqs.follow_load)


def resolve(spec: NodeSpec, functions: tuple[Function, ...]) -> Wanted:
    """Find the functions of each NIC of the spec. One that selects none, several or another NIC's is missing."""
    nics: dict[str, WantedNic] = {}
    asked: list[Nic] = []
    missing: list[Condition] = []
    unreadable: dict[str, Nic] = {}
    selected = selections(spec, functions)
    contested = _contested(selected)
    in_conflict = {nic.name for claiming in contested.values() for nic in claiming}
    for selection in selected:
        if selection.entry.name in in_conflict:
            asked.append(selection.entry)
            continue
        if (fault := _entry_fault(selection, functions)) is not None:
            asked.append(selection.entry)
            missing.append(fault)
            if fault.reason == UNREADABLE:
                unreadable |= {f.address: selection.entry for f in selection.undecided if f.unreadable}
            continue
        for nic, function, index in selection.members():
            asked.append(nic)
            if (fault := _function_fault(nic, function)) is None:
                nics[function.address] = WantedNic(nic, function, index)
                continue
            missing.append(fault)
            if fault.reason == UNREADABLE:
                unreadable[function.address] = nic
    missing += [_claimed_twice(address, claiming) for address, claiming in sorted(contested.items())]
    missing += _without_shared_addresses(nics, functions)
    meant = {f.address for selection in selected for f in (*selection.functions, *selection.undecided)}
    return Wanted(spec, nics, tuple(missing), unreadable, frozenset(meant - nics.keys()), tuple(asked))


def absent_among(want: Wanted, functions: tuple[Function, ...], devices: Iterable[str]) -> frozenset[str]:
    """Which ``devices`` may be missing NICs of the spec. A NIC is missing while it hangs, or its driver is reloaded."""
    there = {function.address: function for function in functions}
    lacking = set(devices) - want.nics.keys() if want.missing else ()
    return frozenset(each for each in lacking if each not in there or may_be(want.spec, functions, there[each]))


def _contested(selected: Sequence[Selection]) -> dict[str, list[Nic]]:
    """The functions that several entries claim, with those entries. One that matches several and may have one claims none."""
    claims: dict[str, list[Nic]] = {}
    for selection in selected:
        for function in selection.functions if selection.entry.select.each or selection.fits else ():
            claims.setdefault(function.address, []).append(selection.entry)
    return {address: claiming for address, claiming in claims.items() if len(claiming) > 1}


def _entry_fault(selection: Selection, functions: Sequence[Function]) -> Condition | None:
    """Why an entry of the spec cannot be resolved to functions; None if it can."""
    nic, undecided = selection.entry, selection.undecided
    if undecided and (nic.select.each or not selection.functions):
        return _not_known(nic, undecided)
    if selection.fits:
        return None
    called = f"NIC {nic.name} ({nic.select})"
    if nic.select.each:
        few = len(selection.functions) < nic.select.least
        bound = f"at least {nic.select.least}" if few else f"at most {nic.select.most}"
        matching = f" ({_listed(selection.functions)})" if selection.functions else ""
        message = (
            f"{called} matches {len(selection.functions)} functions{matching}, and {bound} must match; "
            f"this node has {_listed(functions)}"
        )
        return _lacking([nic], "TooFewNics" if few else "TooManyNics", message)
    if not selection.functions:
        if (function := with_other_port(nic.select, functions)) is not None:
            message = (
                f"{called} is a further port of {function.address}, and only the first port of a function is managed"
            )
            remedy = f"select {_listed([function])}, and configure the other ports by other programs"
            return evolve(_lacking([nic], "NicNotFirstPort", message), remedy=remedy)
        message = f"{called} is not there; this node has {_listed(functions)}"
        return _lacking([nic], "NicMissing", message)
    several = ", ".join(function.address for function in selection.functions)
    return _lacking([nic], "NicAmbiguous", f"{called} matches {several}")


def _listed(functions: Sequence[Function]) -> str:
    listed = ", ".join(f"{f.address} ({f.link.name if f.link else f.driver or 'no driver'})" for f in functions)
    return listed or "no network function"


def _not_known(nic: Nic, undecided: Sequence[Function]) -> Condition:
    """A fault: some functions cannot be read, so it is unknown whether they match the entry."""
    called = f"NIC {nic.name} ({nic.select})"
    unread = any(function.unreadable for function in undecided)
    why = "; ".join(f"{each.address}: {' and '.join(sorted(set(unknown(each).values())))}" for each in undecided)
    if nic.select.each:
        message = f"{called} is left alone: it is not known now which functions are meant ({why})"
        excluded = f"; or select {' and '.join(nic.select.without)} by pci" if nic.select.without else ""
        return _lacking([nic], UNREADABLE if unread else "NicsUnknown", message, excluded)
    may_be = "does not exist, or is a function that cannot be read" if nic.select.pci is None else "cannot be read"
    return _lacking([nic], UNREADABLE if unread else HUNG, f"{called} {may_be} ({why})")


def _function_fault(nic: Nic, function: Function) -> Condition | None:
    if function.hung:
        message = f"a call to {function.address} (NIC {nic.name}) never returned, so it is left alone for now"
        return _lacking([nic], HUNG, message)
    if function.unreadable:
        message = f"{function.address} (NIC {nic.name}) cannot be read, so it is left alone: {function.unreadable}"
        return _lacking([nic], UNREADABLE, message)
    return None


def _claimed_twice(address: str, claiming: Sequence[Nic]) -> Condition:
    names = " and ".join(sorted(nic.name for nic in claiming))
    single = [nic.name for nic in claiming if not nic.select.each]
    several = [nic.name for nic in claiming if nic.select.each]
    left = f"which is left alone{f', with all functions of {several[0]}' if several else ''}"
    fault = _lacking(claiming, "NicClaimedTwice", f"NICs {names} all select {address}, {left}")
    if len(single) == len(several) == 1:
        return evolve(fault, remedy=f"if it is {single[0]}, give that name in select.without of {several[0]}")
    return fault


def _lacking(nics: Collection[Nic], reason: str, message: str, more: str = "") -> Condition:
    severity: Severity = "required" if any(nic.required for nic in nics) else "warn"
    # The NIC has no usable function, so its name stands for it.
    faults = [FunctionFault(nic.name, reason, message) for nic in sorted(nics, key=lambda nic: nic.name)]
    return condition("NicsPresent", reason, message, severity=severity, more=more, faults=faults)


def _without_shared_addresses(nics: dict[str, WantedNic], functions: tuple[Function, ...]) -> list[Condition]:
    """Remove the NICs with a VF that would have a MAC or GUID of another function; return a condition for each group."""
    owners: dict[str, tuple[str, str | None]] = {
        own: (function.address, None)
        for function in functions
        if function.link
        for own in (function.link.permanent_mac, port_guid(function.link))
    }
    shared: dict[tuple[str, ...], list[str]] = {}
    for address, nic in sorted(nics.items()):
        for index in range(nic.vf_count() or 0):
            vf, target = nic.vf(index), vf_target(address, index)
            for given in (vf.mac, vf.node_guid, vf.port_guid):
                if given is None:
                    continue
                other, device = owners.setdefault(given, (target, address))
                if other != target:
                    addresses = tuple(sorted({address, *([device] if device in nics else [])}))
                    shared.setdefault(addresses, []).append(f"{other} and {target} would both have {given}")
    conditions = []
    for addresses, reasons in sorted(shared.items()):
        names = " and ".join(nics[address].nic.name for address in addresses)
        message = f"NIC {names} is left alone: {reasons[0]}"
        conditions.append(_lacking([nics[address].nic for address in addresses], "AddressGivenTwice", message))
    for address in {address for addresses in shared for address in addresses}:
        del nics[address]
    return conditions
