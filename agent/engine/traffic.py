"""What netdevs carry for the host: routes through a gateway, established TCP connections, mounts of network file systems.

The pods that share the host's network namespace are part of the host. What the host only forwards for other pods is seen by its
routes. Storage over TCP is a connection, also the kernel's own (NFS, NVMe, iSCSI, Ceph, SMB, BeeGFS).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property

from attrs import define, field

from agent.hardware.functions import NET, ifindex
from agent.hardware.sysfs import names_in, read_or
from agent.machine import Connection, Files, Machine
from agent.spec.addresses import TABLES

VIRTUAL = "/sys/devices/virtual/net"

# nfs and ceph have their servers in the options or in the source (`10.0.0.1:/export`, `10.0.0.1:6789,10.0.0.2:6789:/`).
# With a name as the source, the kernel adds the server's address to the options (fs/nfs/super.c, fs/smb/client/cifsfs.c).
SERVER_OPTIONS = frozenset({"addr", "mountaddr", "ip"})
ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])|\[[0-9a-f:]+\]")
# The kernel shows a file system in user space as fuse.NAME (fs/fuse/inode.c), and no address if it was mounted by a name.
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "ceph", "cifs", "smb3", "lustre", "9p", "fuse.glusterfs"})


def traffic(machine: Machine, node_name: str, netdevs: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """What these netdevs (names by ifindex) carry, each with the netdev's ifindex."""
    if not netdevs:
        return
    addresses = {
        index: {address.partition("/")[0] for address in given} for index, given in machine.netlink.addresses().items()
    }
    # The agent's own routes are in its own tables.
    for index in sorted(machine.netlink.gateway_ifindexes(TABLES) & netdevs.keys()):
        yield index, f"a route through {netdevs[index]}"
    for index, name in netdevs.items():
        if node_name in addresses.get(index, ()):
            yield index, f"the node's address on {name}"
    yield from _connections(machine, netdevs, addresses)
    yield from _mounts(machine, netdevs)


def _connections(
    machine: Machine, netdevs: Mapping[int, str], addresses: Mapping[int, Collection[str]]
) -> Iterator[tuple[int, str]]:
    """Who is connected through a netdev: processes, and the kernel itself."""
    own = {address for given in addresses.values() for address in given}
    carriers = _Carriers(machine, netdevs, addresses)
    listed = machine.netlink.connections()
    servers = _servers_of_services(machine.files) if any(each.peer in own for each in listed) else {}
    carried = [
        (index, each)
        for each in listed
        if (peer := servers.get((each.local, each.local_port, each.peer, each.peer_port), each.peer)) not in own
        for index in carriers.of(each, peer)
    ]
    holders = machine.processes.holders(frozenset(each.socket for _, each in carried)) if carried else {}
    peers: dict[tuple[int, str], set[str]] = {}
    for index, each in carried:
        # The kernel's own have none.
        holder = next((f"{name}, connected" for name in holders.get(each.socket, ())), "a connection")
        peer = f"[{each.peer}]" if ":" in each.peer else each.peer
        peers.setdefault((index, holder), set()).add(f"{peer}:{each.peer_port}")
    for (index, holder), of_holder in sorted(peers.items()):
        yield index, with_a_peer(holder, of_holder)


@define
class _Carriers:
    """Finds the netdevs that carry a connection: the one that it is sent by, and the one that has its address.

    They differ if two NICs are on one network. What a netdev sends that has no hardware below it (a veth) is for a pod here.
    """

    _machine: Machine
    _netdevs: Mapping[int, str]
    _addresses: Mapping[int, Collection[str]]
    _routes: dict[tuple[str, str], int | None] = field(factory=dict, init=False)

    def of(self, connection: Connection, peer: str) -> list[int]:
        """The asked netdevs that a connection uses, by ifindex. ``peer``: the address to which its packets go."""
        addressed = {index for index in self._netdevs if connection.local in self._addresses.get(index, ())}
        if connection.ifindex:
            # It may be that of a VRF.
            return sorted(addressed | {connection.ifindex} & self._netdevs.keys())
        ends = (peer, connection.local)
        if ends not in self._routes:
            self._routes[ends] = self._machine.netlink.route_ifindex(*ends)
        by = self._routes[ends]
        if by is not None and by in self._netdevs:
            return sorted({by, *addressed})
        return [] if addressed and by in self._without_hardware else sorted(addressed)

    @cached_property
    def _without_hardware(self) -> frozenset[int | None]:
        files = self._machine.files
        virtual = frozenset(names_in(files, VIRTUAL))

        def is_without(name: str) -> bool:
            below = (each for each in names_in(files, f"{NET}/{name}") if each.startswith("lower_"))
            return name in virtual and all(is_without(each.removeprefix("lower_")) for each in below)

        return frozenset(ifindex(files, name) for name in virtual if is_without(name))


def _servers_of_services(files: Files) -> dict[tuple[str, int, str, int], str]:
    """Where IPVS forwards the connections to services, by the addresses and ports of both ends.

    kube-proxy gives the address of each service to a dummy netdev of the node (kube-ipvs0). So a connection to a service seems
    to end here, although its server may be anywhere. /proc/net/ip_vs_conn has IPv4 addresses and ports in hexadecimal digits
    (ip_vs_conn_seq_show, net/netfilter/ipvs/ip_vs_conn.c; not run).
    """
    servers = {}
    for line in read_or(files, "/proc/net/ip_vs_conn", "").split("\n"):
        match line.split():
            case ["TCP", local, local_port, service, service_port, server, *_]:
                with suppress(ValueError):
                    ends = (_ip(local), int(local_port, 16), _ip(service), int(service_port, 16))
                    servers[ends] = _ip(server)
    return servers


def _ip(text: str) -> str:
    return str(ipaddress.ip_address(text if ":" in text else int(text, 16)))


def with_a_peer(connected: str, peers: Iterable[str]) -> str:
    """Who is connected, with one of the peers, if any is known: there may be thousands."""
    known = sorted(peers)
    return f"{connected} with {known[0]}{' and others' if known[1:] else ''}" if known else connected


def _mounts(machine: Machine, netdevs: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Mounts whose server is reached through a netdev.

    An idle one need not have a connection: the kernel's client of NFS closes it after five minutes (XS_IDLE_DISC_TO,
    net/sunrpc/xprtsock.c).
    """
    for server, mounts in sorted(_servers(machine.files).items()):
        index = machine.netlink.route_ifindex(server)
        if index is not None and index in netdevs:
            yield from ((index, f"{mount} of {server}") for mount in sorted(mounts))


def _servers(files: Files) -> dict[str, set[str]]:
    servers: dict[str, set[str]] = {}
    # The source of a mount may be any text. The kernel escapes the blanks, tabs and line ends in it (mangle(),
    # fs/proc_namespace.c), but no other white space, at which str.split() and str.splitlines() would split it.
    for line in read_or(files, "/proc/1/mounts", "").split("\n"):
        match line.split(" "):
            case [source, point, kind, options, *_] if kind in NETWORK_FILE_SYSTEMS:
                for server in (*_found(f"{source} {options}"), *_in_options(options)):
                    servers.setdefault(server, set()).add(f"{kind} on {point}")
    return servers


def _in_options(options: str) -> Iterator[str]:
    for option in options.split(","):
        name, _, value = option.partition("=")
        if name in SERVER_OPTIONS:
            # A link-local address has the netdev behind it. An IPv6 address has no brackets.
            address = value.partition("%")[0]
            yield from _found(f"[{address}]" if ":" in address else address)


def _found(text: str) -> Iterator[str]:
    for match in ADDRESS.findall(text):
        with suppress(ValueError):
            yield str(ipaddress.ip_address(match.strip("[]")))
