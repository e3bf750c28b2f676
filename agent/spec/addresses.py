"""The IP addresses of a NIC: given as they are, or derived from the number of its rail and the number of the node."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_interface,
    ip_network,
)
from typing import TypeVar

from attrs import field, frozen

from agent.spec.validators import Matches

T = TypeVar("T")

Interface = IPv4Interface | IPv6Interface
"""An address with the length of its network's prefix."""

Network = IPv4Network | IPv6Network

RAIL = "{rail}"
MOST_RAILS = 64

FIRST_TABLE = 479100
"""The routing table of rail 0; that of rail r is r higher. 4791 is RoCE v2's UDP port."""

TABLES = range(FIRST_TABLE, FIRST_TABLE + MOST_RAILS)

LEAST_MTU_OF_IPV6 = 1280
"""A netdev with a smaller MTU has no IPv6 at all: the kernel removes its addresses (addrconf_notify, net/ipv6/addrconf.c)."""

PRIORITY = 24791
"""The priority of the rules that select these tables: before that of the table main, 32766."""

ARP = {"arp_ignore": "1", "arp_announce": "2", "rp_filter": "2"}
"""Sysctls of a netdev with an IPv4 address, below net.ipv4.conf.NETDEV (Documentation/networking/ip-sysctl.rst).

The netdev answers ARP requests for its own addresses only, and sends its own requests from one of them. It also accepts a
packet whose answer would leave through another netdev: until the address has its rule, all answers do.
"""

_FORMS = {
    "address": "IP address and prefix length",
    "network": "IP network and prefix length (the bits after the prefix are 0)",
    "gateway": "IP address",
}

_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+/[0-9]{1,3}")
_NETWORK = re.compile(r"([0-9A-Fa-f:.]|\{rail\})+/[0-9]{1,3}")
_GATEWAY = re.compile(r"([0-9A-Fa-f:.]|\{rail\})+")


@frozen
class Assigned:
    """An address that a netdev is to have, and the gateway of its network, if that has one."""

    interface: Interface
    gateway: IPv4Address | IPv6Address | None


@frozen
class Address:
    """One IP address of a NIC. A text stands for one with ``address`` alone.

    ``address``: the address itself, as ``192.0.2.11/24``. ``network``: the network, as ``10.{rail}.0.0/16``; ``{rail}`` stands
    for the NIC's ``rail`` (decimal), and the host's part of the address is the node's ``node_number``. ``gateway``: a router in
    that network, for the rest of the fabric; it may have ``{rail}`` as well.
    """

    address: str | None = field(default=None, validator=Matches(_ADDRESS, "write it as 192.0.2.11/24 or fd00::11/64"))
    network: str | None = field(
        default=None, validator=Matches(_NETWORK, "write it as 10.{rail}.0.0/16 or fd00:0:0:{rail}::/64")
    )
    gateway: str | None = field(default=None, validator=Matches(_GATEWAY, "give a router's address: 192.0.2.1"))

    def __attrs_post_init__(self) -> None:
        if (self.address is None) == (self.network is None):
            raise ValueError("give either address or network")
        if self.address is not None:
            self.assigned(0, 0)
        else:
            self._router(0, self._network(0))

    @classmethod
    def of_text(cls, text: str) -> Address:
        """The address that a text stands for."""
        return cls(address=text)

    @property
    def version(self) -> int:
        """4 or 6."""
        return 6 if ":" in (self.address or self.network or "") else 4

    def assigned(self, rail: int, node_number: int) -> Assigned:
        """The address of this rail of this node.

        :raises ValueError: there is no such address, or no host can have it.
        """
        given = self.address
        interface = self._derived(rail, node_number) if given is None else _parsed("address", ip_interface, given, 0)
        if (why := _unusable(interface)) is not None:
            raise ValueError(f"{interface}: {why}")
        gateway = self._router(rail, interface.network)
        if gateway == interface.ip:
            raise ValueError(f"gateway: {gateway} is the node's own address; give a router's")
        return Assigned(interface, gateway)

    def _derived(self, rail: int, node_number: int) -> Interface:
        network = self._network(rail)
        if node_number >= network.num_addresses:
            raise ValueError(f"network: {network} has no host {node_number}; give a larger network")
        return ip_interface(f"{network.network_address + node_number}/{network.prefixlen}")

    def _network(self, rail: int) -> Network:
        return _parsed("network", ip_network, self.network or "", rail)

    def _router(self, rail: int, network: Network) -> IPv4Address | IPv6Address | None:
        if self.gateway is None:
            return None
        gateway = _parsed("gateway", ip_address, self.gateway, rail)
        if gateway not in network:
            raise ValueError(f"gateway: {gateway} is not in {network}; give a router of that network")
        # A router is a host, too. The own address of an IPv6 network is that of its routers (RFC 4291, section 2.6.1).
        if network.version == 4 and (why := _unusable(ip_interface(f"{gateway}/{network.prefixlen}"))) is not None:
            raise ValueError(f"gateway: {gateway}: {why}")
        return gateway


def _parsed(name: str, parse: Callable[[str], T], text: str, rail: int) -> T:
    written = text.replace(RAIL, str(rail))
    try:
        return parse(written)
    except ValueError:
        raise ValueError(f"{name}: {written} is no {_FORMS[name]}; correct it") from None


def _unusable(interface: Interface) -> str | None:
    """Why a host cannot have an address as one of its own; None if it can."""
    ip, network = interface.ip, interface.network
    if ip.is_multicast or ip.is_loopback or ip.is_unspecified or ip.is_link_local:
        return "it is a multicast, loopback, unspecified or link-local address; give another"
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        return "it is an IPv4 address written as IPv6; give it as IPv4"
    if network.num_addresses == 1:
        return "its network has no other host; give the prefix length of the rail's network"
    # A network of two hosts has neither of the two: RFC 3021, RFC 6164.
    if network.num_addresses > 2 and ip == network.network_address:
        return "it is the network's own address; give a host's"
    if network.num_addresses > 2 and ip.version == 4 and ip == network.broadcast_address:
        return "it is the network's broadcast address; give a host's"
    return None
