"""The fake's IP addresses, routes and rules, as Linux was seen to behave (tests/contract/cases/addresses.py)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from ipaddress import ip_address, ip_interface, ip_network
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from agent.machine import Route, Rule
from tests.sim.tree import error

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

MAIN = 254
LOOPBACK = 1
CONF = "/proc/sys/net/ipv4/conf"
SETTINGS = ("arp_ignore", "arp_announce", "rp_filter", "promote_secondaries")


@define
class Routing:
    """``assigned``: the addresses of each netdev, by ifindex, in their order. ``duplicates``: those that another node has."""

    kernel: Kernel
    assigned: dict[int, tuple[str, ...]] = field(factory=dict)
    duplicates: set[str] = field(factory=set)
    _routes: list[Route] = field(factory=list)
    _rules: list[Rule] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.conf("all", dict.fromkeys(SETTINGS, "0"))

    def conf(self, name: str, values: dict[str, str]) -> None:
        for setting, value in values.items():
            self.kernel.tree.put(f"{CONF}/{name}/{setting}", value)

    # --- what becomes of a netdev -----------------------------------------------------------------------------

    def renamed(self, old: str, new: str) -> None:
        """The kernel moves the settings of a netdev to its new name."""
        self.conf(new, {setting: self.kernel.tree.files[f"{CONF}/{old}/{setting}"] for setting in SETTINGS})
        self.kernel.tree.remove(f"{CONF}/{old}")

    def gone(self, ifindex: int, name: str) -> None:
        """A netdev left the namespace: rules stay."""
        self.assigned.pop(ifindex, None)
        self._forget(lambda route: route.ifindex == ifindex)
        self.kernel.tree.remove(f"{CONF}/{name}")

    def set_up(self, ifindex: int, up: bool) -> None:
        """With the link go all routes and the IPv6 addresses; with it come back the connected routes of the addresses."""
        addresses = self.assigned.get(ifindex, ())
        if up:
            for address in addresses:
                self._connect(ifindex, address)
        else:
            self._forget(lambda route: route.ifindex == ifindex)
            self.assigned[ifindex] = tuple(address for address in addresses if ":" not in address)

    # --- Netlink ----------------------------------------------------------------------------------------------

    def add_address(self, ifindex: int, address: str) -> None:
        link = self.kernel.written(ifindex, "address", f"address {address}").link
        interface = ip_interface(address)
        present = self.assigned.get(ifindex, ())
        # IPv6 compares without the prefix length (ipv6_add_addr), IPv4 with it (__inet_insert_ifa).
        same = {str(ip_interface(other).ip if interface.version == 6 else ip_interface(other)) for other in present}
        if str(interface.ip if interface.version == 6 else interface) in same:
            raise error(errno.EEXIST, address)
        self.assigned[ifindex] = (*present, str(interface))
        if link.up:
            self._connect(ifindex, str(interface))
        self.kernel.rdma.address_added(link.name, str(interface.ip))

    def remove_address(self, ifindex: int, address: str) -> None:
        self.kernel.written(ifindex, "address", f"address {address} away")
        present = self.assigned.get(ifindex, ())
        if address not in present:
            raise error(errno.EADDRNOTAVAIL, address)
        self.lose_address(ifindex, address)

    def lose_address(self, ifindex: int, address: str) -> None:
        """Removing an IPv4 address also removes later addresses of its network, unless they are promoted."""
        present = self.assigned[ifindex]
        network = ip_interface(address).network
        name = self.kernel.by_ifindex(ifindex).link.name
        files = self.kernel.tree.files
        promoted = "1" in (files[f"{CONF}/{where}/promote_secondaries"] for where in ("all", name))
        secondary = {
            other
            for other in present[present.index(address) + 1 :]
            if network.version == 4 and not promoted and ip_interface(other).network == network
        }
        left = tuple(other for other in present if other != address and other not in secondary)
        self.assigned[ifindex] = left
        gone = {str(ip_interface(other).ip) for other in present if other not in left}
        self._forget(lambda route: route.table == MAIN and route.ifindex == ifindex and route.gateway is None)
        if all(":" in other for other in left):
            self._forget(lambda route: route.ifindex == ifindex and ":" not in route.destination)
        if self.kernel.by_ifindex(ifindex).link.up:
            for other in left:
                self._connect(ifindex, other)
        # An IPv6 route in another table stays without its source (fib6_remove_prefsrc). An IPv4 one stays as it is, unless that
        # was the last IPv4 address (fib_disable_ip).
        self._routes = [
            evolve(route, source=None) if route.source in gone and ":" in route.destination else route
            for route in self._routes
        ]
        for ip in gone:
            self.kernel.rdma.address_removed(name, ip)

    def routes(self, tables: Collection[int]) -> tuple[Route, ...]:
        return tuple(route for route in self._routes if route.table in tables)

    def add_route(self, route: Route) -> None:
        if not self.kernel.written(route.ifindex, "address", f"route {route.destination} table {route.table}").link.up:
            raise error(errno.ENETDOWN, route.destination)
        local = {str(ip_interface(address).ip) for addresses in self.assigned.values() for address in addresses}
        if route.source is not None and route.source not in local:
            raise error(errno.EINVAL, route.destination)
        self._forget(lambda other: (other.destination, other.table) == (route.destination, route.table))
        self._routes.append(route)

    def remove_route(self, route: Route) -> None:
        self.kernel.written(route.ifindex, "address", f"route {route.destination} table {route.table} away")
        if route not in self._routes:
            raise error(errno.ESRCH, route.destination)
        self._routes.remove(route)

    def rules(self) -> tuple[Rule, ...]:
        return tuple(sorted(self._rules, key=lambda rule: rule.priority))

    def add_rule(self, rule: Rule) -> None:
        self.kernel.refuse("rule", "rules", f"from {rule.source} table {rule.table}")
        if rule in self._rules:
            raise error(errno.EEXIST, rule.source)
        self._rules.append(rule)

    def remove_rule(self, rule: Rule) -> None:
        self.kernel.refuse("rule", "rules", f"from {rule.source} table {rule.table} away")
        if rule not in self._rules:
            raise error(errno.ENOENT, rule.source)
        self._rules.remove(rule)

    def gateways(self, without: Collection[int]) -> set[int]:
        return {
            route.ifindex
            for route in self._routes
            if route.table not in without and (route.gateway or not ip_network(route.destination).prefixlen)
        }

    def towards(self, address: str, source: str | None) -> int | None:
        """Where a packet to an address is sent; the node's own addresses are on the loopback.

        The tables of the rules for its source come before the main one.
        """
        ip = ip_address(address)
        local = {ip_interface(own).ip for given in self.kernel.netlink.addresses().values() for own in given}
        if ip in local:
            return LOOPBACK
        if source is not None and ip_address(source) not in local:
            return None
        for table in (*(rule.table for rule in self.rules() if rule.source == source), MAIN):
            fits = [route for route in self._routes if route.table == table and ip in ip_network(route.destination)]
            if fits:
                return max(fits, key=lambda route: ip_network(route.destination).prefixlen).ifindex
        return None

    def _connect(self, ifindex: int, address: str) -> None:
        interface = ip_interface(address)
        source = str(interface.ip) if interface.version == 4 else None
        destination = str(interface.network)
        taken = {(route.destination, route.table, route.ifindex) for route in self._routes}
        if (destination, MAIN, ifindex) not in taken:
            self._routes.append(Route(destination, MAIN, ifindex, None, source))

    def _forget(self, which: Callable[[Route], bool]) -> None:
        self._routes = [route for route in self._routes if not which(route)]
