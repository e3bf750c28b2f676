"""Finds keys of a spec that contradict each other. Each message names both keys.

Conflicts that show only on the machine (two NICs that select one function, an address that another function has) are found by
:func:`agent.state.wanted.resolve`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from agent.spec.addresses import ARP, LEAST_MTU_OF_IPV6, RAIL
from agent.spec.nic import Nic, Offloads, VfAttributes
from agent.spec.selector import Selector, name_of
from agent.spec.sysctl_names import canonical

MOST_NAMES = 1 << 19
"""The most names that the NICs of a node and their netdevs may get. With ``select.each`` a short spec gives very many."""

# Two features, and which state of the first one turns the second one off (netdev_fix_features, net/core/dev.c).
_EXCLUDING = (
    ("rx-gro-hw", True, "rx-lro"),
    ("rx-fcs", True, "rx-lro"),
    ("rx-fcs", True, "rx-gro-hw"),
    ("rx-checksum", False, "rx-gro-hw"),
    ("tx-scatter-gather", False, "tx-tcp-segmentation"),
    ("tx-scatter-gather", False, "tx-tcp6-segmentation"),
    ("tx-scatter-gather", False, "tx-tcp-ecn-segmentation"),
    ("tx-scatter-gather", False, "tx-tcp-mangleid-segmentation"),
    ("tx-scatter-gather", False, "tx-generic-segmentation"),
    ("tx-tcp-segmentation", False, "tx-tcp-mangleid-segmentation"),
)

# Keys that set a VF's netdev. If the defaults have one and a group binds its VFs to vfio-pci, that is no conflict: a group
# cannot unset a key, and the other VFs have netdevs.
_OF_NETDEVS = ("channels", "rings", "coalescing", "offloads", "napi", "irqs_on_pod_cpus")

# Module parameters of drivers that create VFs when the module is loaded.
_VF_PARAMETERS = ("max_vfs", "num_vfs")


def nic_conflicts(nics: tuple[Nic, ...], pin: bool) -> Iterator[str]:
    """Conflicts between NICs, and between the keys of each. ``pin``: irqs.pin."""
    keys = {f"nics[{index}]": nic for index, nic in enumerate(nics)}
    names = sum(nic.select.most * (1 + len(nic.altnames)) for nic in nics)
    if names > MOST_NAMES:
        yield f"nics: they and their netdevs may get {names} names; give at most {MOST_NAMES} (select.max, altnames)"
        return
    for one, other, value in _twice(_names(keys)):
        yield f"{one} and {other}: the name {value} is given twice; names are unique on a node"
    for one, other, value in _twice(_netdev_names(keys)):
        yield f"{one} and {other}: the netdev name {value} is given twice; names are unique on a node"
    yield from _unknown_in_without(keys)
    yield from _one_function(keys)
    yield from _one_address(keys)
    for key, nic in keys.items():
        yield from _within(key, nic, pin)


def _twice(given: Iterable[tuple[str, Hashable]]) -> Iterator[tuple[str, str, Hashable]]:
    """Pairs of keys that give the same value, and that value. If several keys give it, the first is paired with each other."""
    seen: dict[Hashable, str] = {}
    pairs: set[tuple[str, str]] = set()
    for key, value in given:
        # A key may be paired with itself: its entry may stand for several NICs.
        if value not in seen:
            seen[value] = key
        elif (pair := (seen[value], key)) not in pairs:
            pairs.add(pair)
            yield *pair, value


def _each_name(nic: Nic, name: str) -> Iterator[str]:
    """The names that NICs may get from an entry's name: one, or with ``select.each`` one for each possible number."""
    if not nic.select.each:
        yield name
    else:
        yield from (name_of(name, index) for index in range(nic.select.most))


def _names(keys: Mapping[str, Nic]) -> Iterator[tuple[str, str]]:
    for key, nic in keys.items():
        yield from ((f"{key}.name", name) for name in _each_name(nic, nic.name))


def _unknown_in_without(keys: Mapping[str, Nic]) -> Iterator[str]:
    """Names in ``select.without`` that are not the name of an entry without ``each``."""
    single = {nic.name for nic in keys.values() if not nic.select.each}
    for key, nic in keys.items():
        for name in nic.select.without:
            if name not in single:
                yield f"{key}.select.without: no entry without each is called {name}; give the names of such entries"


def _netdev_names(keys: Mapping[str, Nic]) -> Iterator[tuple[str, str]]:
    """The names that netdevs have or get. A NIC may be selected by one of its own altnames."""
    for key, nic in keys.items():
        for index, name in enumerate(nic.altnames):
            yield from ((f"{key}.altnames[{index}]", each) for each in _each_name(nic, name))
        if nic.select.netdev is not None and nic.select.netdev not in nic.altnames:
            yield f"{key}.select.netdev", nic.select.netdev


def _one_function(keys: Mapping[str, Nic]) -> Iterator[str]:
    remedy = "an entry is one physical function: make them one, or select another"
    for name in ("pci", "mac"):
        given = ((f"{key}.select.{name}", getattr(nic.select, name)) for key, nic in keys.items())
        for one, other, value in _twice((key, value) for key, value in given if value is not None):
            yield f"{one} and {other} are both {value}; {remedy}"
    # NICs with one of these keys were compared above.
    selectors = ((key, nic.select) for key, nic in keys.items())
    rest = {key: select.of_one(None) for key, select in selectors if select.pci is None and select.mac is None}
    for one, other, select in _twice((f"{key}.select", select) for key, select in rest.items() if not select.netdev):
        assert isinstance(select, Selector)  # noqa: S101  what went in
        yield f"{one} and {other} both mean {select}; {remedy}"


def _one_address(keys: Mapping[str, Nic]) -> Iterator[str]:
    """MACs and GUIDs that two functions get. The node GUID and the port GUID of one VF may be equal."""
    remedy = "an address belongs to one function: give each its own"
    groups = {
        f"{key}.vfs.groups[{index}]": group
        for key, nic in keys.items()
        if nic.vfs is not None
        for index, group in enumerate(nic.vfs.groups)
    }
    # Two NICs that are selected by the same address were already reported.
    selected = {nic.select.mac: f"{key}.select.mac" for key, nic in keys.items() if nic.select.mac}
    own = ((f"{key}.mac", group.mac) for key, group in groups.items() if group.mac)
    for one, other, value in _twice([*((key, mac) for mac, key in selected.items()), *own]):
        yield f"{one} and {other} are both {value}; {remedy}"
    guids: dict[str, tuple[str, str]] = {}
    for key, group in groups.items():
        for name in ("node_guid", "port_guid"):
            value = getattr(group, name)
            owner, place = guids.setdefault(value, (key, name)) if value else (key, name)
            if owner != key:
                yield f"{owner}.{place} and {key}.{name} are both {value}; {remedy}"


def _within(key: str, nic: Nic, pin: bool) -> Iterator[str]:
    rdma = nic.rdma
    if (
        nic.roce is not None
        and rdma is not None
        and "InfiniBand" in (rdma.link_layer, rdma.gid_type and _layer(rdma.gid_type))
    ):
        yield f"{key}.roce and {key}.rdma: RoCE is Ethernet's, and rdma asks for InfiniBand; keep one"
    on_ethernet = rdma is not None and "Ethernet" in (rdma.link_layer, rdma.gid_type and _layer(rdma.gid_type))
    if nic.state == "down" and rdma is not None and rdma.pf and on_ethernet:
        yield f"{key}.rdma and {key}.state: the RoCE port of a netdev that is down is never ACTIVE; keep one"
    yield from _among_offloads(key, nic.offloads)
    if nic.vfs is None:
        return
    places: dict[str, VfAttributes] = {
        f"{key}.vfs.defaults": nic.vfs.defaults,
        **{f"{key}.vfs.groups[{index}]": group for index, group in enumerate(nic.vfs.groups)},
    }
    for place, vf in places.items():
        yield from _among_offloads(place, vf.offloads)
        if vf.irqs_on_pod_cpus and not pin:
            yield f"irqs.pin false and {place}.irqs_on_pod_cpus: the agent places no interrupt then; keep one"
        driver = place if vf.driver is not None else f"{key}.vfs.defaults"
        if (vf.driver or nic.vfs.defaults.driver) == "vfio-pci":
            for name in _OF_NETDEVS:
                if getattr(vf, name) is not None:
                    yield f"{driver}.driver vfio-pci and {place}.{name}: such a VF has no netdev to set it on; keep one"
        if nic.mtu is not None and vf.mtu is not None and vf.mtu > nic.mtu:
            yield f"{place}.mtu {vf.mtu} is above {key}.mtu {nic.mtu}: a VF carries no larger frames than its PF; lower it"


def _among_offloads(key: str, offloads: Offloads | None) -> Iterator[str]:
    given = offloads or {}
    for one, state, other in _EXCLUDING:
        if given.get(one) is state and given.get(other):
            word = "on" if state else "off"
            yield f"{key}.offloads: {one} {word} and {other} on: the kernel turns {other} off then; keep one"


def address_conflicts(nics: tuple[Nic, ...], node_number: int | None, sysctls: Mapping[str, str]) -> Iterator[str]:
    """Conflicts about the NICs' IP addresses: with each other, with the rail's and the node's number, with sysctls."""
    every = {f"nics[{index}]": nic for index, nic in enumerate(nics)}
    rails = ((_rail_of(key, nic), rail) for key, nic in every.items() for rail in nic.rails())
    for one, other, rail in _twice(rails):
        yield f"{one} and {other} are both {rail}; give each rail of a node its own number"
    keys = {key: nic for key, nic in every.items() if nic.addresses}
    assignments: list[tuple[str, Hashable]] = []
    gateways: dict[Hashable, str] = {}
    for key, nic in keys.items():
        if not nic.rails():
            yield f"{key}.addresses needs {key}.rail, which is not given; number the rails of a node from 0 on"
        else:
            yield from _assigned(key, nic, node_number, assignments, gateways)
        yield from _default_routes(key, nic)
        if nic.state != "up":
            yield f"{key}.addresses and {key}.state: nobody is reached through a link that is down; keep one"
        for setting in ARP:
            if (name := canonical(f"net/ipv4/conf/{nic.select.netdev}/{setting}")) in sysctls:
                yield f"sysctls[{name!r}] and {key}.addresses set the same; keep one"
        yield from _without_ipv6(key, nic, sysctls)
    for ip, gateway in gateways.items():
        if (own := next((place for place, assigned in assignments if assigned == ip), None)) is not None:
            yield f"{gateway} and {own} are both {ip}: the node would be its own router; give a router's address"
    for one, other, ip in _twice(assignments):
        yield f"{one} and {other} are both {ip}; give each its own, in a network with {RAIL}"
    for name, value in sysctls.items():
        # The kernel takes the larger of this value and a netdev's own, and above 2 it means something else.
        if keys and name == "net.ipv4.conf.all.arp_ignore" and value.strip() not in ("0", "1", "2"):
            yield (
                f"sysctls[{name!r}] and {next(iter(keys))}.addresses: with {value.strip()} a netdev does not answer ARP for "
                "exactly its own addresses; give 1, or leave it out"
            )


def _without_ipv6(key: str, nic: Nic, sysctls: Mapping[str, str]) -> Iterator[str]:
    """The kernel gives no IPv6 address to a netdev on which IPv6 is disabled (inet6_addr_add), or whose MTU is too small."""
    for index, address in enumerate(nic.addresses):
        if nic.mtu is not None and nic.mtu < LEAST_MTU_OF_IPV6 and address.version == 6:
            yield (
                f"{key}.mtu {nic.mtu} and {key}.addresses[{index}]: a netdev has IPv6 only with an MTU of "
                f"{LEAST_MTU_OF_IPV6} or more; raise mtu"
            )
    for place in ("all", "default", nic.select.netdev):
        name = canonical(f"net/ipv6/conf/{place}/disable_ipv6")
        for index, address in enumerate(nic.addresses):
            if sysctls.get(name, "0").strip() != "0" and address.version == 6:
                yield f"sysctls[{name!r}] and {key}.addresses[{index}]: the netdev can have no IPv6 address then; keep one"


def _default_routes(key: str, nic: Nic) -> Iterator[str]:
    """A rail's table has one default route for IPv4, and one for IPv6."""
    given = ((index, address) for index, address in enumerate(nic.addresses) if address.gateway is not None)
    for one, other, version in _twice((f"{key}.addresses[{index}].gateway", each.version) for index, each in given):
        yield f"{one} and {other}: a rail has one gateway for IPv{version}; keep one"


def _rail_of(key: str, nic: Nic) -> str:
    return f"{key}.rail (the first of {nic.select.most})" if nic.select.each else f"{key}.rail"


def _assigned(
    key: str, nic: Nic, node_number: int | None, assignments: list[tuple[str, Hashable]], gateways: dict[Hashable, str]
) -> Iterator[str]:
    """Faults of a NIC's addresses. Those without a fault are added to ``assignments``, their gateways to ``gateways``."""
    for index, address in enumerate(nic.addresses):
        place = f"{key}.addresses[{index}]"
        if address.network is not None and node_number is None:
            yield f"{place}.network needs node_number, which is not given; give each host its own in its data"
            continue
        for rail in nic.rails():
            try:
                assigned = address.assigned(rail, node_number or 0)
                assignments.append((place, assigned.interface.ip))
                if assigned.gateway is not None:
                    gateways.setdefault(assigned.gateway, f"{place}.gateway")
            except ValueError as error:
                yield f"{place}: {error} (rail {rail}, node_number {node_number})"
                break


def _layer(gid_type: str) -> str:
    return "InfiniBand" if gid_type == "IB" else "Ethernet"


def setting_conflicts(
    sysctls: Mapping[str, str],
    module_parameters: Mapping[str, Mapping[str, str]],
    given: Mapping[str, str],
    nics: Collection[Nic],
    netns_mode: bool,
) -> Iterator[str]:
    """Conflicts about settings of the host that two keys give.

    :param given: other keys of the spec that set a sysctl.
    :param netns_mode: rdma.netns_mode is given.
    """
    for name in sysctls:
        if name in given:
            yield f"sysctls[{name!r}] and {given[name]} set the same; keep one"
    for module, parameters in module_parameters.items():
        for parameter in parameters:
            key = f"module_parameters.{module}.{parameter}"
            if (module, parameter) == ("ib_core", "netns_mode") and netns_mode:
                yield f"rdma.netns_mode and {key} set the same; keep one"
            if parameter in _VF_PARAMETERS:
                for index, nic in enumerate(nics):
                    if nic.vfs is not None and nic.select.driver in (None, module):
                        yield f"nics[{index}].vfs.count and {key} both say how many VFs there are; keep one"
