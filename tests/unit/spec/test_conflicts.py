"""A spec whose keys contradict each other is refused by naming both; the JSON schema refuses what it can express."""

import json
from typing import Any

import pytest

from agent.spec.node import SpecError, from_mapping, parse

PF, OTHER = "0000:3b:00.0", "0000:5e:00.0"
MAC, GUID = "02:00:00:00:00:07", "00:11:22:33:44:55:66:77"


def nic(name: str, pci: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "select": {"pci": pci}, **keys}


def node(**keys: Any) -> dict[str, Any]:
    return {"node_name": "n1", **keys}


def with_group(count: int = 4, **group: Any) -> dict[str, Any]:
    return {"vfs": {"count": count, "groups": [{"index": "0", **group}]}}


def one(**keys: Any) -> dict[str, Any]:
    return node(nics=[nic("a", PF, **keys)])


def both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return node(nics=[nic("a", PF, **first), nic("b", OTHER, **second)])


def addressed(address: str, *names: str) -> dict[str, Any]:
    rail = {"name": "a", "select": {"netdev": "x"}, "rail": 0, "addresses": [address]}
    return node(nics=[rail], sysctls=dict.fromkeys(names, "1"))


def same_pf(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return node(nics=[{"name": "a", "select": first}, {"name": "b", "select": second}])


def sysctls(**others: Any) -> Any:
    return lambda *names: node(sysctls=dict.fromkeys(names, "1"), **others)


POOL = [{"size": "2M", "count": 4}]
OF_NETDEVS: dict[str, Any] = {
    "channels": {"combined": 1},
    "rings": {"rx": 512},
    "coalescing": {"rx_usecs": 9},
    "offloads": {"rx-gro": False},
}
VF, SECOND_VF = "nics[0].vfs.groups[0]", "nics[1].vfs.groups[0]"


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        *(
            (one(**with_group(driver="vfio-pci", **{name: given})), [f"{VF}.driver vfio-pci", f"{VF}.{name}"])
            for name, given in OF_NETDEVS.items()
        ),
        (
            one(vfs={"count": 1, "defaults": {"driver": "vfio-pci"}, "groups": [{"index": "0", "rings": {"rx": 512}}]}),
            ["nics[0].vfs.defaults.driver vfio-pci", f"{VF}.rings"],
        ),
        (
            one(vfs={"count": 1, "defaults": {"driver": "vfio-pci", "offloads": {"rx-gro": False}}}),
            ["nics[0].vfs.defaults.driver vfio-pci", "nics[0].vfs.defaults.offloads"],
        ),
        (
            sysctls()("net.core.somaxconn", "net/core/somaxconn"),
            ["sysctls['net.core.somaxconn']", "['net/core/somaxconn']"],
        ),
        (sysctls()("net.ipv4.conf.a/1.rp_filter", "net/ipv4/conf/a.1/rp_filter"), ["a/1.rp_filter", "a.1/rp_filter"]),
        (sysctls()("vm.dirty_bytes", "vm.dirty_ratio"), ["vm.dirty_bytes", "vm.dirty_ratio"]),
        (one(state="down", rdma={"gid_type": "RoCE v2"}), ["nics[0].rdma", "nics[0].state"]),
        (one(state="down", rdma={"link_layer": "Ethernet"}), ["nics[0].rdma", "nics[0].state"]),
        (
            node(sysctls={"kernel.watchdog": "0", "kernel.nmi_watchdog": "1"}),
            ["sysctls['kernel.watchdog']", "sysctls['kernel.nmi_watchdog']"],
        ),
        (
            node(sysctls={"kernel.watchdog": "1", "kernel.nmi_watchdog": "0", "kernel.soft_watchdog": "0"}),
            ["sysctls['kernel.watchdog']", "sysctls['kernel.nmi_watchdog']", "sysctls['kernel.soft_watchdog']"],
        ),
        *(
            (addressed("fd00::7/64", name), [f"sysctls['{name}']", "nics[0].addresses[0]"])
            for name in ("net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.x.disable_ipv6")
        ),
        *(
            (one(offloads={first: on, other: True}), ["nics[0].offloads", first, other])
            for first, on, other in (
                ("rx-gro-hw", True, "rx-lro"),
                ("rx-fcs", True, "rx-gro-hw"),
                ("rx-checksum", False, "rx-gro-hw"),
                ("tx-scatter-gather", False, "tx-tcp-segmentation"),
                ("tx-scatter-gather", False, "tx-tcp-ecn-segmentation"),
                ("tx-tcp-segmentation", False, "tx-tcp-mangleid-segmentation"),
            )
        ),
        (
            one(
                vfs={
                    "count": 1,
                    "defaults": {"offloads": {"tx-scatter-gather": False, "tx-generic-segmentation": True}},
                }
            ),
            ["nics[0].vfs.defaults.offloads", "tx-scatter-gather", "tx-generic-segmentation"],
        ),
        (sysctls(nics=[nic("a", PF)])("net.core.rps_default_mask"), ["net.core.rps_default_mask", "rps.enable"]),
        (
            node(rdma={"netns_mode": "exclusive"}, module_parameters={"ib-core": {"netns-mode": "Y"}}),
            ["rdma.netns_mode", "module_parameters.ib_core.netns_mode"],
        ),
        (
            node(nics=[nic("a", PF, vfs={"count": 2})], module_parameters={"igb": {"max_vfs": "7"}}),
            ["nics[0].vfs.count", "module_parameters.igb.max_vfs"],
        ),
        (node(hugepages=[*POOL, {"size": "2048K", "count": 1}]), ["hugepages[0]", "hugepages[1]"]),
        (both(with_group(mac=MAC), with_group(mac=MAC)), [f"{VF}.mac", f"{SECOND_VF}.mac"]),
        (
            one(vfs={"count": 2, "groups": [{"index": "0", "mac": MAC}, {"index": "1", "mac": MAC}]}),
            [f"{VF}.mac", "nics[0].vfs.groups[1].mac"],
        ),
        (
            node(nics=[{"name": "a", "select": {"mac": MAC}}, nic("b", OTHER, **with_group(mac=MAC))]),
            ["nics[0].select.mac", f"{SECOND_VF}.mac"],
        ),
        (
            both(with_group(node_guid=GUID), with_group(port_guid=GUID)),
            [f"{VF}.node_guid", f"{SECOND_VF}.port_guid"],
        ),
        (both({"altnames": ["z"]}, {"altnames": ["z"]}), ["nics[0].altnames[0]", "nics[1].altnames[0]"]),
        (
            node(nics=[nic("a", PF, altnames=["z"]), {"name": "b", "select": {"netdev": "z"}}]),
            ["altnames[0]", "nics[1].select.netdev"],
        ),
        (node(nics=[nic("a", PF), nic("a", OTHER)]), ["nics[0].name", "nics[1].name"]),
        (same_pf({"pci": PF}, {"pci": PF, "mac": MAC}), ["nics[0].select.pci", "nics[1].select.pci"]),
        (same_pf({"mac": MAC}, {"mac": MAC}), ["nics[0].select.mac", "nics[1].select.mac"]),
        (
            same_pf({"netdev": "x"}, {"netdev": "x", "driver": "igb"}),
            ["nics[0].select.netdev", "nics[1].select.netdev"],
        ),
        (same_pf({"driver": "igb"}, {"driver": "igb"}), ["nics[0].select", "nics[1].select"]),
        (one(mtu=1500, **with_group(mtu=9000)), [f"{VF}.mtu", "nics[0].mtu"]),
        (one(mtu=1500, vfs={"count": 1, "defaults": {"mtu": 9000}}), ["nics[0].vfs.defaults.mtu", "nics[0].mtu"]),
        (one(rdma={"link_layer": "InfiniBand"}, roce={"pfc": "3"}), ["nics[0].roce", "nics[0].rdma"]),
        (
            one(vfs={"count": 2, "groups": [{"index": "0-1"}, {"index": "1"}]}),
            ["groups[0].index", "groups[1].index"],
        ),
    ],
)
def test_both_keys_of_a_conflict_are_named(document: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        from_mapping(document)
    (fault,) = caught.value.faults
    assert all(key in fault for key in keys), fault


@pytest.mark.parametrize(
    "document",
    [
        one(**with_group(node_guid=GUID, port_guid=GUID)),
        node(sysctls={"vm.dirty_bytes": "0", "vm.dirty_ratio": "10"}),
        node(sysctls={"kernel.watchdog": "1", "kernel.nmi_watchdog": "0"}),
        node(sysctls={"kernel.watchdog": "1", "kernel.nmi_watchdog": "0", "kernel.soft_watchdog": "1"}),
        node(sysctls={"net.ipv4.neigh.a.retrans_time_ms": "1", "net.ipv4.neigh.b.retrans_time_ms": "1"}),
        addressed("192.0.2.7/24", "net.ipv6.conf.x.disable_ipv6"),
        addressed("fd00::7/64", "net.ipv6.conf.y.disable_ipv6"),
        one(offloads={"rx-gro-hw": True, "rx-lro": False, "tx-scatter-gather": True, "tx-tcp-segmentation": True}),
        node(sysctls={"net.core.rps_default_mask": "1"}),
        node(sysctls={"net.ipv4.conf.a/1.rp_filter": "1", "net.ipv4.conf.a.rp_filter": "1"}),
        same_pf({"serial": "x", "pci": PF}, {"serial": "x", "pci": OTHER}),
        node(nics=[{"name": "a", "select": {"netdev": "z"}, "altnames": ["z"]}]),
        one(mtu=9000, **with_group(mtu=9000)),
    ],
)
def test_apparent_conflicts_are_accepted(document: dict[str, Any]) -> None:
    from_mapping(document)


# A variable of the kernel has one name in a spec; the others are refused with the one to use.
OTHER_NAMES = {
    "net.nf_conntrack_max": "write it as net.netfilter.nf_conntrack_max",
    "net/nf_conntrack_max": "write it as net.netfilter.nf_conntrack_max",
    "net.ipv4.conf.all.forwarding": "write it as net.ipv4.ip_forward",
    "net.ipv4.route.gc_min_interval": "write it as net.ipv4.route.gc_min_interval_ms",
    "net.ipv6.route.gc_min_interval": "write it as net.ipv6.route.gc_min_interval_ms",
    "net.ipv4.neigh.default.retrans_time": "write it as net.ipv4.neigh.default.retrans_time_ms",
    "net/ipv6/neigh/eth0.1/base_reachable_time": "write it as net.ipv6.neigh.eth0/1.base_reachable_time_ms",
    "net.ipv4.neigh.eth0/1.unres_qlen": "write it as net.ipv4.neigh.eth0/1.unres_qlen_bytes",
    "user.max_inotify_instances": "write it as fs.inotify.max_user_instances",
    "user.max_inotify_watches": "write it as fs.inotify.max_user_watches",
    "user.max_fanotify_groups": "write it as fs.fanotify.max_user_groups",
    "user.max_fanotify_marks": "write it as fs.fanotify.max_user_marks",
    "net.core.rps_sock_flow_entries": "use rfs.enable and rfs.entries",
    "vm/nr_hugepages": "use hugepages",
    "vm.nr_hugepages_mempolicy": "use hugepages",
    "fs.nfs.nfs_callback_tcpport": "use module_parameters.nfs.callback_tcpport",
    "fs.nfs.idmap_cache_timeout": "use module_parameters.nfs.nfs_idmap_cache_timeout",
    "fs.nfs.nfs_mountpoint_timeout": "use module_parameters.nfs.nfs_mountpoint_expiry_timeout",
}


@pytest.mark.parametrize(("name", "remedy"), OTHER_NAMES.items())
def test_a_sysctl_by_another_name_than_the_variable_s_is_refused_with_the_one_to_use(name: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_mapping(sysctls()(name))
    assert caught.value.faults == [f"spec: sysctls.{name}: {remedy}"]


@pytest.mark.parametrize(
    ("module", "parameter", "name"),
    [
        ("scsi_mod", "scsi_logging_level", "dev.scsi.logging_level"),
        ("ipmi-poweroff", "poweroff-powercycle", "dev.ipmi.poweroff_powercycle"),
        ("nf-conntrack", "hashsize", "net.netfilter.nf_conntrack_buckets"),
        ("sunrpc", "udp_slot_table_entries", "sunrpc.udp_slot_table_entries"),
    ],
)
def test_a_module_s_parameter_that_is_a_sysctl_is_refused_with_the_sysctl(
    module: str, parameter: str, name: str
) -> None:
    with pytest.raises(SpecError) as caught:
        from_mapping(node(module_parameters={module: {parameter: "1"}}))
    (fault,) = caught.value.faults
    assert f"module_parameters.{module}.{parameter}: use the sysctl {name}" in fault
    from_mapping(sysctls()(name))


def test_names_have_one_notation() -> None:
    spec = from_mapping(
        node(
            sysctls={"net/ipv4/conf/eth0.1/rp_filter": "1", "net.core.somaxconn": "2"},
            module_parameters={"nvme-core": {"io-timeout": "30"}},
            hugepages=[{"size": "2048K", "count": 1}, {"size": "1024M", "count": 1}],
        )
    )
    assert spec.sysctls == {"net.ipv4.conf.eth0/1.rp_filter": "1", "net.core.somaxconn": "2"}
    assert spec.module_parameters == {"nvme_core": {"io_timeout": "30"}}
    assert [pool.name for pool in spec.hugepages] == ["2M", "1G"]


REFUSED = [
    pytest.param(node(node_name="n" * 64), id="label"),
    pytest.param(node(node_name="a." * 126 + "abc"), id="name"),
    pytest.param(node(node_name="a.b" * 2_000_000), id="millions"),
    node(node_name="n1\n"),
    node(node_name="n1."),
    same_pf({"pci": "0000:3b:20.0"}, {"pci": OTHER}),
    same_pf({"pci": "0000:3b:1f.8"}, {"pci": OTHER}),
    same_pf({"netdev": ""}, {"pci": OTHER}),
    one(channels={"combined": 0}),
    one(channels={"combined": 2, "rx": 1}),
    one(channels={"tx": 2, "combined": 1}),
    one(**with_group(index="")),
    one(**with_group(index=" , ")),
    one(altnames=["z", "z"]),
    pytest.param(one(altnames=["z" * 128]), id="long altname"),
    one(altnames=["a\u00a0\x00"]),
    node(hugepages=[{"size": f"{10**9}G", "count": 1}]),
    node(sysctls={"vm.swappiness": "1\ud800"}),
    node(sysctls={"vm.swappiness": "1\0"}),
    node(sysctls={"vm.swappiness": "\x1b[2J"}),
    node(sysctls={"vm.swappiness\ud800": "1"}),
    node(module_parameters={"igb": {"x": "\udfff"}}),
    node(readiness={"silenced": {"carrier": {"until": "2026-12-01", "reason": "a\ud83d"}}}),
    node(readiness={"silenced": {"carrier": {"until": "2026-12-01", "reason": "a\u202eb"}}}),
    one(offloads={"rx\x7f": True}),
    same_pf({"serial": "\ud800"}, {"pci": OTHER}),
]


@pytest.mark.parametrize("document", REFUSED)
def test_parser_and_schema_refuse_the_same(validator: Any, document: dict[str, Any]) -> None:
    text = json.dumps(document)
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert len(str(caught.value).encode()) < 4096, "it can be printed, and is no page"
    assert not validator.is_valid(json.loads(text))


@pytest.mark.parametrize("group", ["0-4095," * 1000, "0-65535", "4096"])
def test_a_list_of_vfs_is_limited_to_the_most_vfs_that_can_exist(group: str) -> None:
    with pytest.raises(SpecError, match="index"):
        from_mapping(one(vfs={"count": 4096, "groups": [{"index": group[:4000].rstrip(",")}]}))


def test_an_altname_is_measured_in_bytes() -> None:
    from_mapping(one(altnames=["\u00e9" * 63]))
    with pytest.raises(SpecError, match="more than 127 bytes"):
        from_mapping(one(altnames=["\u00e9" * 64]))


def test_a_group_for_vfio_may_stand_beside_defaults_for_the_netdevs_of_the_others() -> None:
    from_mapping(one(vfs={"count": 2, "defaults": OF_NETDEVS, "groups": [{"index": "0", "driver": "vfio-pci"}]}))
