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
from tests.sim.passes import nic, spec_of
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
    nics = [nic(f"n{i}", pci, **{"mtu": 9000, "vfs": {"count": 2}, **more.get(pci, {})}) for i, pci in enumerate(PFS)]
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


# None: the two others are one entry.
@pytest.mark.parametrize(
    ("rdma", "taken"), [({FIRST}, {FIRST, THIRD}), ({FIRST, SECOND}, {FIRST, THIRD}), ({SECOND}, {SECOND, None})]
)
def test_a_nic_below_the_default_route_is_the_node_s_own_unless_it_is_the_only_one_with_rdma(
    kernel: Kernel, rdma: set[str], taken: set[str | None]
) -> None:
    prepare(kernel, rdma=False)
    kernel.sriov.set_count(SECOND, 0)
    for pci in rdma:
        kernel.rdma.add(pci, f"roce_{kernel.netdev(pci).name}", kernel.netdev(pci).name)
    carry_the_default_route(kernel, SECOND)
    _, spec = written(kernel)
    assert {nic.select.pci for nic in spec.nics} == taken
    assert {nic.select.pci for nic in spec.nics if nic.rdma} == rdma & taken


def test_a_function_without_a_driver_is_left_out(kernel: Kernel) -> None:
    kernel.unbind(SECOND)
    starter = derive_inventory(kernel.machine(), "n1", "n1", ())
    assert [nic.select.pci for nic in executed(starter.text)[1].nics] == [FIRST, THIRD]


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


def test_a_pattern_gives_no_name_that_another_netdev_has(kernel: Kernel) -> None:
    kernel.netlink.rename(kernel.netdev(THIRD).ifindex, "rail0")
    prepare(kernel, (THIRD, {"mtu": 1500}), rdma=False)
    for name, pci in (("ens3", FIRST), ("ens1", SECOND), ("rail0", THIRD)):
        kernel.rdma.add(pci, f"roce_{name}", name)
    _, spec = written(kernel)
    assert [nic.name for nic in spec.nics] == ["rail-10c9-{index}", "rail0"]


@pytest.mark.parametrize("driver", [True, False])
def test_gpus_that_the_driver_has_are_required_and_others_named_in_a_comment(kernel: Kernel, driver: bool) -> None:
    prepare(kernel)
    for file, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "0")):
        kernel.tree.put(f"/sys/bus/pci/devices/0000:1b:00.0/{file}", text)
    if driver:
        kernel.tree.put("/proc/driver/nvidia/gpus/0000:1b:00.0/information", "")
        kernel.tree.folder("/sys/module/nvidia/parameters")
        kernel.tree.folder("/sys/module/nvidia_peermem/parameters")
    text, spec = written(kernel)
    assert (spec.gpus and (spec.gpus.count, spec.gpus.peer_memory)) == ((1, True) if driver else None)
    (comment,) = [line for line in text.splitlines() if "# GPU: 0000:1b:00.0 NUMA node 0" in line]
    assert ("driver does not have it" in comment) is not driver


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
    kernel.carriers.lose(SECOND, slow=True)
    assert derive_inventory(kernel.machine(), "gpu-01.example.net", "gpu-01", ()).text == text
    assert [each.type for each in passes.settle(kernel, spec).conditions if each.status == "False"] == ["Carrier"]
