"""The addresses of a spec: which ones are derived, and which are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent.spec.addresses import ARP, FIRST_TABLE, PRIORITY, Address
from agent.spec.node import NodeSpec, from_mapping, parse, to_json

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


@pytest.mark.parametrize("value", ["1", "2"])
def test_a_sysctl_of_all_netdevs_may_not_change_what_a_netdev_s_own_means(value: str) -> None:
    from_mapping(node(["192.0.2.1/24"], sysctls={"net.ipv4.conf.all.arp_ignore": value}))


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
