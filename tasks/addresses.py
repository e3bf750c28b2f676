"""Checks the addresses and the names of an inventory's nodes before any node is changed.

It refuses an IP address or a `node_name` that two nodes of a cluster have. (An inventory may have several clusters.) It warns
if the API server is in the network of a NIC, since the node then reaches the API server through that NIC.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

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
    """The host and the key that give an address or a name."""

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


@cache
def places(inventory: Inventory) -> dict[tuple[str, str], list[Place]]:
    """The places where the hosts' data give an address or a Node's name, by the cluster and by the address or name.

    Addresses of hosts with wrong data are left out: their own deploys name the faults.
    """
    given: dict[tuple[str, str], list[Place]] = {}
    for name, data in ((each.name, each.data.dict()) for each in inventory):  # type: ignore[no-untyped-call]
        own = _node(str(data.get("node_name") or name), name)
        keys = {key: data[key] for key in ("nics", "node_number") if data.get(key) is not None}
        with suppress(SpecError):
            own |= own_places(from_mapping({"node_name": "n", **keys}, name), name)
        for what, place in own.items():
            given.setdefault((cluster_of(data.get(KUBERNETES.name)), what), []).append(place)
    return given


def _node(node_name: str, host_name: str) -> dict[str, Place]:
    return {f"the Node {node_name}": Place(host_name, "node_name")}


def refuse_shared(spec: NodeSpec) -> None:
    """Stop the deploy of a host if another host of its cluster has one of its addresses, or is the same Node.

    Hosts outside --limit count, too.

    :raises DeployError: naming both places.
    """
    mine = own_places(spec, host.name) | (_node(spec.node_name, host.name) if KUBERNETES.here() else {})
    if not mine:
        return
    cluster = cluster_of(host.data.get(KUBERNETES.name))
    shared = [
        f"{place} and {other} are both {what}; give each host its own node_number, address or node_name"
        for what, place in mine.items()
        for other in places(host.state.inventory).get((cluster, what), ())
        if other.host != host.name
    ]
    if shared:
        raise DeployError("\n".join(shared[:MOST_FAULTS]))


def check(spec: NodeSpec) -> None:
    """Refuse an address or a Node's name that another host has, and warn if a NIC's network contains the API server.

    :raises DeployError: two hosts have one address, or are one Node.
    """
    refuse_shared(spec)
    kubernetes = KUBERNETES.here()
    warning = api_server_warning(spec, kubernetes.server) if kubernetes else None
    if warning:
        warn(host, warning)
