"""The fake's netlink: netdevs and their names, what PFs grant VFs, addresses, routes and rules."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from agent.machine import Connection, Link, QueueIrq, QueueUser, Route, Rule
from tests.sim.tree import error

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

PCI = "/sys/bus/pci/devices"
NET = "/sys/class/net"


@frozen
class SimNetlink:
    """The protocol ``Netlink`` of the seam."""

    _kernel: Kernel

    def link(self, name: str) -> Link | None:
        called_so = (netdev for netdev in self._kernel.netdevs.values() if name in netdev.link.altnames)
        netdev = self._kernel.netdevs.get(name) or next(called_so, None)
        if netdev is None:
            return None
        self._kernel.enter(netdev.function)
        carrier = self._kernel.carriers.there(netdev)
        vfs = self._kernel.sriov.of(netdev.function)
        if not vfs and not netdev.link.vfs and netdev.link.carrier == carrier:
            return netdev.link
        return evolve(netdev.link, vfs=vfs, carrier=carrier)

    def set_link(
        self, ifindex: int, *, mtu: int | None = None, up: bool | None = None, txqueuelen: int | None = None
    ) -> None:
        given = f"mtu={mtu} up={up}" if txqueuelen is None else f"txqueuelen={txqueuelen}"
        netdev = self._kernel.written(ifindex, "set_link", given)
        if mtu is not None:
            infiniband = len(netdev.link.mac) > 17
            if mtu > min(netdev.link.max_mtu, 4092 if infiniband else mtu):
                raise error(errno.EINVAL, netdev.link.name)
            mtu = min(mtu, self._kernel.partition_mtu) if infiniband else mtu  # ipoib_change_mtu in ipoib_main.c
            netdev.link = evolve(netdev.link, mtu=mtu)
            self._kernel.carriers.reopened(netdev.function)
        if txqueuelen is not None:
            netdev.link = evolve(netdev.link, txqueuelen=txqueuelen)
        if up is not None and up != netdev.link.up:
            if not up and self._kernel.carriers.there(netdev):
                self._kernel.carriers.count_loss(netdev.function)
            netdev.link = evolve(netdev.link, up=up)
            self._kernel.napi.forget(ifindex)
            self._kernel.carriers.brought_up(netdev.link.name)
            self._kernel.ethtool.set_up(netdev)
            self._kernel.routing.set_up(ifindex, up)

    def queue_irqs(self, ifindex: int) -> dict[int, QueueIrq]:
        function = self._kernel.by_ifindex(ifindex).function
        numbers = sorted(map(int, self._kernel.tree.folders.get(f"{PCI}/{function}/msi_irqs", ())))
        linked = self._kernel.linked.get(function, ())
        return {number: irq for number, irq in zip(numbers, linked, strict=False) if irq is not None}

    def queue_users(self, ifindex: int) -> tuple[QueueUser, ...]:
        netdev = self._kernel.by_ifindex(ifindex)
        return self._kernel.queue_users.get(netdev.function, ()) if netdev.link.up else ()

    def napis(self, ifindex: int) -> Mapping[int, Mapping[str, int]]:
        return self._kernel.napi.of(ifindex)

    def set_napi(self, napi: int, given: Mapping[str, int]) -> None:
        self._kernel.napi.set(napi, given)

    def add_altname(self, ifindex: int, name: str) -> None:
        netdev = self._kernel.written(ifindex, "altname", f"altname={name}")
        if self._kernel.named(name):
            raise error(errno.EEXIST, name)
        netdev.link = evolve(netdev.link, altnames=(*netdev.link.altnames, name))

    def remove_altname(self, ifindex: int, name: str) -> None:
        netdev = self._kernel.written(ifindex, "altname", f"altname={name} away")
        if not self._kernel.named(name):
            raise error(errno.ENOENT, name)
        if name not in netdev.link.altnames:
            raise error(errno.EINVAL, name)
        left = tuple(altname for altname in netdev.link.altnames if altname != name)
        netdev.link = evolve(netdev.link, altnames=left)

    def rename(self, ifindex: int, name: str) -> None:
        netdev = self._kernel.written(ifindex, "rename", f"name={name}")
        old = netdev.link.name
        altnames = tuple(altname for altname in netdev.link.altnames if altname != name)
        if netdev.link.up and not self._kernel.renames_running:
            raise error(errno.EBUSY, name)
        if self._kernel.named(name) and altnames == netdev.link.altnames:
            raise error(errno.EEXIST, name)
        del self._kernel.netdevs[old]
        self._kernel.tree.remove(f"{NET}/{old}")
        self._kernel.tree.remove(f"{PCI}/{netdev.function}/net/{old}")
        netdev.link = evolve(netdev.link, name=name, altnames=altnames)
        self._kernel.appear(netdev)
        self._kernel.routing.renamed(old, name)

    def set_vf(self, ifindex: int, index: int, **given: Any) -> None:
        netdev = self._kernel.written(ifindex, "set_vf", f"{index} {given}")
        self._kernel.sriov.set(netdev.function, netdev.link, index, **given)

    def uppers_elsewhere(self) -> dict[int, tuple[str, ...]]:
        netdevs = self._kernel.netdevs
        return {netdevs[below].link.ifindex: names for below, names in self._kernel.uppers_elsewhere.items()}

    def gateway_ifindexes(self, without: Collection[int] = ()) -> frozenset[int]:
        netdevs = self._kernel.netdevs
        routed = {netdevs[name].link.ifindex for name in self._kernel.routed if name in netdevs}
        return frozenset(routed | self._kernel.routing.gateways(without))

    def route_ifindex(self, address: str, source: str | None = None) -> int | None:
        netdev = self._kernel.netdevs.get(self._kernel.servers.get(address, ""))
        return netdev.link.ifindex if netdev else self._kernel.routing.towards(address, source)

    def connections(self) -> tuple[Connection, ...]:
        return tuple(connection for connection, state in self._kernel.sockets if state == "ESTABLISHED")

    def addresses(self, duplicate: bool = False) -> dict[int, tuple[str, ...]]:
        netdevs, ip, routing = self._kernel.netdevs, self._kernel.ip, self._kernel.routing
        by_ifindex: dict[int, tuple[str, ...]] = {}
        for ifindex, addresses in (
            *((netdev.link.ifindex, ip.get(name, ())) for name, netdev in netdevs.items()),
            *routing.assigned.items(),
        ):
            if those := tuple(each for each in addresses if (each in routing.duplicates) is duplicate):
                by_ifindex[ifindex] = (*by_ifindex.get(ifindex, ()), *those)
        return by_ifindex

    def add_address(self, ifindex: int, address: str) -> None:
        self._kernel.routing.add_address(ifindex, address)

    def remove_address(self, ifindex: int, address: str) -> None:
        self._kernel.routing.remove_address(ifindex, address)

    def routes(self, tables: Collection[int]) -> tuple[Route, ...]:
        return self._kernel.routing.routes(tables)

    def add_route(self, route: Route) -> None:
        self._kernel.routing.add_route(route)

    def remove_route(self, route: Route) -> None:
        self._kernel.routing.remove_route(route)

    def rules(self) -> tuple[Rule, ...]:
        return self._kernel.routing.rules()

    def add_rule(self, rule: Rule) -> None:
        self._kernel.routing.add_rule(rule)

    def remove_rule(self, rule: Rule) -> None:
        self._kernel.routing.remove_rule(rule)
