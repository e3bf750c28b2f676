"""IP addresses of NICs, the rule and the routing table of each, and who answers ARP, by `ip` and `sysctl`."""

import json
from collections.abc import Iterator

import pytest

from agent.spec.addresses import ARP, FIRST_TABLE, Assigned
from tests.node.evidence import Finding, Nic, Node, equal, judge

pytestmark = pytest.mark.addresses


def given(node: Node, nics: tuple[Nic, ...]) -> Iterator[tuple[Nic, int, Assigned]]:
    """Each address with its NIC and the routing table of the NIC's rail."""
    for nic in nics:
        rail = nic.want.rail or 0
        for address in nic.want.addresses:
            yield nic, FIRST_TABLE + rail, address.assigned(rail, node.spec.node_number or 0)


def test_each_netdev_has_its_addresses(node: Node, nics: tuple[Nic, ...]) -> None:
    links = json.loads(node.run("ip -j address"))
    have = {
        link["ifname"]: [f"{each['local']}/{each['prefixlen']}" for each in link.get("addr_info", [])]
        for link in links
        if link
    }
    findings = [
        Finding(
            nic.label, "address", str(want.interface), ", ".join(addresses) or "none", str(want.interface) in addresses
        )
        for nic, _, want in given(node, nics)
        for addresses in [have[nic.netdev]]
    ]
    judge(node, findings, "its spec gives no NIC addresses")


def test_packets_from_each_address_leave_by_its_netdev(node: Node, nics: tuple[Nic, ...]) -> None:
    """To another host of its network, and by the gateway if it has one: as the kernel itself decides."""

    def findings() -> Iterator[Finding]:
        for nic, table, want in given(node, nics):
            own = want.interface.ip
            # The first two hosts of the network; one of them is not this node.
            first = want.interface.network.network_address
            peer = next(other for other in (first + 1, first + 2, first) if other != own)
            for target in filter(None, (peer, want.gateway)):
                way = json.loads(node.run('ip -j route get "$1" from "$2"', str(target), str(own)))[0]
                route = (way["dev"], int(way.get("table", 254)))
                yield equal(nic.label, f"netdev and table from {own} to {target}", (nic.netdev, table), route)

    judge(node, findings(), "no address of its spec asks for a rule")


def test_each_netdev_answers_arp_for_its_own_addresses_alone(node: Node, nics: tuple[Nic, ...]) -> None:
    with_ipv4 = {nic.netdev: nic for nic, _, want in given(node, nics) if want.interface.version == 4}
    findings = [
        equal(nic.label, setting, value, node.run('cat "$1"', f"/proc/sys/net/ipv4/conf/{netdev}/{setting}").strip())
        for netdev, nic in with_ipv4.items()
        for setting, value in ARP.items()
    ]
    judge(node, findings, "no address of its spec is asked for by ARP")
