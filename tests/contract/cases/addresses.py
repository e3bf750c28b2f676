"""IP addresses, routing tables and rules: which objects come and go with an address, and with its link."""

import errno
from functools import partial

from agent.hardware.functions import ifindex_of, netdev_of
from agent.machine import Machine, Route, Rule
from tests.contract.asking import errno_of, soon

MAIN, TABLE, PRIORITY = 254, 479163, 24791
IP, IP6 = "198.51.100.7", "2001:db8:77::7"
ADDRESS, ADDRESS6 = f"{IP}/24", f"{IP6}/64"
NETWORK, NETWORK6 = "198.51.100.0/24", "2001:db8:77::/64"
CONF = "/proc/sys/net/ipv4/conf"


def _fresh(machine: Machine, pf: str) -> int:
    """The index of the PF's netdev, which is up and has no address, route or rule of these cases."""
    index = ifindex_of(machine.files, pf)
    machine.netlink.set_link(index, up=True)
    _clean(machine, index)
    return index


def _clean(machine: Machine, index: int) -> None:
    netlink = machine.netlink
    for address in netlink.addresses().get(index, ()):
        if address.startswith(("198.51.100.", "2001:db8:77:")):
            errno_of(partial(netlink.remove_address, index, address))
    for route in netlink.routes({TABLE}):
        netlink.remove_route(route)
    for rule in netlink.rules():
        if rule.table == TABLE:
            netlink.remove_rule(rule)


def _own(machine: Machine, index: int) -> set[str]:
    """The netdev's addresses, without the link-local ones that the kernel makes."""
    addresses = machine.netlink.addresses().get(index, ())
    return {address for address in addresses if not address.startswith("fe80")}


def _connected(machine: Machine, index: int) -> set[str]:
    """The networks of these cases that the main table reaches through the netdev."""
    return {
        route.destination
        for route in machine.netlink.routes({MAIN})
        if route.ifindex == index and route.destination in (NETWORK, NETWORK6)
    }


def an_address_is_local_and_connects_its_network(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    before = _own(machine, index)
    for address in (ADDRESS, ADDRESS6):
        machine.netlink.add_address(index, address)
        assert errno_of(partial(machine.netlink.add_address, index, address)) == errno.EEXIST
    assert _own(machine, index) - before == {ADDRESS, ADDRESS6}
    assert _connected(machine, index) == {NETWORK, NETWORK6}
    assert Route(NETWORK, MAIN, index, None, IP) in machine.netlink.routes({MAIN})
    assert machine.netlink.route_ifindex(IP) == 1
    assert machine.netlink.route_ifindex("198.51.100.99") == index
    for address in (ADDRESS, ADDRESS6):
        machine.netlink.remove_address(index, address)
        assert errno_of(partial(machine.netlink.remove_address, index, address)) == errno.EADDRNOTAVAIL
    assert _own(machine, index) == before
    assert _connected(machine, index) == set()


def an_ipv6_address_is_a_route_s_source_as_soon_as_it_is_there(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    machine.netlink.add_address(index, ADDRESS6)
    # A tentative one would be refused (EINVAL).
    machine.netlink.add_route(Route(NETWORK6, TABLE, index, None, IP6))
    assert machine.netlink.routes({TABLE}) == (Route(NETWORK6, TABLE, index, None, IP6),)
    _clean(machine, index)


def a_route_is_added_replaced_and_removed(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    machine.netlink.add_address(index, ADDRESS)
    plain, sourced = Route(NETWORK, TABLE, index), Route(NETWORK, TABLE, index, None, IP)
    default = Route("0.0.0.0/0", TABLE, index, "198.51.100.1", IP)
    machine.netlink.add_route(plain)
    machine.netlink.add_route(sourced)
    machine.netlink.add_route(default)
    assert set(machine.netlink.routes({TABLE})) == {sourced, default}
    assert index in machine.netlink.gateway_ifindexes()
    assert index in machine.netlink.gateway_ifindexes({MAIN})
    assert index not in machine.netlink.gateway_ifindexes({TABLE})
    foreign = Route(NETWORK, TABLE, index, None, "198.51.100.8")
    assert errno_of(lambda: machine.netlink.add_route(foreign)) == errno.EINVAL
    machine.netlink.remove_route(sourced)
    assert errno_of(lambda: machine.netlink.remove_route(sourced)) == errno.ESRCH
    assert machine.netlink.routes({TABLE}) == (default,)
    _clean(machine, index)


def a_rule_is_added_once_and_removed_once(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    before = set(machine.netlink.rules())
    for source in (IP, IP6):
        rule = Rule(source, TABLE, PRIORITY)
        machine.netlink.add_rule(rule)
        assert errno_of(partial(machine.netlink.add_rule, rule)) == errno.EEXIST
        assert set(machine.netlink.rules()) == before | {rule}
        machine.netlink.remove_rule(rule)
        assert errno_of(partial(machine.netlink.remove_rule, rule)) == errno.ENOENT
    _clean(machine, index)


def an_address_that_goes_leaves_the_routes_of_other_tables(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    machine.netlink.add_address(index, "198.51.100.200/25")
    for address, network, ip in ((ADDRESS, NETWORK, IP), (ADDRESS6, NETWORK6, IP6)):
        machine.netlink.add_address(index, address)
        machine.netlink.add_route(Route(network, TABLE, index, None, ip))
        machine.netlink.add_rule(Rule(ip, TABLE, PRIORITY))
        machine.netlink.remove_address(index, address)
    # For IPv6 the route determines the source address.
    assert set(machine.netlink.routes({TABLE})) == {
        Route(NETWORK, TABLE, index, None, IP),
        Route(NETWORK6, TABLE, index),
    }
    assert {rule.source for rule in machine.netlink.rules() if rule.table == TABLE} == {IP, IP6}
    _clean(machine, index)


def all_ipv4_routes_of_a_netdev_go_with_its_last_ipv4_address(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    assert not [address for address in _own(machine, index) if ":" not in address]
    machine.netlink.add_address(index, ADDRESS)
    machine.netlink.add_address(index, ADDRESS6)
    for network in (NETWORK, NETWORK6):
        machine.netlink.add_route(Route(network, TABLE, index))
    machine.netlink.remove_address(index, ADDRESS)
    assert machine.netlink.routes({TABLE}) == (Route(NETWORK6, TABLE, index),)
    _clean(machine, index)


def a_link_that_goes_down_loses_routes_and_ipv6_addresses(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    for address, network, ip in ((ADDRESS, NETWORK, IP), (ADDRESS6, NETWORK6, IP6)):
        machine.netlink.add_address(index, address)
        machine.netlink.add_route(Route(network, TABLE, index, None, ip))
        machine.netlink.add_rule(Rule(ip, TABLE, PRIORITY))
    machine.netlink.set_link(index, up=False)
    assert ADDRESS in _own(machine, index)
    assert ADDRESS6 not in _own(machine, index)
    assert _connected(machine, index) == set()
    assert machine.netlink.routes({TABLE}) == ()
    assert {rule.source for rule in machine.netlink.rules() if rule.table == TABLE} == {IP, IP6}
    refused = Route(NETWORK, TABLE, index, None, IP)
    assert errno_of(lambda: machine.netlink.add_route(refused)) == errno.ENETDOWN
    machine.netlink.set_link(index, up=True)
    soon(lambda: _connected(machine, index) or None, "connected route")
    assert _connected(machine, index) == {NETWORK}
    assert machine.netlink.routes({TABLE}) == ()
    _clean(machine, index)


def later_addresses_of_a_network_go_with_the_first_unless_they_are_promoted(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    paths = [f"{CONF}/{name}/promote_secondaries" for name in ("all", netdev_of(machine.files, pf))]
    before = [machine.files.read(path) for path in paths]
    for promoted, left in (("1", {"198.51.100.8/24"}), ("0", set())):
        for path in paths:
            machine.files.write(path, promoted)
        machine.netlink.add_address(index, ADDRESS)
        machine.netlink.add_address(index, "198.51.100.8/24")
        machine.netlink.remove_address(index, ADDRESS)
        assert {address for address in _own(machine, index) if address.startswith("198.51.100.")} == left
        _clean(machine, index)
    for path, text in zip(paths, before, strict=True):
        machine.files.write(path, text)


def the_arp_settings_of_a_netdev_are_files(machine: Machine, pf: str) -> None:
    for setting in ("arp_ignore", "arp_announce", "rp_filter"):
        path = f"{CONF}/{netdev_of(machine.files, pf)}/{setting}"
        before = machine.files.read(path)
        machine.files.write(path, "2")
        assert machine.files.read(path) == "2"
        machine.files.write(path, before)


def an_address_for_a_netdev_that_does_not_exist_is_enodev(machine: Machine, pf: str) -> None:
    assert errno_of(lambda: machine.netlink.add_address(99999, ADDRESS)) == errno.ENODEV
