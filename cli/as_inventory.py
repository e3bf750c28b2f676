"""Writes a running server as an inventory: a host's line and the data of its group, from which to start a fleet's inventory.

The data begins with the spec of :mod:`cli.as_spec`. NICs of one kind with the same settings become one entry with
``select.each``. The data also requires the RDMA devices and GPUs that work now. The text is Python, as pyinfra reads it, and
on this server the plan of its data is empty.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from attrs import frozen

from agent.engine.dry_run import dry_run
from agent.hardware.rdma import RAW, RdmaPort
from agent.hardware.sysfs import names_in
from agent.machine import Files, Machine
from agent.probes.gpus import GPUS, PEER_MEMORY
from agent.report.printable import printable
from agent.report.python_text import literal
from agent.spec.nic import LinkLayer
from agent.spec.node import NodeSpec, from_mapping, to_json
from agent.spec.selector import INDEX
from cli import topology
from cli.as_spec import derive_spec
from cli.inspection import Inspection, NetworkFunction, inspect

GROUP = "servers"


Entry = dict[str, Any]
Kind = tuple[str, str]
"""PCI IDs of vendor and device."""


@frozen
class Starter:
    """The inventory's text. ``remaining``: what the plan of its data would still change on this server, usually nothing.

    ``facts``: the same for deploys/discover.py, with the NICs one by one, and the hardware.
    """

    text: str
    remaining: tuple[str, ...]
    facts: Mapping[str, Any]


def derive_inventory(machine: Machine, host: str, node_name: str, chosen: Collection[str]) -> Starter:
    """Write the server as an inventory.

    :param host: the name by which the control host connects to it.
    :param chosen: the NICs, as :func:`cli.as_spec.derive_spec` takes them.
    :raises NotFound: a chosen NIC does not exist.
    """
    derived = derive_spec(machine, node_name, chosen)
    inspection = inspect(machine)
    nics, rest = _data(derived.spec, inspection, _gpus(machine.files))
    data = {**({"nics": _entries(nics, inspection)} if nics else {}), **rest}
    spec = from_mapping({"node_name": node_name, **data}, host)
    left = dry_run(machine, spec)
    present = [*_network(inspect(machine, spec)), *_gpu_lines(machine.files)]
    line = {"node_name": node_name} if node_name != host else {}
    remaining = dict.fromkeys([*derived.remaining, *map(str, left.changes), *left.errors])
    facts = {
        "node_name": node_name,
        "nics": [_single(nic, _kind(function)) for function, nic in nics],
        "data": rest,
        "functions": [
            {name: getattr(each, name) for name in ("address", "vendor", "device", "model", "driver", "numa_node")}
            for each in inspection.functions
        ],
        "gpus": [address for address, _ in topology.gpus(machine.files)],
        "remaining": list(remaining),
    }
    return Starter(_text(host, line, data, present), tuple(remaining), facts)


# --- the data ----------------------------------------------------------------------------------------------


def _data(
    spec: NodeSpec, inspection: Inspection, gpus: Mapping[str, Any]
) -> tuple[list[tuple[NetworkFunction, Entry]], Entry]:
    """The NICs with their RDMA devices, and the group's other data: the spec's keys without the node's own, with the GPUs."""
    data: Entry = json.loads(to_json(spec))
    del data["node_name"]
    functions = {function.address: function for function in inspection.functions}
    nics = []
    for nic in data.pop("nics", []):
        # The names that udev gave the netdevs need not be given again.
        nic.pop("altnames", None)
        nics.append((functions[nic["select"]["pci"]], nic))
    for function, nic in nics:
        # The port of a netdev that is down is ACTIVE on InfiniBand only, and a spec takes no other for ACTIVE.
        if nic.get("state") == "down" and not (_active(function) and _is_infiniband(function)):
            continue
        if rdma := _rdma(function, [other for other, _ in nics if _fabric(other) == _fabric(function)]):
            nic["rdma"] = rdma
    working = [function for function, nic in nics if "rdma" in nic and (_active(function) or not function.rdma)]
    if 0 < len(working) < sum("rdma" in nic for _, nic in nics):
        data["rdma"] = {"at_least": len(working)}
    return nics, {**data, **gpus}


def _kind(function: NetworkFunction) -> Kind:
    return function.vendor, function.device


def _fabric(function: NetworkFunction) -> tuple[Kind, frozenset[str | None]]:
    """A kind of card on Ethernet, or on InfiniBand: its ports may be on either, each for another purpose."""
    return _kind(function), frozenset(port.link_layer for port in _all_ports(function))


def _all_ports(function: NetworkFunction) -> Iterator[RdmaPort]:
    return (port for owner in (function, *function.vfs) for port in _ports(owner))


def _ports(function: NetworkFunction) -> Iterator[RdmaPort]:
    """Its RDMA ports, without those of netdevs that are not managed: only the first is. Raw packets are no RDMA."""
    others = {netdev.name for netdev in function.netdevs[1:]}
    ports = (port for device in function.rdma if device.transport != RAW for port in device.ports)
    return (port for port in ports if port.netdev not in others)


def _active(function: NetworkFunction) -> bool:
    return any(port.state == "ACTIVE" for port in _ports(function))


def _is_infiniband(function: NetworkFunction) -> bool:
    return any(port.link_layer == "InfiniBand" for port in _ports(function))


def _rdma(function: NetworkFunction, alike: Sequence[NetworkFunction]) -> Entry:
    """The ``nics[].rdma`` of a function. Its values are those of the ACTIVE ports of all functions ``alike``."""
    ports = [port for each in alike for port in _all_ports(each) if port.state == "ACTIVE"]
    vfs = bool(function.vfs) and all(_active(vf) for vf in function.vfs)
    own = any(_ports(function))
    if not ports or not (own or vfs):
        return {}
    given: Entry = {**({} if own else {"pf": False}), **({"vfs": True} if vfs else {})}
    layers = {port.link_layer for port in ports}
    # The kernel has a third word, Unknown, for devices such as EFA.
    if len(layers) == 1 and layers <= set(get_args(LinkLayer)):
        given["link_layer"] = layers.pop()
    rates = [port.gigabits or 0 for port in ports]
    # eRDMA's driver reports an invented rate.
    if min(rates) >= 1 and function.driver != "erdma":
        given["rate"] = int(min(rates))
    for gid_type, layer in (("RoCE v2", "Ethernet"), ("IB", "InfiniBand")):
        if given.get("link_layer") == layer and all(any(gid.type == gid_type for gid in port.gids) for port in ports):
            given["gid_type"] = gid_type
    return given


def _entries(nics: Sequence[tuple[NetworkFunction, Entry]], inspection: Inspection) -> list[Entry]:
    """The list ``nics``: one entry for the NICs of a kind that have the same settings, and one for each other NIC."""
    of_kind: dict[Kind, list[tuple[NetworkFunction, Entry]]] = {}
    for function, nic in nics:
        of_kind.setdefault(_kind(function), []).append((function, nic))
    several, single = [], []
    for kind, members in of_kind.items():
        bodies = Counter(_body(nic) for _, nic in members)
        body, count = bodies.most_common(1)[0]
        # A function of the kind that is not among the NICs would match ``select`` too.
        alike = [each for each in inspection.functions if _kind(each) == kind and not each.nvlink_bridge]
        all_taken = len(members) == len(alike)
        if count < 2 or not all_taken:
            single += [_single(nic, kind) for _, nic in members]
            continue
        others = [_single(nic, kind) for _, nic in members if _body(nic) != body]
        single += others
        select: Entry = {"vendor": kind[0], "device": kind[1], "each": True, "min": count, "max": count}
        select |= {"without": [nic["name"] for nic in others]} if others else {}
        several.append({"name": "", "select": select, **json.loads(body)})
    names = {nic["name"] for nic in single}
    for entry in several:
        entry["name"] = _pattern(entry, names)
        names.add(entry["name"])
    return [*several, *single]


def _body(nic: Entry) -> str:
    """A NIC's settings as a text, to compare them with those of other NICs."""
    return json.dumps({key: value for key, value in nic.items() if key not in ("name", "select")}, sort_keys=True)


def _single(nic: Entry, kind: Kind) -> Entry:
    """An entry for one NIC. It selects the slot, and the kind of card that is in it."""
    select = {**nic["select"], "vendor": kind[0], "device": kind[1]}
    return {"name": nic["name"], "select": select, **{key: nic[key] for key in nic if key not in ("name", "select")}}


def _pattern(entry: Entry, taken: Collection[str]) -> str:
    """A pattern for the names of an entry's NICs. None of the names that it makes is in ``taken``."""
    select = entry["select"]
    usual = "rail" if "rdma" in entry else "nic"
    # The last prefix is longer than the name of any netdev, so no name in ``taken`` begins with it.
    prefixes = (usual, f"{usual}-{select['device']}-", f"{usual}-{select['vendor']}-{select['device']}-")
    free = (prefix for prefix in prefixes if not any(name.startswith(prefix) for name in taken))
    return next(free, prefixes[-1]) + INDEX


def _gpus(files: Files) -> Entry:
    """The key ``gpus``, if the driver has some."""
    count = len(names_in(files, GPUS))
    peer_memory = {"peer_memory": True} if names_in(files, PEER_MEMORY) else {}
    return {"gpus": {"count": count, **peer_memory}} if count else {}


# --- the text ----------------------------------------------------------------------------------------------


def _network(inspection: Inspection) -> Iterator[str]:
    """A line for each function that is a NIC of the spec, or an NVLink bridge."""
    for function in inspection.functions:
        called = function.nic or ("NVLink bridge, left to the fabric manager" if function.nvlink_bridge else None)
        if called is None:
            continue
        devices = (f"{device.name} ({device.transport})" for device in function.rdma)
        netdevs = (netdev.name for netdev in function.netdevs)
        facts = [f"{called}:", function.address, f"[{function.vendor}:{function.device}]", *netdevs, *devices]
        yield " ".join([*facts, *_numa(function.numa_node)])


def _gpu_lines(files: Files) -> Iterator[str]:
    """A line for each GPU on the bus, also for one without a driver."""
    driven = names_in(files, GPUS)
    for address, node in topology.gpus(files):
        known = [] if address in driven else ["(NVIDIA's driver does not have it, so the key gpus does not count it)"]
        yield " ".join(["GPU:", address, *_numa(None if node == topology.EVERYWHERE else node), *known])


def _numa(node: int | None) -> list[str]:
    return [] if node is None else [f"NUMA node {node}"]


def _text(host: str, line: Entry, data: Entry, present: Sequence[str]) -> str:
    comments = [f"# {printable(fact)}" for fact in present] or ["# no NIC with SR-IOV or RDMA, and no GPU"]
    return "\n".join(
        [
            "# Written by `trackbed inspect --as-inventory`. To deploy other servers of the same kind, add them to the list.",
            "# docs/inventory.md describes the keys. What this server has:",
            *comments,
            "",
            f"{GROUP} = (",
            f"    [{literal((host, line) if line else host, ' ' * 4)}],",
            f"    {literal(data, ' ' * 4)},",
            ")",
            "",
        ]
    )
