"""Public reports about what drivers answer, what others do to their devices, and how these come and go."""

import errno
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.engine.converge import Pass
from agent.hardware.config_space import max_read_request
from agent.hardware.functions import vf_addresses
from agent.machine import Link
from agent.report.verdict import is_ready
from tests.sim import config_space
from tests.sim.engine.one_nic import Node, is_settled
from tests.sim.kernel import Kernel
from tests.sim.passes import nic
from tests.sim.readiness import Node as Probed
from tests.sim.refusing import refusing
from tests.sim.two_nics import IPOIB, MAC0, NAME0, PF0, PF1, two_nics

PCI = "/sys/bus/pci/devices"


def said(result: Pass) -> str:
    of_changes = (f"{o.error} {o.remedy}" for o in result.outcomes if o.result != "applied")
    return " ".join([*of_changes, *(f"{c.message} {c.remedy}" for c in result.conditions)])


# --- what a driver refuses, or takes back -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtu", "partition", "kept"),
    [pytest.param(4092, 2044, 2044, id="opensm-31"), pytest.param(65520, 4092, 1500, id="networkmanager-334")],
)
def test_an_mtu_that_ipoib_cannot_have_is_named(tmp_path: Path, mtu: int, partition: int, kept: int) -> None:
    kernel = Kernel(partition_mtu=partition)
    kernel.add_nic(PF0, "ibp33s0", IPOIB, driver="mlx5_core")
    result = Node(kernel, tmp_path / "originals.json").follow({"mtu": mtu})
    assert not is_ready(result.conditions)
    assert f"it stays {kept}" in said(result)
    assert "partitions.conf" in said(result)
    kernel.partition_mtu = 4092
    assert is_settled(Node(kernel, tmp_path / "more.json").follow({"mtu": 4092}))


@pytest.mark.parametrize(
    ("most", "wanted", "xdp", "remedy"),
    [
        pytest.param(3502, 9200, False, "lower mtu", id="csit-4048"),
        pytest.param(9216, 9222, False, "lower mtu", id="csit-4098"),
        (3498, 9000, True, "lower mtu, or detach the XDP program that limits it (`ip link`)"),
    ],
)
def test_an_mtu_beyond_what_the_kernel_takes_is_named_with_the_largest(
    kernel: Kernel, tmp_path: Path, most: int, wanted: int, xdp: bool, remedy: str
) -> None:
    """Since Linux 4.19 the kernel tells it; bnxt lowers it for an XDP program."""
    netdev = kernel.netdevs[NAME0]
    netdev.link = evolve(netdev.link, max_mtu=most, xdp=xdp)
    result = Node(kernel, tmp_path / "originals.json").follow({"mtu": wanted})
    (outcome,) = [each for each in result.outcomes if each.result != "applied"]
    error = f"its netdev {NAME0} has an MTU of {most} at most, the spec wants {wanted}"
    assert (outcome.result, outcome.error, outcome.remedy) == ("blocked", error, remedy)
    assert is_settled(Node(kernel, tmp_path / "more.json").follow({"mtu": most}))


def test_a_read_request_size_that_a_reset_takes_back_is_set_again(node: Node) -> None:
    """It does not persist (nic-configuration-operator 131)."""
    kernel = node.kernel
    for _ in range(2):
        assert is_settled(node.follow({"max_read_request": 4096}))
        assert max_read_request(kernel.config[f"{PCI}/{PF0}/config"][config_space.DEVICE_CONTROL + 1] << 8) == 4096
        kernel.config[f"{PCI}/{PF0}/config"] = config_space.made()


def test_a_slot_that_is_slower_than_its_card_only_warns(kernel: Kernel) -> None:
    """A card of PCIe 5 in a slot of PCIe 4 is no reason to take the node out of service (sichek 122)."""
    for file, text in (("current_link_speed", "16.0 GT/s PCIe"), ("max_link_speed", "32.0 GT/s PCIe")):
        kernel.tree.put(f"{PCI}/{PF0}/{file}", text)
    node = Probed(kernel)
    judged = node.look()
    assert (judged["PcieLink"].status, judged["PcieLink"].severity) == ("False", "warn")
    assert "at 16 GT/s" in judged["PcieLink"].message
    assert is_ready(judged.values())
    assert node.last is not None
    assert [nic.ready for nic in node.last.nics] == [True, True]


@pytest.mark.parametrize(
    ("name", "number", "result"),
    [
        pytest.param("adaptive_rx", errno.EOPNOTSUPP, "unsupported", id="amzn-drivers-60"),
        pytest.param("adaptive_tx", errno.EOPNOTSUPP, "unsupported", id="amzn-drivers-305"),
        pytest.param("rx_frames", 524, "unsupported", id="perfsonar-toolkit-297"),
        ("rx_frames", errno.EINVAL, "failed"),
    ],
)
def test_a_setting_that_a_driver_does_not_know_is_unsupported(node: Node, name: str, number: int, result: str) -> None:
    """Some drivers answer with a number that only the kernel knows (ENOTSUPP)."""
    node.kernel.fault = refusing(number, "ethtool", name)
    made = node.follow({"coalescing": {name: 1 if name == "rx_frames" else True}})
    (outcome,) = [each for each in made.outcomes if each.result != "applied"]
    assert outcome.result == result
    assert "Unknown error" not in outcome.error
    assert (f"take {name} out of the spec" in outcome.remedy) is (result == "unsupported")


def test_roce_settings_for_a_port_of_infiniband_are_said_to_be_unsupported(tmp_path: Path) -> None:
    """The spec gave them to a card that may be in InfiniBand mode or in Ethernet mode (nic-configuration-operator 30)."""
    kernel = Kernel()
    kernel.add_nic(PF0, "ibp33s0", IPOIB, driver="mlx5_core")
    kernel.rdma.add(PF0, "mlx5_0", None, link_layer="InfiniBand")
    roce = {"trust": "dscp", "pfc": "3", "cm_tos": 106, "traffic_class": 106}
    made = Node(kernel, tmp_path / "originals.json").follow({"roce": roce})
    refused = [each for each in made.outcomes if each.result != "applied"]
    assert {each.change.field: each.result for each in refused} == dict.fromkeys(roce, "unsupported")
    assert "it is InfiniBand" in said(made)


def test_a_number_of_vfs_that_the_driver_cannot_set_now_is_set_later(kernel: Kernel, tmp_path: Path) -> None:
    """i40e is still busy with another request (openshift/sriov-network-operator 1182)."""
    busy = iter([True] * 2)
    kernel.fault = refusing(errno.EAGAIN, "sriov_numvfs", when=lambda: next(busy, False))
    node = Node(kernel, tmp_path / "originals.json")
    assert not is_ready(node.follow({"vfs": {"count": 2}}, passes=1).conditions)
    assert is_settled(node.follow({"vfs": {"count": 2}}))


def test_no_vfs_are_made_while_the_firmware_of_their_pf_is_dead(node: Node) -> None:
    """mlx5 gives the netdev up, and each new VF would wait two minutes for the firmware (doca-platform 62)."""
    kernel = node.kernel
    kernel.lose_netdev(PF0)
    result = node.follow({"vfs": {"count": 4}})
    assert not [path for path, _ in kernel.writes if path.endswith("sriov_numvfs")]
    assert "its netdev is not there" in said(result)
    kernel.bind(PF0, NAME0, MAC0)
    assert is_settled(node.follow({"vfs": {"count": 4}}))


@pytest.mark.parametrize(
    "number", [pytest.param(errno.EIO, id="kubevirt-2444"), pytest.param(errno.EINVAL, id="linux-uek-20")]
)
def test_a_pf_that_makes_no_vfs_does_not_keep_the_others_from_theirs(node: Node, number: int) -> None:
    kernel = node.kernel
    kernel.fault = refusing(number, f"{PCI}/{PF0}/sriov_numvfs 2")
    nics = [nic(f"rail{n}", pf, vfs={"count": 2}) for n, pf in enumerate((PF0, PF1))]
    result = node.follow(None, nics=nics)
    assert len(kernel.vfs(PF1)) == 2
    assert {outcome.change.device for outcome in result.outcomes if outcome.result != "applied"} == {PF0}


def test_a_vf_whose_driver_fails_at_first_is_bound_later(node: Node) -> None:
    """The driver's probe fails until the firmware is ready, and only dmesg says so (rshim-user-space 369)."""
    node.kernel.sriov.unready.add(PF0)
    result = node.follow({"vfs": {"count": 2}})
    assert "dmesg" in said(result)
    assert not is_ready(result.conditions)
    node.kernel.sriov.unready.clear()
    assert is_settled(node.follow({"vfs": {"count": 2}}))


@pytest.mark.parametrize(
    ("vfio", "iommu", "said_of_it"),
    [
        pytest.param(True, True, "", id="kata-containers-6843"),
        pytest.param(True, False, "intel_iommu=on", id="cloud-hypervisor-856"),
    ],
)
def test_a_vf_without_a_driver_is_bound_to_vfio_or_it_is_said_why_not(
    kernel: Kernel, tmp_path: Path, vfio: bool, iommu: bool, said_of_it: str
) -> None:
    kernel.tree.put(f"{PCI}/{PF0}/sriov_drivers_autoprobe", "0")
    kernel.sriov.set_count(PF0, 1)
    (vf,) = vf_addresses(kernel.files, PF0).values()
    if vfio:
        kernel.load_vfio()
    if not iommu:
        kernel.without_iommu(vf)
    result = Node(kernel, tmp_path / "originals.json").follow({"vfs": {"count": 1, "defaults": {"driver": "vfio-pci"}}})
    assert (kernel.driver(vf), is_ready(result.conditions)) == (("", False) if said_of_it else ("vfio-pci", True))
    assert said_of_it in said(result)
    assert kernel.files.read(f"{PCI}/{vf}/driver_override") == ("(null)" if said_of_it else "vfio-pci")


@pytest.mark.parametrize(
    ("separate", "wanted", "instead"),
    [
        pytest.param(True, {"combined": 1}, {"rx": 1, "tx": 1}, id="firedancer-1427"),
        pytest.param(False, {"rx": 1, "tx": 1}, {"combined": 1}, id="the-other-way-round"),
    ],
)
def test_channels_that_a_driver_does_not_have_are_named_with_those_it_has(
    kernel: Kernel, tmp_path: Path, separate: bool, wanted: dict[str, int], instead: dict[str, int]
) -> None:
    kernel.ethtool.separate_only = {PF0} if separate else set()
    result = Node(kernel, tmp_path / "originals.json").follow({"channels": wanted})
    assert not is_ready(result.conditions)
    assert f"give {' and '.join(instead)} channels instead" in said(result)
    result = Node(kernel, tmp_path / "more.json").follow({"channels": instead})
    assert is_settled(result), said(result)
    assert {name: each.value for name, each in kernel.ethtool.settings("channels", _index(kernel)).items()} == instead


def _index(kernel: Kernel) -> int:
    return kernel.netdev(PF0).ifindex


def test_for_its_vfs_guids_an_infiniband_pf_is_never_unbound(tmp_path: Path) -> None:
    """k8snetworkplumbingwg/sriov-network-operator 797."""
    kernel = Kernel()
    kernel.rdma.made_of_vfs[PF0] = {"prefix": "mlx5_", "link_layer": "InfiniBand"}
    kernel.add_nic(PF0, "ibp33s0", IPOIB, driver="mlx5_core")
    node = Node(kernel, tmp_path / "originals.json")
    node.follow({"vfs": {"count": 2, "derive_guids": False}})
    vfs = vf_addresses(kernel.files, PF0)
    result = node.follow({"vfs": {"count": 2}})
    assert is_settled(result), said(result)
    assert all(vf.node_guid for vf in kernel.vfs(PF0))
    unbound = {value for path, value in kernel.writes if path.endswith("/unbind")}
    assert unbound == set(vfs.values())


@pytest.mark.parametrize("by", [pytest.param("netdev", id="cubecos-517"), pytest.param("mac", id="digitalrebar-1187")])
def test_of_two_netdevs_at_one_pci_address_the_second_is_never_taken_for_the_first(tmp_path: Path, by: str) -> None:
    kernel = two_nics()
    second = Link(0, "eth9", "02:00:00:00:09:01", "02:00:00:00:09:01", 1500, False, False)
    kernel.register(PF0, second)
    for number, name in enumerate((NAME0, "eth9")):
        kernel.tree.put(f"/sys/class/net/{name}/dev_port", str(number))
    select = {"netdev": "eth9"} if by == "netdev" else {"mac": second.mac}
    refused = Node(kernel, tmp_path / "originals.json").follow({"select": select, "mtu": 9000})
    assert "is a further port of" in said(refused)
    assert {netdev.link.mtu for netdev in kernel.netdevs.values()} == {1500}
    assert is_settled(Node(kernel, tmp_path / "more.json").follow({"mtu": 9000}))
    assert (kernel.netdevs[NAME0].link.mtu, kernel.netdevs["eth9"].link.mtu) == (9000, 1500)


# --- switchdev ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "port"),
    [
        pytest.param("aaa0", "pf0vf0", id="nic-configuration-operator-339"),
        pytest.param("eth0", "c1pf0vf0", id="sriovnet-72"),
        pytest.param("aaa0", "pf0sf0", id="nic-configuration-operator-474"),
    ],
)
def test_a_pf_is_not_mistaken_for_a_representor_that_comes_first(tmp_path: Path, first: str, port: str) -> None:
    """The mode is changed by hand, while the VFs have no driver (one-deploy 214)."""
    kernel = Kernel()
    kernel.add_nic(PF0, NAME0, MAC0, driver="mlx5_core")
    node = Node(kernel, tmp_path / "originals.json")
    nic = {"vfs": {"count": 2, "defaults": {"trust": True}}, "mtu": 9000, "altnames": ["rail0"]}
    assert is_settled(node.follow(nic))
    for vf in vf_addresses(kernel.files, PF0).values():
        kernel.unbind(vf)
    kernel.tree.put(f"/sys/class/net/{NAME0}/phys_port_name", "p0")
    kernel.register(PF0, Link(0, first, "02:00:00:00:09:00", "02:00:00:00:09:00", 1500, False, False), port)
    kernel.netlink.set_link(kernel.netdevs[NAME0].link.ifindex, mtu=1500)
    assert is_settled(node.follow(nic))
    assert (kernel.netdevs[NAME0].link.mtu, kernel.netdevs[first].link.mtu) == (9000, 1500)
    assert kernel.netdevs[first].link.altnames == ()
    assert {kernel.driver(vf) for vf in vf_addresses(kernel.files, PF0).values()} == {"mlx5_core"}


# --- what comes and goes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moved", [pytest.param("0000:22:00.0", id="coreboot-392"), pytest.param("0000:05:00.0", id="openmediavault-1888")]
)
def test_a_card_that_has_another_address_is_the_same_nic_by_its_mac(node: Node, moved: str) -> None:
    """A card in another slot shifts the numbers of the buses."""
    kernel = node.kernel
    nic: dict[str, Any] = {"select": {"mac": MAC0}, "vfs": {"count": 2}, "mtu": 9000}
    assert is_settled(node.follow(nic))
    kernel.remove_nic(PF0)
    gone = node.follow(nic)
    assert f"NIC rail0 (mac={MAC0}) is not there" in said(gone)
    assert not is_ready(gone.conditions)
    kernel.add_nic(moved, "enp34s0", MAC0)
    assert is_settled(node.follow(nic))
    assert (len(kernel.vfs(moved)), kernel.netdev(moved).mtu) == (2, 9000)
    assert f"this node has {moved}" in said(node.follow({"select": {"pci": PF0}}))


def test_a_function_without_a_driver_is_named_and_the_others_are_served(node: Node) -> None:
    """One port of a card has lost its driver (sriov-network-device-plugin 310).

    The driver may be loaded and have refused it, since its firmware does not start (innova2_flex_xcku15p_notes 8).
    """
    node.kernel.unbind(PF0)
    others = [{"name": "rail1", "select": {"pci": PF1}, "vfs": {"count": 2}}]
    result = node.follow(None, nics=[{"name": "rail0", "select": {"pci": PF0}, "mtu": 9000}, *others])
    assert [nic.ready for nic in result.nics] == [False, True]
    assert f"{PF0} netdev: absent -> present: " in said(result)
    assert "load the driver that creates its netdev" in said(result)
    assert len(node.kernel.vfs(PF1)) == 2
