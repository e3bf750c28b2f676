"""Checks the addresses of an inventory before any node is changed.

It refuses two hosts that have the same IP address, and warns if an address makes a rail the way to the API server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from attrs import frozen
from pyinfra.api.exceptions import DeployError
from pyinfra.api.inventory import Inventory
from pyinfra.context import host

from agent.spec.node import NodeSpec, SpecError, from_mapping
from agent.spec.strict import MOST_FAULTS
from tasks.common.commands import warn
from tasks.kubernetes import KUBERNETES


@frozen
class Place:
    """Where an address is given."""

    host: str
    key: str

    def __str__(self) -> str:
        return f"{self.host}.{self.key}"


def given(spec: NodeSpec, host_name: str) -> dict[str, Place]:
    """The IP addresses that a host's spec gives to its NICs."""
    return {
        str(address.assigned(rail, spec.node_number or 0).interface.ip): Place(
            host_name, f"nics[{number}].addresses[{index}]"
        )
        for number, nic in enumerate(spec.nics)
        for rail in nic.rails()
        for index, address in enumerate(nic.addresses)
    }


def to_the_api_server(spec: NodeSpec, server: str) -> str | None:
    """What is wrong if the API server's address is in the network of a NIC's address: the kernel sends its packets there."""
    try:
        target = ip_address(urlsplit(server).hostname or "")
    except ValueError:
        return None
    for number, nic in enumerate(spec.nics):
        for rail in nic.rails():
            for index, address in enumerate(nic.addresses):
                network = address.assigned(rail, spec.node_number or 0).interface.network
                if target in network:
                    return (
                        f"nics[{number}].addresses[{index}]: the API server {target} is in the network {network} of this NIC, "
                        "by which the node would reach it; give the rails other networks, unless it is there"
                    )
    return None


def of_hosts(hosts: Iterable[tuple[str, Mapping[str, object]]]) -> dict[str, list[Place]]:
    """Where the hosts' data give each address. A host with wrong data is left out: its own deploy reports the fault."""
    places: dict[str, list[Place]] = {}
    for name, data in hosts:
        keys = {key: data[key] for key in ("nics", "node_number") if data.get(key) is not None}
        with suppress(SpecError):
            for ip, place in given(from_mapping({"node_name": "n", **keys}, name), name).items():
                places.setdefault(ip, []).append(place)
    return places


_KNOWN: WeakKeyDictionary[Inventory, dict[str, list[Place]]] = WeakKeyDictionary()


def refuse_shared(spec: NodeSpec) -> None:
    """Stop the deploy of a host that would have an address of another host, also of one that --limit leaves out.

    :raises DeployError: naming both places.
    """
    mine = given(spec, host.name)
    if not mine:
        return
    inventory = host.state.inventory
    if inventory not in _KNOWN:
        _KNOWN[inventory] = of_hosts(
            (each.name, each.data.dict())  # type: ignore[no-untyped-call]
            for each in inventory
        )
    shared = [
        f"{place} and {other} are both {ip}; give each host its own node_number or address"
        for ip, place in mine.items()
        for other in _KNOWN[inventory].get(ip, ())
        if other.host != host.name
    ]
    if shared:
        raise DeployError("\n".join(shared[:MOST_FAULTS]))


def check(spec: NodeSpec) -> None:
    """Refuse an address of another host, and warn of one that leads to the API server.

    :raises DeployError: two hosts have one address.
    """
    refuse_shared(spec)
    kubernetes = KUBERNETES.here()
    doubt = to_the_api_server(spec, kubernetes.server) if kubernetes else None
    if doubt:
        warn(host, doubt)
