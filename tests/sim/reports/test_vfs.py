"""Public reports about VFs, tried by their triggers: docs/campaign/reports.md names each report."""

import errno
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from agent.state.wanted import derived_mac
from tests.sim.engine.one_nic import Node, is_settled, left, vf
from tests.sim.kernel import Kernel
from tests.sim.refusing import refusing
from tests.sim.tree import error
from tests.sim.two_nics import IPOIB, MAC0, NAME0, PF0, two_nics

FOUR = {"vfs": {"count": 4, "defaults": {"vlan": 0, "spoofchk": False, "trust": True, "max_tx_rate": 0}}, "mtu": 9000}
POD = ("default/pod",)


@pytest.mark.parametrize(
    "left_by_pod",
    [
        pytest.param({"vlan": 1000}, id="sriov-cni-119"),
        pytest.param({"vlan": 2002, "spoofchk": True}, id="sriov-network-device-plugin-97"),
        pytest.param({"spoofchk": True}, id="danm-246"),
        pytest.param({"max_tx_rate": 500}, id="xcp-networkd-136"),
        pytest.param({"trust": False, "mac": "00:00:00:00:01:04"}, id="ethernet-linux-ice-31"),
        pytest.param({"mac": "02:11:22:33:44:55"}, id="sriov-cni-125"),
        pytest.param({"mac": "02:00:00:00:00:0a"}, id="sriov-cni-214"),
        pytest.param({"mac": "00:00:00:00:00:00"}, id="sriov-cni-116"),
        # A virtual machine ended without its CNI plugin, and another VF has the address.
        pytest.param({"mac": derived_mac(MAC0, 3)}, id="sriov-network-device-plugin-685"),
    ],
)
def test_what_a_pod_left_on_its_vf_is_put_right(node: Node, left_by_pod: dict[str, Any]) -> None:
    node.follow(FOUR)
    before = node.kernel.vfs(PF0)
    assert (before[1].vlan, before[1].spoofchk, before[1].trust, before[1].max_tx_rate) == (0, False, True, 0)
    node.kernel.host.allocated = {vf(node, 1): POD}
    node.kernel.sriov.set(PF0, node.kernel.netdev(PF0), 1, **left_by_pod)
    node.follow(FOUR)
    assert node.kernel.vfs(PF0)[1] == evolve(before[1], **left_by_pod)
    node.kernel.host.allocated = {}
    assert is_settled(node.follow(FOUR))
    assert node.kernel.vfs(PF0) == before


def test_vfs_have_addresses_of_their_own_which_a_reboot_keeps(node: Node, tmp_path: Path) -> None:
    assert is_settled(node.follow({"vfs": {"count": 4}}))
    own = [each.mac for each in node.kernel.vfs(PF0)]
    assert len({*own, "00:00:00:00:00:00"}) == 4 + 1
    assert [node.kernel.netdev(function).mac for function in vf_addresses(node.kernel.files, PF0).values()] == own
    rebooted = Node(two_nics(), tmp_path / "originals.json")
    assert is_settled(rebooted.follow({"vfs": {"count": 4}}))
    assert [each.mac for each in rebooted.kernel.vfs(PF0)] == own


@pytest.mark.parametrize(
    ("name", "mtu"),
    [
        pytest.param("eth1", 9000, id="kube-ovn-3437"),
        pytest.param(f"{NAME0}v3", 9000, id="ib-sriov-cni-52"),
        pytest.param(f"{NAME0}v1", 1500, id="sriov-cni-316"),
        pytest.param("net1", 1400, id="ovn-kubernetes-5838"),
        pytest.param("temp_7", 1500, id="sriov-cni-126"),
        pytest.param("renamed0", 9000, id="containernetworking-plugins-766"),
    ],
)
def test_a_vf_that_comes_back_has_its_name_and_mtu_again(node: Node, name: str, mtu: int) -> None:
    node.follow(FOUR)
    first, last = vf(node, 1), vf(node, 3)
    for function in (first, last):
        node.kernel.netlink.set_link(node.kernel.netdev(function).ifindex, mtu=mtu)
        node.kernel.move_away(function)
    node.kernel.come_back(first, name)
    node.kernel.come_back(last, "eth1")
    assert is_settled(node.follow(FOUR))
    assert [(node.kernel.netdev(each).name, node.kernel.netdev(each).mtu) for each in (first, last)] == [
        (f"{NAME0}v1", 9000),
        (f"{NAME0}v3", 9000),
    ]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param("", id="sriov-network-operator-720"),
        pytest.param("E:ID_RENAMING=1\nE:ID_PROCESSING=1\nV:1", id="systemd-30138"),
    ],
)
def test_a_vf_that_udev_has_not_named_yet_is_left_alone(node: Node, entry: str) -> None:
    """A name such as eth0 may be another netdev's a moment later. udev makes an entry just before it renames."""
    node.follow(FOUR)
    function = vf(node, 1)
    node.kernel.udev.runs = False
    node.kernel.udev.lags(function)
    ifindex = node.kernel.netdev(function).ifindex
    node.kernel.tree.put(f"/run/udev/data/n{ifindex}", entry)
    node.kernel.netlink.set_link(ifindex, mtu=1500)
    node.kernel.writes.clear()
    node.follow(FOUR, passes=1)
    assert [written for written in node.kernel.writes if written[0] == f"{NAME0}v1"] == []
    node.kernel.udev.runs = True
    assert is_settled(node.follow(FOUR))
    assert node.kernel.netdev(function).mtu == 9000


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param("I:1\nE:ID_RENAMING=1\nV:1", id="systemd-24975"),
        pytest.param("I:1\nE:ID_PROCESSING=1\nV:1", id="systemd-35332"),
    ],
)
def test_a_vf_that_udev_looks_at_again_is_configured(node: Node, entry: str) -> None:
    """A rename in the initramfs stays in udev's entry for ever, and a rule's program may run for minutes."""
    node.follow(FOUR)
    link = node.kernel.netdev(vf(node, 1))
    node.kernel.tree.put(f"/run/udev/data/n{link.ifindex}", entry)
    node.kernel.netlink.set_link(link.ifindex, mtu=1500)
    assert is_settled(node.follow(FOUR))
    assert node.kernel.netdev(vf(node, 1)).mtu == 9000


@pytest.mark.parametrize("up", [pytest.param(False, id="systemd-40739"), pytest.param(True, id="lnst-344")])
def test_vfs_of_a_driver_that_makes_them_only_while_its_pf_is_up(node: Node, up: bool) -> None:
    """bnxt_sriov_configure returns 0 while the netdev is down, and makes none."""

    def fault(operation: str, where: str, value: str) -> OSError | None:
        if where.endswith("sriov_numvfs"):
            node.kernel.sriov.room = {} if node.kernel.netdev(PF0).up else {PF0: 0}
        return None

    node.kernel.fault = fault
    node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, up=up)
    assert is_settled(node.follow({"vfs": {"count": 4}}))
    assert len(node.kernel.vfs(PF0)) == 4


def test_a_vf_that_cannot_come_up_while_its_pf_is_down(node: Node) -> None:
    """ixgbevf answers ENETDOWN then (lxd 5041)."""
    node.kernel.fault = refusing(
        errno.ENETDOWN, f"set_link {NAME0}v", "up=True", when=lambda: not node.kernel.netdev(PF0).up
    )
    assert is_settled(node.follow({"vfs": {"count": 2, "defaults": {"state": "up"}}}))
    assert node.kernel.netdev(vf(node, 0)).up


@pytest.mark.parametrize(
    ("total", "refusal", "named"),
    [
        pytest.param(0, None, "SRIOV_EN, NUM_OF_VFS", id="sriov-network-device-plugin-601"),
        pytest.param(8, errno.ENOSPC, "out of MSI-X vectors", id="sriov-network-operator-492"),
        pytest.param(8, errno.ENOMEM, "pci=realloc", id="sriov-network-device-plugin-240"),
        pytest.param(8, errno.EOPNOTSUPP, "intel/ice/ddp/ice.pkg", id="incus-os-1305"),
        pytest.param(8, errno.ENOSPC, "msix_vec_per_pf_max", id="openshift-sriov-network-operator-1185"),
        pytest.param(8, errno.ENOENT, "num_vfs (kernel_module_options)", id="k8s-rdma-sriov-dev-plugin-19"),
        pytest.param(3, None, "lower vfs.count to 3", id="sriov-network-device-plugin-536"),
        pytest.param(8, errno.EIO, "sriov_numvfs: Input/output error", id="sriov-network-operator-548"),
        pytest.param(None, None, "SRIOV_EN, NUM_OF_VFS", id="openshift-sriov-network-operator-1243"),
        pytest.param(8, errno.EBUSY, "the device is being reset", id="k8s-rdma-sriov-dev-plugin-12"),
        pytest.param(0, None, "no SR-IOV as it is set up, the spec wants 4 VFs", id="nasty-614"),
        (8, errno.EPERM, "dmesg says how many it makes"),
        (None, None, "turn SR-IOV on in the BIOS"),
    ],
)
def test_vfs_that_cannot_be_made_are_named_with_the_remedy(
    tmp_path: Path, total: int | None, refusal: int | None, named: str
) -> None:
    kernel = Kernel()
    kernel.add_nic(PF0, NAME0, MAC0, total_vfs=total or 0)
    if total is None:  # SR-IOV is off until the next boot
        for file in ("sriov_totalvfs", "sriov_numvfs", "sriov_drivers_autoprobe"):
            kernel.tree.remove(f"/sys/bus/pci/devices/{PF0}/{file}")

    def fault(operation: str, where: str, value: str) -> OSError | None:
        refused = refusal and where.endswith("sriov_numvfs") and value != "0"
        return error(refusal or 0, where) if refused else None

    kernel.fault = fault
    result = Node(kernel, tmp_path / "originals.json").follow({"vfs": {"count": 4}})
    said = [
        *(f"{o.error} {o.change.remedy}" for o in result.outcomes),
        *(c.message + c.remedy for c in result.conditions),
    ]
    assert not is_ready(result.conditions)
    assert any(named in text for text in said), said


def test_a_vf_without_a_vlan_has_no_protocol_of_one_either(node: Node) -> None:
    """The driver ignores 802.1ad for VLAN 0 (nmstate 2486)."""
    node.kernel.sriov.able.add(PF0)
    defaults = {"vlan": 100, "vlan_protocol": "802.1ad"}
    assert is_settled(node.follow({"vfs": {"count": 3, "defaults": defaults, "groups": [{"index": "2", "vlan": 0}]}}))
    assert [(vf.vlan, vf.vlan_protocol) for vf in node.kernel.vfs(PF0)] == [(100, "802.1ad")] * 2 + [(0, "802.1Q")]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EPROTONOSUPPORT])
def test_a_check_that_the_driver_does_not_know_is_named_and_all_else_is_set(node: Node, number: int) -> None:
    """A BlueField's VFs have no spoofchk, not even to turn it off (https://github.com/lxc/incus/pull/2021).

    mlx4 has another errno for what its firmware lacks (mlx4_set_vf_spoofchk).
    """
    node.kernel.fault = refusing(number, "set_vf", "spoofchk")
    made = node.follow({"vfs": {"count": 2, "defaults": {"spoofchk": False, "vlan": 7}}})
    refused = [each for each in made.outcomes if each.result != "applied"]
    assert {(each.change.field, each.result) for each in refused} == {("spoofchk", "unsupported")}
    assert all("spoofchk out" in each.remedy for each in refused), refused
    assert [each.vlan for each in node.kernel.vfs(PF0)] == [7, 7]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        pytest.param({"min_tx_rate": 100, "max_tx_rate": 200}, "does not support min_tx_rate", id="sriov-cni-107"),
        pytest.param({"max_tx_rate": 5000}, "cannot set max_tx_rate", id="k8s-rdma-sriov-dev-plugin-21"),
    ],
)
def test_a_rate_that_the_driver_does_not_know_is_named(node: Node, rates: dict[str, Any], said: str) -> None:
    node.kernel.fault = refusing(errno.EOPNOTSUPP, "set_vf", "max_tx_rate", "5000")
    outcomes = [each for each in node.follow({"vfs": {"count": 2, "defaults": rates}}).outcomes if each.error]
    assert {each.result for each in outcomes} == {"unsupported"}
    assert all(said in each.error and "take m" in each.remedy for each in outcomes)


@pytest.mark.parametrize(
    ("group", "waits"),
    [
        pytest.param("999", False, id="sriov-network-device-plugin-451"),
        # KubeVirt's pod is given the group long before the virtual machine opens it.
        pytest.param("102", True, id="kubevirt-11412"),
    ],
)
def test_a_group_of_the_boot_before_is_a_user_only_by_its_number(node: Node, group: str, waits: bool) -> None:
    """The kubelet remembers the devices of a pod over a reboot, which numbers the groups anew."""
    node.follow({"vfs": {"count": 4, "defaults": {"driver": "vfio-pci"}}})
    node.kernel.host.allocated = {group: POD}
    why = [error for field, _, error in left(node.follow({"vfs": {"count": 6}})) if field == "count"]
    assert [f"default/pod by IOMMU group {group} ({PF0}#1)" in error for error in why] == [True] * waits
    assert len(node.kernel.vfs(PF0)) == (4 if waits else 6)


def test_a_vf_with_a_trunk_of_vlans_gets_no_vlan_0(node: Node) -> None:
    """Its driver refuses each VLAN then, also 0, which it has (sriov-cni 291)."""
    node.kernel.fault = refusing(errno.EPERM, "set_vf", "vlan")
    assert is_settled(node.follow({"vfs": {"count": 2, "defaults": {"trust": True, "vlan": 0}}}))
    assert is_settled(node.follow(None))
    assert {(each.vlan, each.trust) for each in node.kernel.vfs(PF0)} <= {(0, False)}


@pytest.mark.parametrize(
    ("driver", "user"),
    [
        pytest.param("netdevice", "another network namespace", id="kubernetes-104099"),
        pytest.param("vfio-pci", "qemu (pid 7)", id="kubernetes-109595"),
    ],
)
def test_a_vf_of_a_pod_that_the_kubelet_has_forgotten_is_in_use(node: Node, driver: str, user: str) -> None:
    """It forgets a pod that ends too early, and all of them when it starts."""
    vfs = {"count": 4, "defaults": {"driver": driver, "vlan": 7}}
    node.follow({"vfs": vfs})
    if driver == "vfio-pci":
        node.kernel.host.open["/dev/vfio/102"] = (user,)
    else:
        node.kernel.move_away(vf(node, 1))
    node.kernel.sriov.set(PF0, node.kernel.netdev(PF0), 1, vlan=9)
    why = [error for field, _, error in left(node.follow({"vfs": {**vfs, "count": 6}})) if field == "count"]
    assert [f" {user} ({PF0}#1)" in error for error in why] == [True]
    assert [each.vlan for each in node.kernel.vfs(PF0)] == [7, 9, 7, 7]


def test_vfs_that_the_spec_does_not_mention_are_left_alone(node: Node) -> None:
    """Their number and attributes are another program's (nmstate 2037)."""
    node.kernel.sriov.set_count(PF0, 3)
    node.kernel.sriov.set(PF0, node.kernel.netdev(PF0), 1, vlan=9)
    assert is_settled(node.follow({"mtu": 9000}))
    assert [each.vlan for each in node.kernel.vfs(PF0)] == [0, 9, 0]
    assert {node.kernel.netdev(vf(node, index)).mtu for index in range(3)} == {1500}


def test_a_number_of_vfs_and_their_settings_can_change_at_once(node: Node) -> None:
    """The driver resets the VFs that there were (nmstate 1652)."""
    assert is_settled(node.follow({"vfs": {"count": 2, "defaults": {"state": "up", "vlan": 3}}}))
    assert is_settled(node.follow({"mtu": 9000, "vfs": {"count": 4, "defaults": {"state": "up", "vlan": 4}}}))
    netdevs = [node.kernel.netdev(vf(node, index)) for index in range(4)]
    assert {(each.up, each.mtu) for each in netdevs} == {(True, 9000)}
    assert {each.vlan for each in node.kernel.vfs(PF0)} == {4}


@pytest.mark.parametrize(
    ("defaults", "is_good"),
    [
        pytest.param({"vlan": 0}, True, id="sriov-cni-208"),
        pytest.param({"vlan": 0, "trust": True}, True, id="sriov-cni-285"),
        pytest.param({}, True, id="sriov-network-operator-274"),
        ({"spoofchk": False}, False),
    ],
)
def test_vfs_on_infiniband_have_no_vlan_and_no_mac_to_set(
    tmp_path: Path, defaults: dict[str, Any], is_good: bool
) -> None:
    kernel = Kernel()
    kernel.rdma.made_of_vfs[PF0] = {"prefix": "mlx5_", "link_layer": "InfiniBand"}
    kernel.add_nic(PF0, "ibp33s0", IPOIB, driver="mlx5_core")
    of_ethernet = ("vlan", "'mac'", "spoofchk", "tx_rate")
    kernel.fault = lambda operation, where, value: (
        error(errno.EOPNOTSUPP, where) if operation == "set_vf" and any(each in value for each in of_ethernet) else None
    )
    made = Node(kernel, tmp_path / "originals.json").follow({"vfs": {"count": 2, "defaults": defaults}})
    assert is_settled(made) is is_good
    assert all("take spoofchk out of the spec" in each.remedy for each in made.outcomes if each.error)


def test_a_vf_s_address_is_set_by_its_pf_and_never_on_its_netdev(node: Node) -> None:
    """Drivers refuse the latter to a VF without trust (sriov-cni 232)."""
    groups = [{"index": "0", "mac": "02:00:00:00:07:01"}]
    node.follow({"vfs": {"count": 2, "groups": groups}})
    groups[0]["mac"] = "02:00:00:00:07:02"
    assert is_settled(node.follow({"vfs": {"count": 2, "groups": groups}}))
    netdev = node.kernel.netdev(vf(node, 0))
    assert (node.kernel.vfs(PF0)[0].mac, netdev.mac, netdev.permanent_mac) == ("02:00:00:00:07:02",) * 3
    assert not [each for where, each in node.kernel.writes if where == netdev.name and "mac" in each]


def test_vfs_of_virtual_machines_have_addresses_before_they_are_given_away(node: Node) -> None:
    """With an address of zeros some cards send whatever a machine wants (openshift/sriov-network-operator 631)."""
    assert is_settled(node.follow({"mtu": 9000, "vfs": {"count": 2, "defaults": {"driver": "vfio-pci"}}}))
    assert node.kernel.netdev(PF0).mtu == 9000
    assert len({each.mac for each in node.kernel.vfs(PF0)} - {"00:00:00:00:00:00"}) == 2
    order = [value for where, value in node.kernel.writes if "'mac'" in value or where.endswith("drivers_probe")]
    assert ["mac" in each for each in order] == [True, True, False, False]


def test_vfs_that_somebody_has_made_by_hand_are_taken_over(node: Node) -> None:
    """A program that took them for unfinished work never came to an end (sriov-network-operator 306)."""
    node.kernel.sriov.set_count(PF0, 4)
    used = vf(node, 2)
    node.kernel.host.allocated = {used: POD}
    node.kernel.writes.clear()
    assert is_settled(node.follow({"vfs": {"count": 4}}))
    written = [where for where, _ in node.kernel.writes]
    assert not [where for where in written if where.endswith(("sriov_numvfs", f"{used}/driver/unbind"))]
