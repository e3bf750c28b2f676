"""What a node has now, written as a spec: the first step to keep a running fleet as it is.

Every value that a record of the spec and what was observed have under the same name is taken over. What the agent would still
change is then left out of the spec, so that its plan is empty: interrupts that somebody placed otherwise, addresses that the
PF never gave its VFs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from attrs import evolve, fields, frozen

from agent.engine.dry_run import preview
from agent.hardware.functions import Function, device_path, discover, netdev, vf_addresses
from agent.hardware.sysfs import names_or_none
from agent.machine import Machine, VfInfo
from agent.spec.nic import NIC_NAME, OF_ONE_VF, Nic, Selector, VfAttributes, VfGroup, Vfs
from agent.spec.node import Irqs, NodeSpec, Rps, Xps
from agent.state.wanted import derived_mac

Values = Mapping[str, Any]

# What a VF's netdev is given by its NIC's spec, unless its own says otherwise.
INHERITED = ("mtu", "state", "txqueuelen")


@frozen
class Adoption:
    """The spec, and what its plan would still change (nothing, unless the devices change under our hands)."""

    spec: NodeSpec
    remaining: tuple[str, ...]


class NotFound(ValueError):
    """A NIC that was asked for by name is not there."""


def adopt(machine: Machine, node_name: str, chosen: Collection[str]) -> Adoption:
    """Write the machine down.

    :param chosen: the NICs by netdev or PCI address; none given takes all that have SR-IOV or RDMA, except one that carries
        a default route and has neither VFs nor RDMA.
    :raises NotFound: a chosen one is not there.
    """
    found = discover(machine)
    functions = tuple(function for function in found if not function.unreadable)
    unread = tuple(
        f"{function.address} cannot be read: {function.unreadable}" for function in found if function.unreadable
    )
    unknown = sorted(name for name in chosen if not any(_is_called(name, function) for function in functions))
    if unknown:
        have = ", ".join(f"{f.address} ({f.link.name if f.link else 'no netdev'})" for f in functions) or "none"
        raise NotFound(f"{', '.join(unknown)}: no such NIC; this node has {have}")
    routed = machine.netlink.gateway_ifindexes()
    taken = [
        function
        for function in functions
        if (any(_is_called(name, function) for name in chosen) if chosen else _is_fabric(machine, function, routed))
    ]
    nics = tuple(_nic(machine, function) for function in taken)
    processes = machine.processes.running()
    irqs = Irqs(irqbalance="untouched") if "irqbalance" in processes else Irqs()
    spec = NodeSpec(node_name, nics, irqs)
    # Interrupts first: where packets are steered follows from where they are.
    if any(change.kind == "irqs" for change in preview(machine, spec).changes):
        spec = evolve(spec, irqs=evolve(spec.irqs, pin=False))
    if any(change.kind == "rps" for change in preview(machine, spec).changes):
        spec = evolve(spec, rps=Rps(enable=False))
    if any(change.kind == "xps" for change in preview(machine, spec).changes):
        spec = evolve(spec, xps=Xps(enable=False))
    left = preview(machine, spec)
    return Adoption(spec, (*map(str, left.changes), *left.errors, *unread))


def _is_called(name: str, function: Function) -> bool:
    link = function.link
    return name == function.address or (link is not None and name in (link.name, *link.altnames))


def _is_fabric(machine: Machine, function: Function, routed: frozenset[int]) -> bool:
    addresses = [function.address, *vf_addresses(machine.files, function.address).values()]
    rdma = any(names_or_none(machine.files, f"{device_path(address)}/infiniband") for address in addresses)
    manages = function.link is not None and function.link.ifindex in routed
    return rdma or len(addresses) > 1 or (function.total_vfs > 0 and not manages)


def _nic(machine: Machine, function: Function) -> Nic:
    link = machine.netlink.link(function.link.name) if function.link else None
    # A netdev may be called by nearly any character: `fab@0`.
    name = link.name if link and NIC_NAME.fullmatch(link.name) else function.address.replace(":", "-")
    values = _shared(Nic, link) if link else {}
    # Those of the same name that mean something else, and a netdev without a queue, which no spec asks for.
    values |= {"name": name, "state": "down" if link and not link.up else "up", "vfs": None}
    values |= {"txqueuelen": link.txqueuelen or None} if link else {}
    nic = Nic(select=Selector(pci=function.address), **values)
    if not function.total_vfs:
        return nic
    return evolve(nic, vfs=_vfs(machine, nic, function, {vf.index: vf for vf in link.vfs} if link else {}))


def _vfs(machine: Machine, nic: Nic, function: Function, told: Mapping[int, VfInfo]) -> Vfs:
    found = vf_addresses(machine.files, function.address)
    permanent = function.link.permanent_mac if function.link else ""
    given = {index: told[index].mac if index in told else "" for index in found}
    links = {index: _vf_link(machine, address) for index, address in found.items()}
    # An address that the driver does not have is no state that could be kept: it would be bound again.
    keep = {i for i, mac in given.items() if mac.strip("0:") and links[i].get("mac", mac) == mac}
    derive = bool(permanent) and all(i in keep for i in found)
    each = {
        index: {
            **(_granted(told[index]) if index in told else {}),
            **_unlike(links[index], {name: getattr(nic, name) for name in INHERITED}),
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
    return Vfs(len(found), VfAttributes(**common), groups, derive_macs=derive or not found)


def _granted(told: VfInfo) -> Values:
    """What a PF tells of a VF; GUIDs of zeros were never given (its driver takes one of its own)."""
    values = _shared(VfAttributes, told)
    return {name: value for name, value in values.items() if name not in OF_ONE_VF or value.strip("0:")}


def _vf_link(machine: Machine, address: str) -> Values:
    """What a VF's netdev has that the PF does not tell; nothing while another network namespace has it."""
    name = netdev(machine.files, address)
    link = machine.netlink.link(name) if name else None
    if link is None:
        return {}
    state = "up" if link.up else "down"
    return {"mtu": link.mtu, "state": state, "txqueuelen": link.txqueuelen or None, "mac": link.mac}


def _shared(record: type, observed: object) -> dict[str, Any]:
    """The observed values of which the spec has a field of the same name."""
    return {f.name: value for f in fields(record) if (value := getattr(observed, f.name, None)) not in (None, ())}


def _unlike(values: Values, others: Values) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and others.get(name) != value}


def _most_common(each: Mapping[int, Values]) -> dict[str, Any]:
    """The value that most VFs have of each attribute, if all have one; never an address."""
    names = sorted({name for values in each.values() for name in values} - set(OF_ONE_VF))
    columns = {name: [values.get(name) for values in each.values()] for name in names}
    return {name: Counter(column).most_common(1)[0][0] for name, column in columns.items() if None not in column}
