"""Which specs are accepted, and how others are refused."""

from datetime import date
from enum import Enum, IntEnum

import pytest

from agent.spec.node import SpecError, from_mapping, parse, spec_hash, to_json
from agent.spec.ranges import format_ranges, parse_ranges

FULL = """{
  "node_name": "10.0.0.7",
  "nics": [{
    "name": "rail0", "select": {"pci": "0000:3b:00.0", "serial": "b8-3f-d2-ff-ff-12-34-56"}, "mtu": 9000, "required": false,
    "altnames": ["rail0", "storage"], "txqueuelen": 5000,
    "channels": {"combined": 8}, "rings": {"rx": 8192}, "coalescing": {"adaptive_rx": false, "rx_usecs": 8},
    "offloads": {"rx-gro-hw": true, "rx-lro": false},
    "vfs": {"count": 8, "defaults": {"trust": true, "vlan": 7, "qos": 3, "vlan_protocol": "802.1ad", "link_state": "enable",
                                     "min_tx_rate": 10, "max_tx_rate": 1000, "rss_query": false, "txqueuelen": 100},
            "groups": [{"index": "0-3,6", "vlan": 0}, {"index": "5", "driver": "vfio-pci"},
                       {"index": "7", "mac": "02:00:00:00:00:07", "driver": "netdevice",
                        "node_guid": "00:11:22:33:44:55:66:77", "port_guid": "00:11:22:33:44:55:66:78"}]}
  }],
  "irqs": {"exclude_cpus": "0,64", "irqbalance": "untouched"},
  "rps": {"enable": false},
  "disruption": {"allow": "rebind"}
}"""


def test_a_spec_is_read_back_as_it_was_written() -> None:
    spec = parse(FULL)
    assert parse(to_json(spec)) == spec
    assert to_json(parse(to_json(spec))) == to_json(spec)


def test_defaults_are_not_written_so_that_new_ones_do_not_change_a_hash() -> None:
    short = '{"node_name": "n1"}'
    long = '{"node_name": "n1", "nics": [], "irqs": {"pin": true}, "disruption": {"allow": "vf-reset"}}'
    assert spec_hash(parse(short)) == spec_hash(parse(long))


def test_a_groups_values_replace_the_defaults() -> None:
    vfs = parse(FULL).nics[0].vfs
    assert vfs is not None
    assert [vfs.attributes(index).vlan for index in range(8)] == [0, 0, 0, 0, 7, 7, 0, 7]
    assert vfs.attributes(7).trust is True
    assert vfs.attributes(7).mac == "02:00:00:00:00:07"
    assert [vfs.attributes(index).driver for index in (4, 5, 7)] == [None, "vfio-pci", "netdevice"]


def test_defaults_that_need_a_value_from_every_group_are_accepted() -> None:
    groups = '"groups": [{"index": "0", "vlan": 5}, {"index": "1", "vlan": 6}]'
    spec = parse(NIC % f'"vfs": {{"count": 2, "defaults": {{"qos": 3}}, {groups}}}')
    assert spec.nics[0].vfs is not None
    with pytest.raises(SpecError, match="defaults: qos needs vlan"):
        parse(NIC % f'"vfs": {{"count": 3, "defaults": {{"qos": 3}}, {groups}}}')


NIC = '{"node_name": "n1", "nics": [{"name": "rail0", "select": {"pci": "0000:3b:00.0"}, %s}]}'


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", (0, 1, 2, 3, 8)), ("", ()), ("5", (5,)), ("8,0-1", (0, 1, 8)), (" 1 , 2 ", (1, 2))]
)
def test_ranges_are_parsed_and_written(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_ranges(text) == numbers
    assert parse_ranges(format_ranges(numbers)) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1-2-3", "0x1", "99999999", "²"])
def test_malformed_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a number|not a rising"):
        parse_ranges(text)


def test_names_have_one_notation() -> None:
    spec = from_mapping(
        {
            "node_name": "n1",
            "sysctls": {"net/ipv4/conf/eth0.1/rp_filter": "1", "net.core.somaxconn": "2"},
            "module_parameters": {"nvme-core": {"io-timeout": "30"}},
            "hugepages": [{"size": "2048K", "count": 1}, {"size": "1024M", "count": 1}],
        }
    )
    assert spec.sysctls == {"net.ipv4.conf.eth0/1.rp_filter": "1", "net.core.somaxconn": "2"}
    assert spec.module_parameters == {"nvme_core": {"io_timeout": "30"}}
    assert [pool.name for pool in spec.hugepages] == ["2M", "1G"]


class Mode(str, Enum):
    OBSERVE = "observe"


class Size(IntEnum):
    JUMBO = 9000


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"mode": Mode.OBSERVE}, "<Mode.OBSERVE: 'observe'> is not one of enforce, observe"),
        ({"nics": Size.JUMBO}, "<Size.JUMBO: 9000> is not a list; put it in [ ]"),
        (
            {"sysctls": {"vm.swappiness": date(2026, 12, 31)}},
            "datetime.date(2026, 12, 31) is not a string; put it in quotes",
        ),
    ],
)
def test_a_value_that_only_python_has_is_shown_as_python_writes_it(given: dict[str, object], shown: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_mapping({"node_name": "n1", **given})
    assert refused.value.faults[0].endswith(f": {shown}")
