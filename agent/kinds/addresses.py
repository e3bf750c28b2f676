"""The IP addresses of PFs' netdevs, and what each rail needs to carry its own traffic: a routing table, a rule, ARP settings.

A rail's table has the network of its address, and a default route if the spec gives a gateway. A rule for each address selects
the table, so that packets from it leave by that netdev, also if several rails are on one network. The kernel makes a RoCE GID
from each address.

A netdev that a network manager configures is left alone, and so are addresses that others added. What the agent added is
removed when it leaves the spec (these are originals). A rule names no netdev: it belongs to its rail, whichever PF that has.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Mapping
from ipaddress import ip_interface

from attrs import evolve, field, frozen

from agent.hardware.bonds import vrf
from agent.hardware.functions import ifindex_of, ifindexes, netdev, netdev_of, pci_of
from agent.hardware.network_managers import Claim, claim
from agent.hardware.sysfs import read_or, whole
from agent.kinds import ANY_VALUE, Reading, links
from agent.kinds.host import SYSCTLS
from agent.machine import Files, Machine, Netlink, Route, Rule
from agent.report.records import HOST, Change, Disruption
from agent.spec.addresses import ARP, FIRST_TABLE, PRIORITY, TABLES, Assigned
from agent.spec.nic import Nic
from agent.spec.node import NodeSpec
from agent.spec.sysctl_names import canonical, path
from agent.state.scope import Scope, pfs_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

NAME = "addresses"
AFTER = ("vf_links",)
# The names as in `comm`, which has at most 15 characters.
OTHER_WRITERS = ("NetworkManager", "systemd-networkd", "dhclient", "dhcpcd", "ifup")

# Each address, route and rule is a field of its own, named in the form of ip(8). Its value is one of these.
PRESENT, ABSENT = "present", "absent"

UNDECIDED = 5.0
"""Grace period in seconds of a change, while it is not known whether a network manager configures the netdev."""

CONF = "/proc/sys/net/ipv4/conf"
PROMOTE = "promote_secondaries"

ANOTHER_LENGTH = "with another prefix length"


@frozen
class Addressing:
    """A PF's netdev: its addresses, the routes of its table and the rules that select that, as fields; and its ARP settings.

    ``elsewhere``: the wanted addresses that others have given to netdevs, with the names of those. ``duplicates``: those
    that it has and that the kernel does not use, since another node has them, with their prefix length.
    ``claim``: that of a network manager. ``vrf``: the VRF that it is in.
    """

    name: str
    present: frozenset[str]
    settings: Mapping[str, str]
    elsewhere: Mapping[str, str] = field(factory=dict)
    duplicates: Mapping[str, str] = field(factory=dict)
    claim: Claim | None = None
    vrf: str | None = None


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Addressing | None]:
    """The netdevs of the PFs for which the spec gives addresses; None while there is none that can be configured."""
    pfs = [address for address in pfs_in_scope(want, scope) if want.nics[address].nic.addresses]
    if not pfs:
        return {}
    netlink = machine.netlink
    addresses, routes, rules = netlink.addresses(), netlink.routes(TABLES), netlink.rules()
    foreign = {
        ifindex: tuple(each for each in given if not _is_ours(each, ifindex, routes, rules))
        for ifindex, given in addresses.items()
    }
    netdevs: dict[str, Addressing | None] = {}
    for address in pfs:
        status = links.status(machine, address)
        if status.link is None or not status.ready:
            netdevs[address] = None
            continue
        table, ifindex = _table(want.nics[address]), status.link.ifindex
        fields = [f"address {each}" for each in addresses.get(ifindex, ())]
        fields += [_route_field(route) for route in routes if (route.table, route.ifindex) == (table, ifindex)]
        fields += [_rule_field(rule) for rule in rules if (rule.table, rule.priority) == (table, PRIORITY)]
        netdevs[address] = Addressing(
            status.link.name,
            frozenset(fields),
            _settings(machine, status.link.name),
            _elsewhere(machine, want, address, ifindex, foreign),
            _duplicates(netlink, want, address, ifindex, frozenset(fields)),
            claim(machine.files, status.link),
            vrf(machine.files, status.link),
        )
    return netdevs


def _table(nic: WantedNic) -> int:
    return FIRST_TABLE + (nic.nic.rail or 0)


def _settings(machine: Machine, name: str) -> Mapping[str, str]:
    return {setting: read_or(machine.files, f"{CONF}/{name}/{setting}", "") for setting in ARP}


def _is_ours(address: str, ifindex: int, routes: Collection[Route], rules: Collection[Rule]) -> bool:
    """Whether the agent has given a netdev an address: the address has a rail's rule, and the netdev the routes of that rail.

    So it is also known after the rail has moved to another netdev in the spec.
    """
    ip, network = _ip(address), str(ip_interface(address).network)
    tables = {rule.table for rule in rules if (rule.source, rule.priority) == (ip, PRIORITY)}
    return any((each.ifindex, each.destination) == (ifindex, network) and each.table in tables for each in routes)


def _elsewhere(
    machine: Machine, want: Wanted, address: str, ifindex: int, foreign: Mapping[int, tuple[str, ...]]
) -> Mapping[str, str]:
    others = {_ip(each): other for other, given in foreign.items() if other != ifindex for each in given}
    shared = others.keys() & {_ip_of(name) for name in wanted(want, address)}
    if not shared:
        return {}
    names = {index: name for name, index in ifindexes(machine.files).items()}
    # While addresses move between rails, another rail may still have it; the agent removes it there.
    rails = {netdev(machine.files, pf) for pf, nic in want.nics.items() if nic.nic.addresses}
    elsewhere = {ip: names.get(others[ip], f"netdev {others[ip]}") for ip in sorted(shared)}
    return {ip: name for ip, name in elsewhere.items() if name not in rails}


def _duplicates(
    netlink: Netlink, want: Wanted, address: str, ifindex: int, present: frozenset[str]
) -> Mapping[str, str]:
    """Wanted addresses that are duplicates. The kernel is asked only if a wanted IPv6 address is not among those that work."""
    absent = {_ip_of(name) for name in wanted(want, address) if name.startswith("address ") and name not in present}
    if not any(":" in ip for ip in absent):
        return {}
    return {_ip(each): each for each in netlink.addresses(duplicate=True).get(ifindex, ()) if _ip(each) in absent}


def _ip(address: str) -> str:
    return str(ip_interface(address).ip)


def _ip_of(name: str) -> str:
    """The address to which a field belongs; empty for an ARP setting."""
    item = None if name in ARP else _item(name)
    if isinstance(item, str):
        return _ip(item)
    return (item.source or "") if item is not None else ""


def wanted(want: Wanted, address: str) -> dict[str, str]:
    """The value that the spec gives each field of a PF's netdev, in the order in which they are set."""
    nic = want.nics[address]
    table = _table(nic)
    assigned = _assigned(want.spec, nic.nic, nic.nic.rail or 0)
    fields = dict(ARP) if any(each.interface.version == 4 for each in assigned) else {}
    # The routes come after all addresses: by them the agent knows an address of its own on the netdev that had them before.
    fields |= {f"address {each.interface}": PRESENT for each in assigned}
    connected = set()
    for each in assigned:
        ip, network = str(each.interface.ip), each.interface.network
        if network not in connected:
            # A table has one route to a network. Its source is the first of the network's addresses.
            fields[_route_field(Route(str(network), table, 0, None, ip))] = PRESENT
        connected.add(network)
        if each.gateway is not None:
            everything = "0.0.0.0/0" if network.version == 4 else "::/0"
            fields[_route_field(Route(everything, table, 0, str(each.gateway), ip))] = PRESENT
        fields[_rule_field(Rule(ip, table, PRIORITY))] = PRESENT
    return fields


def _assigned(spec: NodeSpec, nic: Nic, rail: int) -> list[Assigned]:
    return [each.assigned(rail, spec.node_number or 0) for each in nic.addresses]


def _rules(spec: NodeSpec) -> frozenset[str]:
    """The rules of all rails of a spec, also of those whose NIC is missing."""
    return frozenset(
        _rule_field(Rule(str(each.interface.ip), FIRST_TABLE + rail, PRIORITY))
        for nic in spec.nics
        for rail in nic.rails()
        for each in _assigned(spec, nic, rail)
    )


def _route_field(route: Route) -> str:
    optional = (("via", route.gateway), ("src", route.source))
    words = [word for name, value in optional if value is not None for word in (name, value)]
    return " ".join(["route", route.destination, *words, "table", str(route.table)])


def _rule_field(rule: Rule) -> str:
    return f"from {rule.source} lookup {rule.table}"


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """What is missing, and the ARP settings that differ."""
    changes = []
    for address in sorted(want.nics):
        netdev: Addressing | None = have[NAME].get(address)
        if netdev is not None:
            changes += list(_plan_netdev(want, address, netdev))
    return changes


def _plan_netdev(want: Wanted, address: str, netdev: Addressing) -> Iterator[Change]:
    nic = want.nics[address].nic.name
    for name, after in wanted(want, address).items():
        if netdev.vrf is not None and _is_the_vrf_s(name):
            continue
        before = netdev.settings[name] if name in ARP else PRESENT if name in netdev.present else ABSENT
        change = Change(NAME, address, name, before, after)
        own = canonical(f"net/ipv4/conf/{netdev.name}/{name}")
        if own in want.spec.sysctls:
            blocker = f"sysctls[{own!r}] and the addresses of NIC {nic} set the same"
            yield evolve(change, blocker=blocker, remedy="keep one of them in the spec")
        elif before != after and netdev.claim is not None:
            grace = UNDECIDED if netdev.claim.undecided else 0.0
            yield evolve(change, blocker=netdev.claim.who, remedy=netdev.claim.remedy, grace_period=grace)
        elif before != after:
            blocker, remedy = _blocker(netdev, name)
            yield evolve(change, blocker=blocker, remedy=remedy)


def _blocker(netdev: Addressing, name: str) -> tuple[str, str]:
    ip = _ip_of(name)
    if netdev.vrf is not None and name.startswith("route "):
        remedy = (
            f"add the route to {netdev.vrf} with the program that makes {netdev.vrf}, and take gateway out of the spec"
        )
        return f"{netdev.name} is in the VRF {netdev.vrf}, which has its routes", remedy
    if _has_another_length(netdev, name):
        return f"{netdev.name} has {ip} {ANOTHER_LENGTH}", "remove that"
    if (duplicate := netdev.duplicates.get(ip)) is not None:
        remedy = f"give one of the two another address, then: ip address del {duplicate} dev {netdev.name}"
        return f"another node has {ip}, so the kernel does not use it on {netdev.name}", remedy
    if (other := netdev.elsewhere.get(ip)) is not None:
        return f"{other} has the address {ip}", f"take it from {other} or from the spec"
    return "", ""


def _is_the_vrf_s(name: str) -> bool:
    """Whether a VRF does for its members what this field does: it has a table of its own, and the rule that selects that.

    The kernel puts the networks of a member's addresses there, and refuses a route of another table from such an address
    (fib_valid_prefsrc, net/ipv4/fib_semantics.c). A route through a gateway is none of these.
    """
    item = None if name in ARP else _item(name)
    return isinstance(item, Rule) or (isinstance(item, Route) and item.gateway is None)


def _has_another_length(netdev: Addressing, name: str) -> bool:
    """Whether the netdev has an IPv6 address with another prefix length. It cannot have one with both."""
    kind, _, address = name.partition(" ")
    if kind != "address" or ":" not in address:
        return False
    return any(_ip(address) == _ip(each) for of, _, each in (e.partition(" ") for e in netdev.present) if of == kind)


def lifted_by(change: Change) -> str:
    """The removal of an address lifts what blocks the same address with another prefix length."""
    return NAME if change.blocker.endswith(ANOTHER_LENGTH) else ""


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """One field as it is now. To remove an address disturbs those who use the NIC."""
    if kept.field not in ARP and isinstance(rule := _item(kept.field), Rule):
        now = PRESENT if rule in machine.netlink.rules() else ABSENT
        # One that a rail has is not restored, whatever has become of the NIC that the rail had before.
        return None if kept.field in _rules(want.spec) else Reading(now)
    if kept.target not in want.nics or kept.field in wanted(want, kept.target):
        return None
    if sysctl(machine.files, kept.target, kept.field) in want.spec.sysctls:
        return None
    link_status = links.status(machine, pci_of(machine.files, kept.target))
    if link_status.link is None or not link_status.ready:
        return None
    if kept.field in ARP:
        return Reading(_settings(machine, link_status.link.name)[kept.field])
    now = PRESENT if _is_present(machine.netlink, link_status.link.ifindex, kept.field) else ABSENT
    return Reading(now, disruption=Disruption.LINK_FLAP)


def sysctl(files: Files, address: str, name: str) -> str:
    """The sysctl that sets the same value as a field of this kind; empty if there is none."""
    link = netdev(files, address) if name in ARP else None
    return canonical(f"net/ipv4/conf/{link}/{name}") if link else ""


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The field; a rule as the host's, and an ARP setting as its sysctl if it was noted as that before."""
    if change.field not in ARP and isinstance(_item(change.field), Rule):
        return [evolve(change, target=HOST)]
    name = sysctl(machine.files, change.target, change.field)
    if (SYSCTLS, HOST, name) in known:
        return [Change(SYSCTLS, HOST, name, machine.files.read(path(name)), ANY_VALUE)]
    return [change]


def transients(machine: Machine, want: Wanted, change: Change) -> list[Change]:
    """While an IPv4 address is removed, promote_secondaries is on."""
    if change.after == PRESENT or not change.field.startswith("address ") or ":" in change.field:
        return []
    name = canonical(f"net/ipv4/conf/{netdev_of(machine.files, change.target)}/{PROMOTE}")
    return [
        Change(SYSCTLS, HOST, name, before, "1")
        for before in [read_or(machine.files, path(name), "1")]
        if before == "0"
    ]


def _is_present(netlink: Netlink, ifindex: int, name: str) -> bool:
    item = _item(name, ifindex)
    if isinstance(item, Route):
        return bool(_routes(netlink, item))
    return item in netlink.addresses().get(ifindex, ())


def _routes(netlink: Netlink, route: Route) -> list[Route]:
    """A route as the kernel has it now: it takes the source from an IPv6 route when the address goes."""
    return [each for each in netlink.routes({route.table}) if each in (route, evolve(route, source=None))]


def _item(name: str, ifindex: int = 0) -> str | Route | Rule:
    """The address, route or rule that a field names.

    :raises OSError: it names none of them. Another version of the agent may have noted an original under such a field.
    """
    words = name.split(" ")
    values = dict(zip(words[::2], words[1::2], strict=False))
    if "route" in values and (table := whole(values.get("table", ""))) is not None:
        return Route(values["route"], table, ifindex, values.get("via"), values.get("src"))
    if "from" in values and (table := whole(values.get("lookup", ""))) is not None:
        return Rule(values["from"], table, PRIORITY)
    if "address" in values:
        return values["address"]
    raise OSError(errno.EINVAL, f"{name!r} is no address, route or rule")


def apply(machine: Machine, change: Change) -> None:
    """Set one setting, or add or remove one address, route or rule."""
    netlink, add = machine.netlink, change.after == PRESENT
    if change.field in ARP:
        machine.files.write(f"{CONF}/{netdev_of(machine.files, change.target)}/{change.field}", str(change.after))
    elif isinstance(rule := _item(change.field), Rule):
        (netlink.add_rule if add else netlink.remove_rule)(rule)
    elif isinstance(route := _item(change.field, ifindex_of(machine.files, change.target)), Route):
        for each in [route] if add else _routes(netlink, route):
            (netlink.add_route if add else netlink.remove_route)(each)
    else:
        (_add_address if add else _remove_address)(machine, change.target, str(route))


def _add_address(machine: Machine, target: str, address: str) -> None:
    try:
        machine.netlink.add_address(ifindex_of(machine.files, target), address)
    except OSError as error:
        causes = {
            errno.EEXIST: f"{netdev_of(machine.files, target)} has {_ip(address)} {ANOTHER_LENGTH}; remove that",
            errno.EACCES: "IPv6 is disabled (net.ipv6.conf.*.disable_ipv6)",
        }
        raise OSError(error.errno, causes.get(error.errno or 0, str(error.strerror))) from error


def _remove_address(machine: Machine, target: str, address: str) -> None:
    """Remove an address. Without promote_secondaries the kernel removes an IPv4 one with later ones of the same network."""
    ifindex = ifindex_of(machine.files, target)
    promotes = f"{CONF}/{netdev_of(machine.files, target)}/{PROMOTE}"
    before = "1" if ":" in address else read_or(machine.files, promotes, "1")
    if before == "0":
        machine.files.write(promotes, "1")
    try:
        machine.netlink.remove_address(ifindex, address)
    finally:
        if before == "0":
            machine.files.write(promotes, before)
