"""Checks the addresses and the names of an inventory's nodes before any node is changed.

It refuses an IP address or a `node_name` that two nodes of a cluster have. (An inventory may have several clusters.) It warns
if the API server is in the network of a NIC, since the node then reaches the API server through that NIC.
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
from tasks.kubernetes.clusters import cluster_of


@frozen
class Place:
    """The host and the key that give an address."""

    host: str
    key: str

    def __str__(self) -> str:
        return f"{self.host}.{self.key}"


def own_places(spec: NodeSpec, host_name: str) -> dict[str, Place]:
    """The IP addresses that a host's spec gives to its NICs."""
    return {
        str(address.assigned(rail, spec.node_number or 0).interface.ip): Place(
            host_name, f"nics[{number}].addresses[{index}]"
        )
        for number, nic in enumerate(spec.nics)
        for rail in nic.rails()
        for index, address in enumerate(nic.addresses)
    }


def api_server_warning(spec: NodeSpec, server: str) -> str | None:
    """A warning if the API server is in the network of a NIC's address, since the kernel then sends its packets to that NIC."""
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
                        "so the node reaches it through this NIC; unless that is right, give the rails other networks"
                    )
    return None


def places_by_address(hosts: Iterable[tuple[str, Mapping[str, object]]]) -> dict[tuple[str, str], list[Place]]:
    """Where the hosts' data give each address, by cluster and address.

    Hosts with wrong data are left out: their own deploys name the faults.
    """
    places: dict[tuple[str, str], list[Place]] = {}
    for name, data in hosts:
        keys = {key: data[key] for key in ("nics", "node_number") if data.get(key) is not None}
        with suppress(SpecError):
            for ip, place in own_places(from_mapping({"node_name": "n", **keys}, name), name).items():
                places.setdefault((cluster_of(data.get(KUBERNETES.name)), ip), []).append(place)
    return places


_PLACES: WeakKeyDictionary[Inventory, dict[tuple[str, str], list[Place]]] = WeakKeyDictionary()


def refuse_shared(spec: NodeSpec) -> None:
    """Stop the deploy of a host if another host of its cluster has one of its addresses. Hosts outside --limit count, too.

    :raises DeployError: naming both places.
    """
    mine = own_places(spec, host.name)
    if not mine:
        return
    inventory = host.state.inventory
    if inventory not in _PLACES:
        _PLACES[inventory] = places_by_address(
            (each.name, each.data.dict())  # type: ignore[no-untyped-call]
            for each in inventory
        )
    cluster = cluster_of(host.data.get(KUBERNETES.name))
    shared = [
        f"{place} and {other} are both {ip}; give each host its own node_number or address"
        for ip, place in mine.items()
        for other in _PLACES[inventory].get((cluster, ip), ())
        if other.host != host.name
    ]
    if shared:
        raise DeployError("\n".join(shared[:MOST_FAULTS]))


_NAMES: WeakKeyDictionary[Inventory, dict[tuple[str, str], list[str]]] = WeakKeyDictionary()


def refuse_shared_name(spec: NodeSpec) -> None:
    """Stop the deploy of a host if another host of its cluster, be it outside --limit, has its `node_name`.

    :raises DeployError: naming both hosts.
    """
    inventory = host.state.inventory
    if inventory not in _NAMES:
        names = _NAMES[inventory] = {}
        for each in inventory:
            cluster = cluster_of(each.data.get(KUBERNETES.name))
            names.setdefault((cluster, str(each.data.get("node_name") or each.name)), []).append(each.name)
    cluster = cluster_of(host.data.get(KUBERNETES.name))
    # Both would write one Node.
    for other in _NAMES[inventory].get((cluster, spec.node_name), ()):
        if other != host.name:
            raise DeployError(f"{host.name} and {other} have the same node_name, {spec.node_name}; give one another")


def check(spec: NodeSpec) -> None:
    """Refuse an address or a Node's name that another host has, and warn if a NIC's network contains the API server.

    :raises DeployError: two hosts have one address, or are one Node.
    """
    refuse_shared(spec)
    kubernetes = KUBERNETES.here()
    if kubernetes:
        refuse_shared_name(spec)
    warning = api_server_warning(spec, kubernetes.server) if kubernetes else None
    if warning:
        warn(host, warning)
