"""`trackbed inspect --as-inventory`: the plan of its spec is empty on that server, and the server is ready with it."""

from typing import Any

import pytest

from agent.engine.dry_run import dry_run
from agent.hardware.functions import vf_addresses
from agent.machine import Link
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec, from_mapping
from cli.as_inventory import derive_inventory
from tests.sim import passes
from tests.sim.kernel import Kernel, Netdev
from tests.sim.machine_file import load
from tests.sim.passes import spec_of
from tests.zoo.walk import machines

PFS = ("0000:21:00.0", "0000:41:00.0", "0000:c1:00.0")
MACS = ("02:00:00:00:01:00", "02:00:00:00:02:00", "02:00:00:00:03:00")
NAMES = ("ens3", "ens1", "ens2")
FIRST, SECOND, THIRD = PFS


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    for place, (address, name, mac) in enumerate(zip(PFS, NAMES, MACS, strict=True)):
        kernel.add_nic(address, name, mac, node=place % 2)
    return kernel


def settle(kernel: Kernel, spec: NodeSpec) -> None:
    assert is_ready(passes.settle(kernel, spec).conditions)


def prepare(kernel: Kernel, *different: tuple[str, dict[str, Any]], rdma: bool = True) -> None:
    """A server in service: two VFs each, and an RDMA device for each physical function."""
    more = dict(different)
    nics = [
        {"name": f"n{i}", "select": {"pci": pci}, "mtu": 9000, "vfs": {"count": 2}, **more.get(pci, {})}
        for i, pci in enumerate(PFS)
    ]
    settle(kernel, spec_of(*nics))
    for name, pci in zip(NAMES, PFS, strict=True):
        kernel.netlink.add_altname(kernel.netdev(pci).ifindex, f"enp{int(pci[5:7], 16)}s0np0")
        if rdma:
            kernel.rdma.add(pci, f"roce_{name}", name, rate="200 Gb/sec (4X HDR)")


def executed(text: str) -> tuple[str, NodeSpec]:
    """The host's name and the spec that its data make; no other group is in the text."""
    scope: dict[str, Any] = {}
    exec(text, scope)  # noqa: S102  what pyinfra does with an inventory
    (group,) = [name for name in scope if not name.startswith("_")]
    (host,), data = scope[group]
    name, own = host if isinstance(host, tuple) else (host, {})
    return name, from_mapping({"node_name": name, **data, **own})


def written(kernel: Kernel, *chosen: str) -> tuple[str, NodeSpec]:
    """The text and its spec, which changes nothing on this server, and by which it is ready."""
    kernel.writes.clear()
    derived = derive_inventory(kernel.machine(), "gpu-01.example.net", "gpu-01", chosen)
    assert derived.remaining == ()
    name, spec = executed(derived.text)
    assert (name, spec.node_name) == ("gpu-01.example.net", "gpu-01")
    plan = dry_run(kernel.machine(), spec)
    assert (plan.changes, plan.errors) == ((), ())
    settle(kernel, spec)
    assert kernel.writes == []
    return derived.text, spec


def test_equal_nics_are_one_entry(kernel: Kernel) -> None:
    prepare(kernel)
    text, spec = written(kernel)
    (rails,) = spec.nics
    assert (rails.name, rails.mtu, rails.altnames) == ("rail{index}", 9000, ())
    assert (rails.select.keys(), rails.select.min, rails.select.max) == ({"vendor": "8086", "device": "10c9"}, 3, 3)
    assert rails.vfs is not None
    assert rails.vfs.count == 2
    assert rails.rdma is not None
    assert (rails.rdma.pf, rails.rdma.vfs, rails.rdma.rate) == (True, False, 200)
    assert (rails.rdma.link_layer, rails.rdma.gid_type) == ("Ethernet", "RoCE v2")
    assert f"# rail1: {SECOND} [8086:10c9] ens1 roce_ens1 (RoCE) NUMA node 1\n" in text


def test_a_nic_that_is_set_differently_has_an_entry_of_its_own(kernel: Kernel) -> None:
    prepare(kernel, (SECOND, {"mtu": 1500}))
    _, spec = written(kernel)
    rails, single = spec.nics
    assert (rails.select.each, rails.select.max, rails.select.without) == (True, 2, ("ens1",))
    assert (single.name, single.mtu) == ("ens1", 1500)
    assert single.select.keys() == {"pci": SECOND, "vendor": "8086", "device": "10c9"}


def test_a_card_outside_the_fabric_prevents_one_entry_for_its_kind(kernel: Kernel) -> None:
    kernel.add_nic("0000:01:00.0", "eno1", "02:00:00:00:09:00")
    kernel.routed.add("eno1")
    prepare(kernel)
    _, spec = written(kernel)
    assert [nic.select.pci for nic in spec.nics] == list(PFS)
    assert [nic.name for nic in spec.nics] == list(NAMES)


def carry_the_default_route(kernel: Kernel, pci: str) -> None:
    """By a VLAN on a bond."""
    below = kernel.netdev(pci).name
    kernel.enslave(pci, "bond0", "bond")
    for index, name in ((90, "bond0"), (91, "bond0.7")):
        kernel.netdevs[name] = Netdev("", Link(index, name, "02:00:00:00:01:00", "", 1500, True, True))
        kernel.tree.put(f"/sys/class/net/{name}/ifindex", str(index))
    kernel.tree.put("/sys/class/net/bond0/bonding/slaves", below)
    kernel.tree.put("/sys/class/net/bond0/upper_bond0.7/ifindex", "91")
    kernel.routed.add("bond0.7")


@pytest.mark.parametrize("rdma", [(), (SECOND,)])
def test_a_nic_below_the_default_route_is_the_node_s_own(kernel: Kernel, rdma: tuple[str, ...]) -> None:
    prepare(kernel, rdma=False)
    kernel.sriov.set_count(SECOND, 0)
    for pci, name in ((FIRST, "ens3"), *((pci, "ens1") for pci in rdma)):
        kernel.rdma.add(pci, f"roce_{name}", name)
    carry_the_default_route(kernel, SECOND)
    _, spec = written(kernel)
    assert [nic.select.pci for nic in spec.nics] == [FIRST, THIRD]


def test_the_only_nic_with_rdma_counts_although_the_node_uses_it(kernel: Kernel) -> None:
    prepare(kernel, rdma=False)
    kernel.sriov.set_count(SECOND, 0)
    kernel.rdma.add(SECOND, "roce_ens1", "ens1")
    carry_the_default_route(kernel, SECOND)
    _, spec = written(kernel)
    assert [nic.select.pci for nic in spec.nics if nic.rdma] == [SECOND]


def test_both_ports_of_roce_lag_are_nics() -> None:
    kernel = Kernel()
    for number, pci in enumerate(("0000:21:00.0", "0000:21:00.1")):
        kernel.add_nic(pci, f"p1p{number}", f"02:00:00:00:01:0{number}", total_vfs=0, driver="mlx5_core")
        kernel.netlink.set_link(kernel.netdev(pci).ifindex, up=True)
        kernel.enslave(pci, "bond0", "bond")
    kernel.tree.put("/sys/class/net/bond0/bonding/slaves", "p1p0 p1p1")
    kernel.rdma.add("0000:21:00.0", "mlx5_bond_0", "bond0")
    derived = derive_inventory(kernel.machine(), "n1", "n1", ())
    (rails,) = executed(derived.text)[1].nics
    assert rails.select.max == 2


@pytest.mark.parametrize("driver", ["vfio-pci", None])
def test_a_function_that_no_network_driver_has_is_left_out(kernel: Kernel, driver: str | None) -> None:
    kernel.unbind(SECOND)
    if driver:
        kernel.set_driver(SECOND, driver)
    derived = derive_inventory(kernel.machine(), "n1", "n1", ())
    assert [nic.select.pci for nic in executed(derived.text)[1].nics] == [FIRST, THIRD]


def test_nics_whose_vfs_have_addresses_of_their_own_are_not_alike(kernel: Kernel) -> None:
    groups = [[{"index": "1", "mac": f"02:00:00:00:07:0{number}"}] for number in range(2)]
    prepare(kernel, *((pci, {"vfs": {"count": 2, "groups": group}}) for pci, group in zip(PFS, groups, strict=False)))
    _, spec = written(kernel)
    assert [nic.select.pci for nic in spec.nics] == list(PFS)


def test_ports_of_a_kind_on_ethernet_and_on_infiniband_are_not_alike(kernel: Kernel) -> None:
    prepare(kernel, rdma=False)
    for name, pci, layer, rate in (
        ("ens3", FIRST, "InfiniBand", "400 Gb/sec (4X NDR)"),
        ("ens1", SECOND, "InfiniBand", "400 Gb/sec (4X NDR)"),
        ("ens2", THIRD, "Ethernet", "200 Gb/sec (4X HDR)"),
    ):
        kernel.rdma.add(pci, f"mlx5_{name}", name, link_layer=layer, rate=rate)
    _, spec = written(kernel)
    required = {nic.name: nic.rdma and (nic.rdma.link_layer, nic.rdma.rate) for nic in spec.nics}
    assert required == {"rail{index}": ("InfiniBand", 400), "ens2": ("Ethernet", 200)}


def test_a_port_that_is_down_is_not_required(kernel: Kernel) -> None:
    prepare(kernel)
    kernel.rdma.set_port("roce_ens1", state="1: DOWN", rate="10 Gb/sec (4X SDR)")
    _, spec = written(kernel)
    assert [nic.name for nic in spec.nics] == ["rail{index}"]
    assert spec.rdma.at_least == 2


def test_the_port_of_a_netdev_that_is_down_is_not_required(kernel: Kernel) -> None:
    prepare(kernel, (SECOND, {"state": "down"}))
    kernel.rdma.set_port("roce_ens1", state="1: DOWN")
    _, spec = written(kernel)
    assert {nic.name: nic.rdma is not None for nic in spec.nics} == {"rail{index}": True, "ens1": False}


def test_rdma_that_works_on_no_nic_is_not_required(kernel: Kernel) -> None:
    prepare(kernel)
    for name in NAMES:
        kernel.rdma.set_port(f"roce_{name}", state="1: DOWN")
    _, spec = written(kernel)
    assert [(nic.name, nic.rdma) for nic in spec.nics] == [("nic{index}", None)]


def test_rdma_devices_that_vfs_have_are_required(kernel: Kernel) -> None:
    prepare(kernel, rdma=False)
    for pci in PFS:
        for vf in vf_addresses(kernel.files, pci).values():
            kernel.rdma.add(vf, f"roce_{kernel.netdev(vf).name}", kernel.netdev(vf).name, rate="2.5 Gb/sec (1X SDR)")
    _, spec = written(kernel)
    (rails,) = spec.nics
    assert rails.rdma is not None
    assert (rails.rdma.pf, rails.rdma.vfs, rails.rdma.rate) == (False, True, 2)
    assert spec.rdma.at_least is None


def test_a_port_of_no_known_link_layer_is_required_without_one(kernel: Kernel) -> None:
    """AWS's EFA, which has no netdev."""
    prepare(kernel, rdma=False)
    kernel.sriov.set_count(FIRST, 0)
    kernel.tree.put(f"/sys/bus/pci/devices/{FIRST}/sriov_totalvfs", "0")
    kernel.lose_netdev(FIRST)
    kernel.rdma.add(FIRST, "rdmap33s0", None, node_type="7: unspecified", link_layer="Unknown", umad=False)
    kernel.tree.put("/sys/class/infiniband/rdmap33s0/ports/1/gids/0", "fe80:0000:0000:0000:0418:63ff:fe2b:0001")
    kernel.tree.put("/sys/class/infiniband/rdmap33s0/ports/1/gid_attrs/types/0", "IB/RoCE v1")
    _, spec = written(kernel, FIRST)
    (nic,) = spec.nics
    assert nic.rdma is not None
    assert (nic.rdma.link_layer, nic.rdma.gid_type, nic.rdma.rate) == (None, None, 100)


def test_a_pattern_gives_no_name_that_another_netdev_has(kernel: Kernel) -> None:
    kernel.netlink.rename(kernel.netdev(THIRD).ifindex, "rail0")
    prepare(kernel, (THIRD, {"mtu": 1500}), rdma=False)
    for name, pci in (("ens3", FIRST), ("ens1", SECOND), ("rail0", THIRD)):
        kernel.rdma.add(pci, f"roce_{name}", name)
    _, spec = written(kernel)
    assert [nic.name for nic in spec.nics] == ["rail-10c9-{index}", "rail0"]


def gpu(kernel: Kernel, address: str, numa: int, driver: bool) -> None:
    path = f"/sys/bus/pci/devices/{address}"
    for file, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(numa))):
        kernel.tree.put(f"{path}/{file}", text)
    if driver:
        kernel.tree.put(f"/proc/driver/nvidia/gpus/{address}/information", "")
        kernel.tree.folder("/sys/module/nvidia/parameters")


def test_gpus_that_the_driver_has_are_required(kernel: Kernel) -> None:
    prepare(kernel)
    gpu(kernel, "0000:1b:00.0", 0, driver=True)
    gpu(kernel, "0000:9b:00.0", 1, driver=True)
    kernel.tree.folder("/sys/module/nvidia_peermem/parameters")
    text, spec = written(kernel)
    assert spec.gpus is not None
    assert (spec.gpus.count, spec.gpus.peer_memory) == (2, True)
    assert "# GPU: 0000:9b:00.0 NUMA node 1\n" in text


def test_a_gpu_without_a_driver_is_only_named_in_a_comment(kernel: Kernel) -> None:
    prepare(kernel)
    gpu(kernel, "0000:1b:00.0", 0, driver=False)
    text, spec = written(kernel)
    assert spec.gpus is None
    known = "(NVIDIA's driver does not have it, so the key gpus does not count it)"
    assert f"# GPU: 0000:1b:00.0 NUMA node 0 {known}\n" in text


def test_a_server_without_a_fabric_nic_is_one_message() -> None:
    derived = derive_inventory(Kernel().machine(), "n1", "n1", ())
    assert executed(derived.text)[1].nics == ()
    assert "no NIC with SR-IOV or RDMA" in derived.text


def test_a_roce_port_that_is_active_while_its_netdev_is_down_is_not_required() -> None:
    """A spec cannot require both. Azure's MANA is such a device."""
    kernel = load(next(file for file in machines() if file.stem == "azure-mana")).kernel
    for netdev in kernel.netdevs.values():
        kernel.netlink.set_link(netdev.link.ifindex, up=False)
    _, spec = executed(derive_inventory(kernel.machine(), "n1", "n1", ()).text)
    assert [(nic.state, nic.rdma) for nic in spec.nics] == [("down", None)]


def test_a_nic_without_a_cable_is_described_as_before(kernel: Kernel) -> None:
    prepare(kernel)
    text, spec = written(kernel)
    kernel.lose_carrier(SECOND, slow=True)
    assert derive_inventory(kernel.machine(), "gpu-01.example.net", "gpu-01", ()).text == text
    assert [each.type for each in passes.settle(kernel, spec).conditions if each.status == "False"] == ["Carrier"]
