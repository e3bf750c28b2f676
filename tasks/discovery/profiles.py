"""Groups servers by their hardware profile: the same network cards and GPUs at the same PCI addresses.

A group has each value that more than half of its servers have. What differs on a server is that server's own data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

Data = dict[str, Any]
T = TypeVar("T")


@frozen
class NetworkFunction:
    """A PCI function for networks. ``vendor`` and ``device``: PCI IDs; ``model``: its name, which some nodes do not know."""

    address: str
    vendor: str
    device: str
    model: str = ""
    driver: str | None = None
    numa_node: int | None = None


@frozen
class Server:
    """What `trackbed inspect --as-inventory --json` says of a server. ``nics``: one entry of the key ``nics`` for each NIC.

    ``given``: the keys that the inventory has for it already.
    """

    node_name: str
    functions: tuple[NetworkFunction, ...] = ()
    gpus: tuple[str, ...] = ()
    nics: tuple[Data, ...] = ()
    data: Data = field(factory=dict)
    remaining: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def hardware(self) -> tuple[Any, ...]:
        """What the servers of a profile have in common. A model's name is not part of it: it comes from a file on the node."""
        return tuple((each.address, each.vendor, each.device) for each in self.functions), self.gpus


@frozen
class Profile:
    """A group: its name, hardware and data, and its servers, each with the data that differ from the group's."""

    name: str
    functions: tuple[NetworkFunction, ...]
    gpus: tuple[str, ...]
    nics: tuple[Data, ...]
    data: Data
    servers: Mapping[str, Data]


def profiles(servers: Mapping[str, Server], taken: Collection[str]) -> list[Profile]:
    """The servers by hardware, the largest group first.

    :param servers: by the host's name in the inventory.
    :param taken: names that no group may have.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name in servers:
        alike.setdefault(servers[name].hardware, []).append(name)
    names = set(taken)
    made = []
    for members in sorted(alike.values(), key=lambda each: (-len(each), each)):
        profile = _profile({name: servers[name] for name in members}, names)
        names.add(profile.name)
        made.append(profile)
    return made


def _profile(servers: Mapping[str, Server], taken: Collection[str]) -> Profile:
    all_of = list(servers.values())
    # Models and drivers are those of a server that knows most of them.
    known = max(all_of, key=lambda each: sum(bool(f.model) + bool(f.driver) for f in each.functions))
    nics = tuple(_common_nics(all_of))
    data = _common([each.data for each in all_of])
    own = {name: _own(name, each, nics, data) for name, each in servers.items()}
    name = _name(known, nics)
    free = (each for each in (name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))) if each not in taken)
    return Profile(next(free), known.functions, known.gpus, nics, data, own)


def _own(name: str, server: Server, nics: Sequence[Data], data: Data) -> Data:
    """The data of a server that differ from its group's."""
    named = {} if server.node_name == name else {"node_name": server.node_name}
    own = {} if "nics" in server.given else _own_nics(server.nics, nics)
    return {**named, **own, **_without(_different(server.data, data), *server.given)}


def _own_nics(own: Sequence[Data], common: Sequence[Data]) -> Data:
    """The key ``nic_overrides``, or ``nics`` if the server has a NIC that the group lacks: overrides add none."""
    names = {_address(nic): nic["name"] for nic in common}
    named = {_address(nic): {**nic, "name": names.get(_address(nic), nic["name"])} for nic in own}
    if named.keys() - names:
        return {"nics": [*named.values()]}
    changes = {nic["name"]: _changes(nic, named.get(_address(nic))) for nic in common}
    changes = {name: change for name, change in changes.items() if change != {}}
    return {"nic_overrides": changes} if changes else {}


def _changes(common: Data, own: Data | None) -> Data | None:
    """The override that turns the group's entry into the server's; None removes a part."""
    if own is None:
        return None
    different = _different(own, common)
    return {
        key: _changes(common[key], value) if isinstance(value, dict) and isinstance(common.get(key), dict) else value
        for key, value in different.items()
    }


def _name(known: Server, nics: Iterable[Data]) -> str:
    """A group's name, by the drivers of its NICs and by its GPUs: mlx5_core_x8_gpu_x8."""
    drivers = {each.address: each.driver or f"pci_{each.vendor}_{each.device}" for each in known.functions}
    counts = Counter(drivers[_address(nic)] for nic in nics)
    parts = [f"{driver}_x{count}" for driver, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    parts += [f"gpu_x{len(known.gpus)}"] if known.gpus else []
    name = re.sub(r"\W", "_", "_".join(parts), flags=re.ASCII)
    # A group's name is a variable's.
    return name if name.isidentifier() else f"servers_{name}" if name else "servers_without_nics"


def _address(nic: Data) -> str:
    return str(nic["select"]["pci"])


def _common_nics(servers: Sequence[Server]) -> Iterable[Data]:
    """The NICs that most of the servers have, each with what most of them have of it."""
    by_address: dict[str, list[Data]] = {}
    for each in servers:
        for nic in each.nics:
            by_address.setdefault(_address(nic), []).append(nic)
    names: set[str] = set()
    for address, found in sorted(by_address.items()):
        if 2 * len(found) <= len(servers):
            continue
        nic = _common(found)
        # Names of netdevs may differ from server to server, or be in another order.
        name = str(nic.get("name") or "")
        if not name or name in names:
            name = address.replace(":", "-")
        names.add(name)
        yield {"name": name, "select": found[0]["select"], **_without(nic, "name", "select")}


def _without(data: Data, *keys: str) -> Data:
    return {key: value for key, value in data.items() if key not in keys}


def _common(each: Sequence[Data]) -> Data:
    """The values that more than half have."""
    keys = dict.fromkeys(key for data in each for key in data)
    found = {key: _majority([data.get(key) for data in each]) for key in keys}
    return {key: value for key, value in found.items() if value is not None}


def _majority(values: Sequence[T | None]) -> T | None:
    texts = [json.dumps(value, sort_keys=True) for value in values]
    text, count = Counter(texts).most_common(1)[0]
    return values[texts.index(text)] if 2 * count > len(values) else None


def _different(own: Data, common: Data) -> Data:
    """The values in place of the group's. None: the key's default."""
    return {key: own.get(key) for key in {**common, **own} if own.get(key) != common.get(key)}
