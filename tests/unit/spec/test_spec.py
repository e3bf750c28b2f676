"""Which specs are accepted, and how others are refused."""

import pytest

from agent.spec.node import SpecError, parse, spec_hash, to_json
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


READY = '{"node_name": "n1", "readiness": {%s}}'
NIC = '{"node_name": "n1", "nics": [{"name": "rail0", "select": {"pci": "0000:3b:00.0"}, %s}]}'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "spec: not valid JSON: Expecting property name"),
        pytest.param("[" * 100_000, "spec: not valid JSON: ", id="nested"),
        ("[]", "spec: [] is not an object with keys"),
        ("{}", "spec.node_name: the key 'node_name' is missing; add it"),
        ('{"node_name": "n1", "node_name": "n2"}', "the key 'node_name' is given twice"),
        ('{"node_name": "GPU_1"}', "node_name: 'GPU_1' is not valid; give the Node's name"),
        ('{"node_name": 7}', "spec.node_name: 7 is not a string"),
        ('{"node_name": "n1", "nic": []}', "spec: unknown key 'nic'; did you mean 'nics'?"),
        ('{"node_name": "n1", "nics": {}}', "spec.nics: {} is not a list"),
        (NIC % '"mtu": "9000"', 'spec.nics[0].mtu: "9000" is not a whole number'),
        (NIC % '"mtu": true', "spec.nics[0].mtu: true is not a whole number"),
        (NIC % '"mtu": 90000', "spec.nics[0]: mtu: 90000 is out of range; give 68 to 65535 bytes"),
        (NIC % '"rings": {"rx": 0}', "spec.nics[0].rings: rx: 0 is out of range; give 1 to 65536 descriptors"),
        (NIC % '"channels": {"combine": 4}', "spec.nics[0].channels: unknown key 'combine'; did you mean 'combined'?"),
        (NIC % '"offloads": {"rx-gro": "off"}', "spec.nics[0].offloads['rx-gro']: \"off\" is not true or false"),
        (NIC % '"offloads": ["rx-gro"]', 'spec.nics[0].offloads: ["rx-gro"] is not an object with keys'),
        (NIC % '"state": "on"', 'spec.nics[0].state: "on" is not one of up, down'),
        (NIC % '"vfs": {"cuont": 4}', "spec.nics[0].vfs: unknown key 'cuont'; did you mean 'count'?"),
        (NIC % '"vfs": {"count": 4, "groups": [{"index": "4"}]}', "index 4 is beyond count 4; raise count"),
        (NIC % '"vfs": {"count": 4, "groups": [{"index": "3-1"}]}', "index: '3-1' is not a rising range"),
        (NIC % '"vfs": {"count": 4, "groups": [{"index": "0-1"}, {"index": "1"}]}', "VF 1 is in 0-1 and 1"),
        (NIC % '"vfs": {"count": 4, "groups": [{"index": "0-1", "mac": "02:00:00:00:00:01"}]}', "an entry of its own"),
        (NIC % '"vfs": {"count": 4, "defaults": {"mac": "02:00:00:00:00:01"}}', "one address cannot serve all VFs"),
        (
            NIC % '"vfs": {"count": 4, "groups": [{"index": "0", "mac": "03:00:00:00:00:01"}]}',
            "is not a unicast address",
        ),
        (NIC % '"vfs": {"count": 4, "groups": [{"index": "0", "vlan": 4095}]}', "give 0 to 4094"),
        (NIC % '"vfs": {"count": 4, "groups": [{"index": "0", "qos": 8, "vlan": 1}]}', "give 0 to 7 (VLAN priority)"),
        (NIC % '"vfs": {"count": 4, "groups": [{"index": "0", "qos": 3}]}', "groups[0]: qos needs vlan"),
        (
            NIC % '"vfs": {"count": 4, "groups": [{"index": "0", "vlan_protocol": "802.1Q"}]}',
            "vlan_protocol needs vlan",
        ),
        (NIC % '"vfs": {"count": 4, "defaults": {"vlan_protocol": "QinQ"}}', '"QinQ" is not one of 802.1Q, 802.1ad'),
        (NIC % '"vfs": {"count": 4, "defaults": {"link_state": "up"}}', '"up" is not one of auto, enable, disable'),
        (NIC % '"vfs": {"count": 4, "defaults": {"driver": "igbvf"}}', '"igbvf" is not one of netdevice, vfio-pci'),
        (NIC % '"vfs": {"count": 4, "defaults": {"max_tx_rate": -1}}', "give 0 to 4294967295 Mbit/s (0 is none)"),
        (NIC % '"vfs": {"count": 4, "defaults": {"min_tx_rate": 5}}', "defaults: min_tx_rate needs max_tx_rate"),
        (
            NIC % '"vfs": {"count": 4, "defaults": {"max_tx_rate": 9}, "groups": [{"index": "2", "min_tx_rate": 10}]}',
            "groups[0]: min_tx_rate 10 is above max_tx_rate 9; lower it",
        ),
        (
            NIC % '"vfs": {"count": 4, "groups": [{"index": "0-1", "node_guid": "00:11:22:33:44:55:66:77"}]}',
            "node_guid: 00:11:22:33:44:55:66:77 cannot be given to VFs 0-1; give one VF an entry of its own",
        ),
        (
            NIC % '"vfs": {"count": 4, "groups": [{"index": "0", "port_guid": "00:11"}]}',
            "write it as 00:11:22:33:44:55:66:77",
        ),
        (NIC % '"altnames": ["a b"]', "altnames: 'a b' is not valid; give up to 127 bytes"),
        (NIC % '"altnames": ["a", "a"]', "altnames: a name is given twice"),
        (NIC % '"txqueuelen": 0', "txqueuelen: 0 is out of range; give 1 to 2147483647 packets"),
        (
            '{"node_name": "n1", "nics": [{"name": "a", "select": {"netdev": "x"}, "altnames": ["z"]},'
            ' {"name": "b", "select": {"netdev": "y"}, "altnames": ["z"]}]}',
            "nics[0].altnames[0] and nics[1].altnames[0]: the netdev name z is given twice",
        ),
        ('{"node_name": "n1", "nics": [{"name": "a", "select": {}}]}', "it selects nothing; give one of pci"),
        ('{"node_name": "n1", "nics": [{"name": "a", "select": {"pci": "3b:00.0"}}]}', "write it as 0000:3b:00.0"),
        ('{"node_name": "n1", "nics": [{"name": "a", "select": {"vendor": "0x15b3"}}]}', "such as 15b3"),
        (
            '{"node_name": "n1", "nics": [{"name": "a", "select": {"netdev": "x"}}, {"name": "a", "select": {"netdev": "y"}}]}',
            "the name a is given twice",
        ),
        (
            NIC % '"max_read_request": 1000',
            "max_read_request: 1000 is not one of 128, 256, 512, 1024, 2048, 4096 bytes",
        ),
        ('{"node_name": "n1", "sysctls": {"vm.swappiness": 10}}', "sysctls['vm.swappiness']: 10 is not a string"),
        ('{"node_name": "n1", "sysctls": {"swappiness": "10"}}', "'swappiness' is not a sysctl; write it as sysctl -a"),
        (
            '{"node_name": "n1", "sysctls": {"kernel.panic": "010"}}',
            "sysctls.kernel.panic: the kernel reads a number in '010' as octal; leave leading zeros out",
        ),
        (
            '{"node_name": "n1", "sysctls": {"net.ipv4.ip_local_reserved_ports": "1-2,030000"}}',
            "the kernel reads a number in '1-2,030000' as octal",
        ),
        ('{"node_name": "n1", "sysctls": {"net/../../etc/x": "1"}}', "'net/../../etc/x' is not a sysctl"),
        (
            '{"node_name": "n1", "sysctls": {"vm.x": "1\\n2"}}',
            "has a control character, a line break or half of a character",
        ),
        ('{"node_name": "n1", "module_parameters": {"../x": {"y": "1"}}}', "../x is not a module's name; see lsmod(8)"),
        ('{"node_name": "n1", "module_parameters": {"a_b": {}, "a-b": {}}}', "the same in modules' names; keep one"),
        ('{"node_name": "n1", "hugepages": [{"size": "2MB", "count": 1}]}', "'2MB' is not valid; write it as 2M or 1G"),
        (
            '{"node_name": "n1", "hugepages": [{"size": "1G", "count": 1}, {"size": "1024M", "count": 1, "numa_node": 0}]}',
            "1G is given for all nodes and for node 0; keep either",
        ),
        (READY % '"probes": {"carier": {}}', "probes: unknown probe 'carier'; did you mean 'carrier'?"),
        (READY % '"probes": {"x": {}}', "probes: unknown probe 'x'; known probes: carrier, "),
        (READY % '"probes": {"carrier": {"severity": "info"}}', '"info" is not one of required, warn, off'),
        (READY % '"probes": {"carrier": {"fail_after": 3, "of": 2}}', "raise of to fail_after"),
        (
            READY % '"silenced": {"carrier": {"until": "2026-13-01", "reason": "r"}}',
            "'2026-13-01' is not a date; write it as",
        ),
        (
            READY % '"silenced": {"carrier": {"until": "20261201", "reason": "r"}}',
            "'20261201' is not a date; write it as",
        ),
        (READY % '"silenced": {"carrier": {"until": "2026-12-01", "reason": " "}}', "reason: it is empty; say why"),
        (READY % '"silenced": {"carrier": {"until": "2026-12-01"}}', "the key 'reason' is missing; add it"),
        ('{"node_name": "n1", "irqs": {"irqbalance": "off"}}', '"off" is not one of disabled, banned, untouched'),
        ('{"node_name": "n1", "rfs": {"entries": 30000}}', "30000 is not a power of two"),
        ('{"node_name": "n1", "disruption": {"allow": "all"}}', '"all" is not one of none, rebind, link-flap'),
    ],
)
def test_bad_input_names_where_what_and_the_remedy(text: str, fault: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert fault in str(caught.value)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse('{"nics": [{"name": "a", "select": {"netdev": "x"}, "mtu": "1", "vfs": {"x": 1}}], "rsp": {}}')
    assert len(caught.value.faults) == 5


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
