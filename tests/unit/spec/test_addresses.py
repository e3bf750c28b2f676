"""The addresses of a spec: which ones are derived, and which are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent.spec.addresses import ARP, FIRST_TABLE, PRIORITY, Address
from agent.spec.node import NodeSpec, SpecError, from_mapping, parse, to_json

DERIVED = {"network": "10.{rail}.0.0/16"}


def node(*addresses: list[Any], node_number: int | None = 17, **more: Any) -> dict[str, Any]:
    nics = [
        {"name": f"rail{rail}", "select": {"pci": f"0000:{rail:02x}:00.0"}, "rail": rail, "addresses": given}
        for rail, given in enumerate(addresses)
    ]
    return {"node_name": "n1", "nics": nics, "node_number": node_number, **more}


def assigned(spec: NodeSpec) -> list[list[tuple[str, str]]]:
    return [
        [
            (str(made.interface), str(made.gateway))
            for made in (address.assigned(nic.rail or 0, spec.node_number or 0) for address in nic.addresses)
        ]
        for nic in spec.nics
    ]


@pytest.mark.parametrize(
    ("given", "number", "expected"),
    [
        ("192.0.2.11/24", None, ("192.0.2.11/24", "None")),
        ({"address": "192.0.2.11/24", "gateway": "192.0.2.1"}, None, ("192.0.2.11/24", "192.0.2.1")),
        ("FD00:0::0B/64", None, ("fd00::b/64", "None")),
        ("192.0.2.0/31", None, ("192.0.2.0/31", "None")),
        (DERIVED, 1, ("10.0.0.1/16", "None")),
        (DERIVED, 300, ("10.0.1.44/16", "None")),
        ({"network": "10.9.{rail}.0/24", "gateway": "10.9.{rail}.1"}, 2, ("10.9.0.2/24", "10.9.0.1")),
        ({"network": "10.9.{rail}.0/24", "gateway": "10.9.{rail}.254"}, 7, ("10.9.0.7/24", "10.9.0.254")),
        ({"network": "fd00:0:0:{rail}::/64", "gateway": "fd00:0:0:{rail}::ffff"}, 300, ("fd00::12c/64", "fd00::ffff")),
    ],
)
def test_an_address_is_given_or_derived(given: Any, number: int | None, expected: tuple[str, str]) -> None:
    assert assigned(from_mapping(node([given], node_number=number))) == [[expected]]


def test_one_group_s_data_gives_each_rail_of_each_node_its_own_address() -> None:
    specs = [from_mapping(node(*[[DERIVED]] * 8, node_number=number)) for number in range(1, 65)]
    addresses = [address for spec in specs for nic in assigned(spec) for address, _ in nic]
    assert len(set(addresses)) == 8 * 64
    assert assigned(specs[16])[3] == [("10.3.0.17/16", "None")]


def test_a_text_is_an_address_and_is_written_as_one_form() -> None:
    spec = from_mapping(node(["192.0.2.11/24"]))
    assert spec.nics[0].addresses == (Address(address="192.0.2.11/24"),)
    assert parse(to_json(spec)) == spec
    assert json.loads(to_json(spec))["nics"][0]["addresses"] == [{"address": "192.0.2.11/24"}]


@pytest.mark.parametrize("given", [["192.0.2.11/24"], [DERIVED], [{"address": "fd00::1/64"}]])
def test_the_schema_takes_both_forms(given: list[Any], validator: Any) -> None:
    validator.validate(node(given))


@pytest.mark.parametrize(
    "given", ["192.0.2.11", {"network": "10.{node}.0.0/16"}, {}, {**DERIVED, "address": "192.0.2.1/24"}, 7]
)
def test_the_schema_refuses_what_it_can_express(given: Any, validator: Any) -> None:
    with pytest.raises(SpecError):
        from_mapping(node([given]))
    if given != "192.0.2.11":  # a text's form is the parser's
        assert not validator.is_valid(node([given]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("192.0.2.11", "address: '192.0.2.11' is not valid; write it as 192.0.2.11/24"),
        ("192.0.2.300/24", "address: 192.0.2.300/24 is no IP address and prefix length; correct it"),
        ({}, "give either address or network"),
        ({"address": "192.0.2.1/24", "network": "10.0.0.0/16"}, "give either address or network"),
        ({"network": "10.0.0.1/16"}, "network: 10.0.0.1/16 is no IP network and prefix length (the bits"),
        ({"network": "10.{node}.0.0/16"}, "network: '10.{node}.0.0/16' is not valid; write it as 10.{rail}.0.0/16"),
        ("192.0.2.11/32", "its network has no other host"),
        ("192.0.2.0/24", "it is the network's own address"),
        ("fd00::/64", "it is the network's own address"),
        ("192.0.2.255/24", "it is the network's broadcast address"),
        ("224.0.0.1/24", "multicast"),
        ("127.0.0.2/8", "loopback"),
        ("169.254.0.7/16", "link-local"),
        ("fe80::7/64", "link-local"),
        ("::ffff:192.0.2.1/120", "it is an IPv4 address written as IPv6"),
        ({"address": "192.0.2.11/24", "gateway": "192.0.2.11"}, "192.0.2.11 is the node's own address"),
        ({"address": "192.0.2.11/24", "gateway": "192.0.3.1"}, "is not in 192.0.2.0/24"),
        ({"address": "192.0.2.11/24", "gateway": "fd00::1"}, "is not in 192.0.2.0/24"),
        ({"address": "192.0.2.11/24", "gateway": "192.0.2.0"}, "gateway: 192.0.2.0: it is the network's own address"),
        ({"address": "192.0.2.11/24", "gateway": "192.0.2.255"}, "gateway: 192.0.2.255: it is the network's broadcast"),
    ],
)
def test_an_address_that_no_host_can_have_is_refused(given: Any, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_mapping(node([given]), "gpu-01")
    assert "gpu-01.nics[0].addresses[0]: " in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        (node([DERIVED], node_number=None), ["nics[0].addresses[0].network", "node_number"]),
        (node([{"network": "192.0.2.0/24"}], node_number=255), ["nics[0].addresses[0]", "node_number 255"]),
        (
            node([{"network": "192.0.2.0/24", "gateway": "192.0.2.1"}], node_number=1),
            ["nics[0].addresses[0]", "192.0.2.1 is the node's own address", "node_number 1"],
        ),
        (node([{"network": "192.0.2.0/24"}], node_number=300), ["nics[0].addresses[0]", "no host 300"]),
        (
            node([], [{"network": "10.0.{rail}.0/16"}]),
            ["nics[1].addresses[0]", "10.0.1.0/16 is no IP network", "(rail 1,"],
        ),
        (node([{"network": "10.0.0.0/16"}], [{"network": "10.0.0.0/16"}]), ["nics[0].addresses[0]", "nics[1].add"]),
        (node(["192.0.2.1/24", "192.0.2.1/25"]), ["nics[0].addresses[0]", "nics[0].addresses[1]", "{rail}"]),
        (
            node([{"address": f"192.0.2.{host}/24", "gateway": "192.0.2.1"} for host in (2, 3)]),
            ["nics[0].addresses[0].gateway", "nics[0].addresses[1].gateway", "IPv4"],
        ),
        (node(["fd00::1/64"], ["fd00:0::1/64"]), ["nics[0].addresses[0]", "nics[1].addresses[0]"]),
        *(
            (
                node([{"address": "192.0.2.2/24", "gateway": "192.0.2.1"}, *own], *others),
                ["nics[0].addresses[0].gateway", place, "both 192.0.2.1"],
            )
            for own, others, place in (
                (["192.0.2.1/24"], [], "nics[0].addresses[1]"),
                ([], [["192.0.2.1/24"]], "nics[1].addresses[0]"),
            )
        ),
    ],
)
def test_addresses_that_contradict_each_other_are_refused_by_naming_both(
    document: dict[str, Any], keys: list[str]
) -> None:
    with pytest.raises(SpecError) as refused:
        from_mapping(document)
    assert [key for key in keys if key not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"rail": None}, ["nics[0].addresses", "nics[0].rail"]),
        ({"rail": 1}, ["nics[0].rail", "nics[1].rail"]),
        ({"state": "down"}, ["nics[0].addresses", "nics[0].state"]),
        ({"mtu": 1279, "addresses": ["fd00::1/64"]}, ["nics[0].mtu 1279", "nics[0].addresses[0]", "1280"]),
    ],
)
def test_addresses_without_what_they_need_of_their_nic_are_refused(changed: dict[str, Any], keys: list[str]) -> None:
    document = node(["192.0.2.1/24"], ["192.0.2.2/24"])
    document["nics"][0] |= changed
    with pytest.raises(SpecError) as refused:
        from_mapping(document)
    assert [key for key in keys if key not in str(refused.value)] == []


def test_a_rail_s_number_is_given_once_also_to_nics_without_addresses() -> None:
    document = node([], [])
    document["nics"][1]["rail"] = 0
    with pytest.raises(SpecError, match=r"nics\[0\].rail and nics\[1\].rail are both 0"):
        from_mapping(document)


@pytest.mark.parametrize("name", ["net.ipv4.conf.fab0.arp_ignore", "net/ipv4/conf/fab0/rp_filter"])
def test_a_sysctl_that_addresses_keep_has_one_owner(name: str) -> None:
    document = node(["192.0.2.1/24"], sysctls={name: "1"})
    document["nics"][0]["select"] = {"netdev": "fab0"}
    with pytest.raises(SpecError) as refused:
        from_mapping(document)
    assert f"sysctls['{name.replace('/', '.')}'] and nics[0].addresses set the same; keep one" in str(refused.value)


@pytest.mark.parametrize(("value", "refused"), [("1", False), ("2", False), ("3", True), ("8", True)])
def test_a_sysctl_of_all_netdevs_may_not_change_what_a_netdev_s_own_means(value: str, refused: bool) -> None:
    document = node(["192.0.2.1/24"], sysctls={"net.ipv4.conf.all.arp_ignore": value})
    if refused:
        with pytest.raises(SpecError, match=r"sysctls\['net.ipv4.conf.all.arp_ignore'\] and nics\[0\].addresses: with"):
            from_mapping(document)
    else:
        from_mapping(document)


def example() -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[str, ...]]]:
    """What docs/inventory/addresses.md shows: the hosts, their group's data, and each host's addresses."""
    text = (Path(__file__).parents[3] / "docs" / "inventory" / "addresses.md").read_text()
    chapter = text
    inventory, group = re.findall(r"```python\n(.*?)```", chapter, re.DOTALL)
    hosts: dict[str, Any] = {}
    exec(inventory, hosts)  # noqa: S102  an inventory is Python
    data: dict[str, Any] = {}
    exec(group, data)  # noqa: S102
    rows = re.findall(r"^\| `(gpu-[^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", chapter, re.MULTILINE)
    return dict(hosts["roce"]), {"nics": data["nics"]}, {host: addresses for host, *addresses in rows}


def test_the_example_of_the_docs_gives_the_addresses_that_the_docs_show() -> None:
    hosts, group, shown = example()
    assert len(shown) == 2
    for host, addresses in shown.items():
        spec = from_mapping({"node_name": host, **group, **hosts[host]})
        assert [made[0][0] for made in assigned(spec)] == list(addresses)


@pytest.mark.parametrize(
    "number", [str(FIRST_TABLE), str(PRIORITY), *(f"`{name}` {value}" for name, value in ARP.items())]
)
def test_the_numbers_of_the_docs_are_the_code_s(number: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "inventory" / "addresses.md").read_text()
    assert number in text
