"""Writes a node's present state as a spec, so that Trackbed can take over a running fleet without changing it.

A value is taken over if a record of the spec and the observed state have a field of the same name. What the agent would still
change is then left out of the spec, so that the spec's plan is empty: interrupts that somebody has placed in another way, and
MACs that the PF did not set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from attrs import evolve, fields, frozen

from agent.driver_families import VFIO, is_passed_through, is_vfio
from agent.engine.dry_run import dry_run
from agent.hardware.bonds import on_top, rdma_devices
from agent.hardware.functions import (
    Asked,
    Function,
    discover,
    driver,
    has_netdev,
    ifindex,
    netdev,
    vf_addresses,
)
from agent.machine import Files, Link, Machine, VfInfo
from agent.spec.addresses import TABLES
from agent.spec.nic import Nic, VfAttributes, VfGroup, Vfs
from agent.spec.node import Irqs, NodeSpec, Rps, SpecError, Xps
from agent.spec.selector import NIC_NAME, Selector
from agent.spec.vf_attributes import of_one_vf
from agent.spec.vf_attributes.guids import GUIDS
from agent.state.guids import derived_guid, port_guid
from agent.state.snapshot import nic_names
from agent.state.wanted import derived_mac

Values = Mapping[str, Any]

# Values that a VF's netdev takes from its NIC's spec, unless the VF's own attributes have others.
INHERITED = ("mtu", "state", "txqueuelen")


@frozen
class DerivedSpec:
    """A spec of the machine's present state. ``remaining``: what its plan would still change, nothing if no device changes."""

    spec: NodeSpec
    remaining: tuple[str, ...]


class NotFound(ValueError):
    """There is no NIC of a given name."""


def derive_spec(
    machine: Machine, node_name: str, chosen: Collection[str], present: NodeSpec | None = None
) -> DerivedSpec:
    """Write the machine's state as a spec.

    :param chosen: the NICs by netdev or PCI address. If empty: those of :func:`_fabric`.
    :param present: the node's spec: its NICs keep their names.
    :raises NotFound: a chosen NIC does not exist.
    :raises SpecError: a spec cannot have what the machine has.
    """
    discovered = discover(machine, Asked(nvlink_bridges=True))
    functions = tuple(function for function in discovered if not function.unreadable)
    unread = tuple(f"{each.address} cannot be read: {each.unreadable}" for each in discovered if each.unreadable)
    unknown = sorted(name for name in chosen if not any(_is_called(name, function) for function in functions))
    if unknown:
        have = ", ".join(f"{f.address} ({f.link.name if f.link else 'no netdev'})" for f in functions) or "none"
        raise NotFound(f"{', '.join(unknown)}: no such NIC; this node has {have}")
    taken = [function for function in functions if any(_is_called(name, function) for name in chosen)]
    taken = taken if chosen else _fabric(machine, functions)
    names = nic_names(machine, present) if present else {}
    nics = tuple(_nic_or_fault(machine, function, names) for function in taken)
    processes = machine.processes.running()
    irqs = Irqs(irqbalance="untouched") if "irqbalance" in processes else Irqs()
    spec = NodeSpec(node_name, nics, irqs)
    # Interrupts first: the plans of RPS and XPS depend on where the interrupts are.
    without: Values = {"irqs": evolve(irqs, pin=False), "rps": Rps(enable=False), "xps": Xps(enable=False)}
    for kind, off in without.items():
        if any(change.kind == kind for change in dry_run(machine, spec).changes):
            spec = evolve(spec, **{kind: off})
    left = dry_run(machine, spec)
    return DerivedSpec(spec, (*map(str, left.changes), *left.errors, *unread))


def _is_called(name: str, function: Function) -> bool:
    link = function.link
    return name == function.address or (link is not None and name in (link.name, *link.altnames))


def _fabric(machine: Machine, functions: Collection[Function]) -> list[Function]:
    """The NICs with VFs, SR-IOV or RDMA, but no NVLink bridges, and none that no network driver has (vfio-pci).

    One that carries a default route, also by a bond or a VLAN on top, is for the node itself. It counts if it has VFs, or if it
    has RDMA and no other NIC has.
    """
    files = machine.files
    usable = [
        each for each in functions if not each.nvlink_bridge and each.driver and not is_passed_through(each.driver)
    ]
    vfs = {each.address: [*vf_addresses(files, each.address).values()] for each in usable}
    rdma = {pf for pf in vfs if any(rdma_devices(files, address) for address in (pf, *vfs[pf]))}
    routed = machine.netlink.gateway_ifindexes(TABLES)
    own = {each.address for each in usable if each.link and _carries(files, each.link.name, routed)}
    for_pods = rdma - own or rdma
    return [
        each
        for each in usable
        if vfs[each.address] or each.address in for_pods or (each.total_vfs and each.address not in own)
    ]


def _carries(files: Files, name: str, routed: Collection[int]) -> bool:
    """Whether one of these routes leads through a netdev, or through one on top of it."""
    return ifindex(files, name) in routed or any(_carries(files, upper, routed) for upper in on_top(files, name))


def _nic_or_fault(machine: Machine, function: Function, names: Mapping[str, str]) -> Nic:
    try:
        return _nic(machine, function, names)
    except ValueError as error:
        raise SpecError([f"NIC {function.address}: {error}"]) from None


def _nic(machine: Machine, function: Function, names: Mapping[str, str]) -> Nic:
    link = machine.netlink.link(function.link.name) if function.link else None
    name = names.get(function.address) or _name(link, function, names)
    # A netdev that only configures VFs has no settings.
    own = link if has_netdev(machine.files, function.address, function.driver) else None
    values = _shared(Nic, own) if own else {}
    # Fields of the same name that mean something else, and a txqueuelen of 0, which a spec cannot have.
    values |= {"name": name, "state": "down" if own and not own.up else "up", "vfs": None}
    values |= {"txqueuelen": own.txqueuelen or None} if own else {}
    nic = Nic(select=Selector(pci=function.address), **values)
    if not function.total_vfs:
        return nic
    return evolve(nic, vfs=_vfs(machine, nic, function, {vf.index: vf for vf in link.vfs} if link else {}))


def _name(link: Link | None, function: Function, taken: Mapping[str, str]) -> str:
    """The netdev's name, if a NIC may have that name (not `fab@0`) and no other NIC has it; else the PCI address."""
    usable = link is not None and NIC_NAME.fullmatch(link.name) and link.name not in taken.values()
    return link.name if link is not None and usable else function.address.replace(":", "-")


def _vfs(machine: Machine, nic: Nic, function: Function, granted: Mapping[int, VfInfo]) -> Vfs:
    addresses = vf_addresses(machine.files, function.address)
    permanent = function.link.permanent_mac if function.link else ""
    given = {index: granted[index].mac if index in granted else "" for index in addresses}
    links = {index: _vf_link(machine, address) for index, address in addresses.items()}
    # Leave out a MAC that the VF's driver does not use: the plan would bind the driver again, to set it.
    keep = {i for i, mac in given.items() if mac.strip("0:") and links[i].get("mac", mac) == mac}
    derive = bool(permanent) and all(i in keep for i in addresses)
    guid = port_guid(function.link)
    derived = {index: derived_guid(guid, index) for index in addresses} if guid else {}
    derive_guids = all(
        i in granted and granted[i].node_guid == granted[i].port_guid == own for i, own in derived.items()
    )
    each = {
        index: {
            **(_granted(granted[index], derive_guids and bool(guid)) if index in granted else {}),
            **_unlike(links[index], {name: getattr(nic, name) for name in INHERITED}),
            **({"driver": VFIO} if is_vfio(driver(machine.files, addresses[index])) else {}),
            "mac": None if index not in keep or (derive and given[index] == derived_mac(permanent, index)) else mac,
        }
        for index, mac in given.items()
    }
    common = _most_common(each)
    groups = tuple(
        VfGroup(index=str(index), **different)
        for index, values in sorted(each.items())
        if (different := _unlike(values, common))
    )
    return Vfs(
        len(addresses),
        VfAttributes(**common),
        groups,
        derive_macs=derive or not addresses,
        derive_guids=derive_guids or not addresses,
    )


def _granted(vf: VfInfo, without_guids: bool) -> Values:
    """The attributes that the PF has set for a VF. A GUID or MAC of zeros means that none was set."""
    values = _shared(VfAttributes, vf)
    if without_guids:
        values = {name: value for name, value in values.items() if name not in GUIDS}
    return {name: value for name, value in values.items() if name not in of_one_vf() or value.strip("0:")}


def _vf_link(machine: Machine, address: str) -> Values:
    """The values of a VF's own netdev; empty while that is in another network namespace."""
    name = netdev(machine.files, address)
    link = machine.netlink.link(name) if name else None
    if link is None:
        return {}
    state = "up" if link.up else "down"
    return {"mtu": link.mtu, "state": state, "txqueuelen": link.txqueuelen or None, "mac": link.mac}


def _shared(record: type, observed: object) -> dict[str, Any]:
    """The observed values for which the spec has a field of the same name."""
    return {f.name: value for f in fields(record) if (value := getattr(observed, f.name, None)) not in (None, ())}


def _unlike(values: Values, others: Values) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and others.get(name) != value}


def _most_common(each: Mapping[int, Values]) -> dict[str, Any]:
    """The most frequent value of each attribute that all VFs have, without addresses."""
    names = sorted({name for values in each.values() for name in values} - set(of_one_vf()))
    columns = {name: [values.get(name) for values in each.values()] for name in names}
    return {name: Counter(column).most_common(1)[0][0] for name, column in columns.items() if None not in column}
