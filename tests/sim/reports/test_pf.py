"""Public reports about PFs and their netdevs: how they are selected, what moves them, what their drivers refuse."""

import errno
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from tests.sim.engine.one_nic import Node, is_settled
from tests.sim.kernel import Kernel, no_fault
from tests.sim.passes import condition, nic
from tests.sim.readiness import Node as Probed
from tests.sim.refusing import refusing
from tests.sim.two_nics import MAC0, MAC1, NAME0, NAME1, PF0, PF1

IRQ = "smp_affinity_list"


def with_vfs(kernel: Kernel) -> Probed:
    """A node with probes, and two VFs of the first NIC."""
    return Probed(kernel, more={"nics": [nic("rail0", PF0, vfs={"count": 2})]})


# --- selection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param("bond", id="cloud-init-3316"), pytest.param("netvsc", id="cloud-init-2887")]
)
def test_members_of_one_master_with_one_address_are_told_by_their_permanent_ones(node: Node, kind: str) -> None:
    for function in (PF0, PF1):
        netdev = next(each for each in node.kernel.netdevs.values() if each.function == function)
        netdev.link = evolve(netdev.link, mac=MAC0)
        node.kernel.enslave(function, "bond0", kind)
    for mac, function in ((MAC0, PF0), (MAC1, PF1)):
        result = node.follow({"select": {"mac": mac}})
        assert [*result.want.nics] == [function]


def test_two_functions_with_one_permanent_address_are_named(tmp_path: Path) -> None:
    """Two VFs of one bond, as a cloud gives them to a machine (cloud-init 5794)."""
    kernel = Kernel()
    for function, name in ((PF0, NAME0), (PF1, NAME1)):
        kernel.add_nic(function, name, MAC0)
    result = Node(kernel, tmp_path / "originals.json").follow({"select": {"mac": MAC0}})
    missing = condition(result, "NicsPresent")
    assert (missing.status, is_ready(result.conditions)) == ("False", False)
    assert PF0 in missing.message
    assert PF1 in missing.message


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("rename3", id="vyos-1x-5338"),
        pytest.param("eth2", id="systemd-28929"),
        pytest.param("lan", id="systemd-32836"),
        # A name of udev's that the .link file was to replace: it is given in the initramfs, without that file.
        pytest.param("enp0s3", id="systemd-9006"),
        pytest.param("eno0", id="systemd-38789"),
        pytest.param("enp59s0f0np0", id="coreos-bugs-2578"),
        pytest.param("enp0s25f200", id="systemd-8869"),
        pytest.param("ens3", id="nixpkgs-71086"),
    ],
)
def test_a_pf_that_is_called_otherwise_is_the_same_nic(node: Node, name: str) -> None:
    nic = {"vfs": {"count": 2}, "mtu": 9000}
    node.follow(nic)
    node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, up=False)
    node.kernel.netlink.rename(node.kernel.netdev(PF0).ifindex, name)
    node.kernel.udev.send_event(name)
    assert is_settled(node.follow(nic))
    assert is_settled(node.follow({**nic, "select": {"netdev": NAME0}}))
    assert (node.kernel.netdev(PF0).name, len(node.kernel.vfs(PF0))) == (name, 2)


# --- what moves a PF ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_as", [pytest.param("eth1", id="dranet-33"), pytest.param(NAME0, id="dranet-245")])
def test_a_pf_that_was_in_a_pod_has_its_settings_and_address_again(node: Node, back_as: str) -> None:
    nic = {"mtu": 9000, "rail": 0, "addresses": ["10.0.0.1/24"]}
    assert is_settled(node.follow(nic))
    node.kernel.move_away(PF0)
    node.follow(nic)
    node.kernel.come_back(PF0, back_as)
    link = node.kernel.netdev(PF0)
    node.kernel.netlink.set_link(link.ifindex, mtu=1500)
    assert is_settled(node.follow({**nic, "select": {"netdev": NAME0}}))
    link = node.kernel.netdev(PF0)
    assert (link.up, link.mtu) == (True, 9000)
    assert node.kernel.routing.assigned[link.ifindex] == ("10.0.0.1/24",)


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        pytest.param(9000, 1500, id="sriov-network-operator-700"),
        pytest.param(1500, 9000, id="sriov-network-operator-530"),
        pytest.param(9000, 4200, id="sriov-network-operator-489"),
    ],
)
def test_the_mtu_of_a_pf_and_its_vfs_can_fall_and_rise(node: Node, before: int, wanted: int) -> None:
    node.follow({"mtu": before, "vfs": {"count": 2}})
    assert is_settled(node.follow({"mtu": wanted, "vfs": {"count": 2}}))
    functions = [PF0, *vf_addresses(node.kernel.files, PF0).values()]
    assert {node.kernel.netdev(function).mtu for function in functions} == {wanted}


def test_of_fewer_vfs_none_is_left_over(node: Node) -> None:
    """nmstate 1520."""
    vfs = {"count": 4, "defaults": {"vlan": 7}}
    assert is_settled(node.follow({"mtu": 9000, "vfs": vfs}))
    assert is_settled(node.follow({"mtu": 9000, "vfs": {**vfs, "count": 2}}))
    functions = {PF0, PF1, *vf_addresses(node.kernel.files, PF0).values()}
    assert {netdev.function for netdev in node.kernel.netdevs.values()} == functions
    assert [each.vlan for each in node.kernel.vfs(PF0)] == [7, 7]


# --- what a driver refuses, or does late -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "number"),
    [
        pytest.param("vlan", errno.EAGAIN, id="ethernet-linux-i40e-4"),
        pytest.param("mac", errno.EBUSY, id="ethernet-linux-iavf-2"),
        pytest.param("trust", errno.EBUSY, id="dpdk-64"),
    ],
)
def test_a_vf_that_is_still_being_reset_is_set_in_a_later_pass(node: Node, field: str, number: int) -> None:
    refusals = iter([True] * 2)
    node.kernel.fault = refusing(number, "set_vf", field, when=lambda: next(refusals, False))
    vfs = {"count": 2, "defaults": {"vlan": 7, "trust": True}}
    assert is_settled(node.follow({"vfs": vfs}))
    assert [(vf.vlan, vf.trust) for vf in node.kernel.vfs(PF0)] == [(7, True)] * 2


@pytest.mark.parametrize(
    "number", [pytest.param(errno.EIO, id="irqbalance-271"), pytest.param(errno.EPERM, id="irqbalance-336")]
)
def test_an_interrupt_that_the_kernel_places_itself_is_named_and_left_alone(node: Node, number: int) -> None:
    node.kernel.fault = refusing(number, IRQ)
    result = node.follow({}, irqs={"irqbalance": "untouched"})
    assert is_ready(result.conditions)
    said = condition(result, "QueueInterrupts")
    assert said.message.startswith("the kernel places these interrupts")


@pytest.mark.parametrize(
    ("driver", "actions", "pinned"),
    [
        pytest.param("ena", ["ena-mgmnt@pci:{}", "ens5-Tx-Rx-0", "ens5-Tx-Rx-1"], 2, id="amzn-drivers-316"),
        pytest.param("gve", ["eth%d-ntfy-block.0", "eth%d-ntfy-block.1", "gve-mgmnt@pci:{}"], 2, id="gve-30"),
        pytest.param("gve", [f"gve-ntfy-blk{n}@pci:{{}}" for n in range(4)], 4, id="compute-image-packages-882"),
        pytest.param("ice", ["ice-{}:misc", "ice-eth1-TxRx-0", "ice-eth1-TxRx-10"], 2, id="seapath-984"),
        pytest.param("mlx5_core", ["mlx5_async0@pci:{}", "mlx5_comp0@pci:{}"], 1, id="irqbalance-275"),
        pytest.param("idpf", ["idpf-Mailbox-0", "idpf-ens4-TxRx-1", "idpf-ens4-Tx-2"], 2, id="go-tpm-tools-846"),
        ("hns3", ["hclge-misc-{}", "hns3-{}-TxRx-0", "hns3-{}-Rx-0", "hns3-{}-Tx-0"], 3),
        pytest.param(
            "ice", ["ice-{}:misc", "ice-ens2f1-TxRx-0-1", "ice-ens2f1-TxRx-2-3"], 2, id="ethernet-linux-ice-16"
        ),
        pytest.param("mana", ["mana_hwc@pci:{}", "mana_q0@pci:{}", "mana_q1@pci:{}"], 2, id="seastar-3196"),
        pytest.param("mlx4_core", ["mlx4-async@pci:{}", "mlx4-1@{}", "mlx4-2@{}"], 2, id="seastar-621"),
        ("octeon_ep", ["octeon_ep-oei", "ens4-q0", "ens4-q1"], 2),
    ],
)
def test_the_queues_interrupts_are_found_by_the_names_that_a_driver_gives_them(
    node: Node, driver: str, actions: list[str], pinned: int
) -> None:
    node.kernel.interrupts.free(PF0)
    node.kernel.set_driver(PF0, driver)
    node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, up=True)
    node.kernel.interrupts.free(PF0)
    for number, action in enumerate(actions, 300):
        node.kernel.interrupts.request(PF0, number, action.format(PF0))
    assert is_ready(node.follow({}, irqs={"irqbalance": "untouched"}).conditions)
    affinities = [node.kernel.files.read(f"/proc/irq/{300 + number}/{IRQ}") for number in range(len(actions))]
    assert sum(affinity in ("0", "1") for affinity in affinities) == pinned
    assert set(affinities) <= {"0", "1", "0-1"}


def test_a_vf_whose_driver_never_gets_an_answer_of_its_pf_is_named(kernel: Kernel) -> None:
    """iavf tries again and again, and makes no netdev (ethernet-linux-i40e 26)."""
    probed = with_vfs(kernel)
    probed.look()
    kernel.lose_netdev(vf_addresses(kernel.files, PF0)[1])
    fresh = with_vfs(kernel)
    fresh.look()
    fresh.now += 60
    lost = fresh.look()["VfNetdevs"]
    assert (lost.status, lost.reason) == ("False", "NetdevMissing")
    assert f"{PF0}#1" in lost.message


def test_vfs_whose_netdevs_come_late_are_configured_then(node: Node) -> None:
    nic: dict[str, Any] = {"mtu": 9000, "vfs": {"count": 2, "defaults": {"state": "up"}}}
    node.follow(nic)
    late = vf_addresses(node.kernel.files, PF0)[1]
    mac = node.kernel.netdev(late).mac
    node.kernel.lose_netdev(late)
    node.follow(nic, passes=1)
    node.kernel.bind(late, f"{NAME0}v1", mac, driver="igbvf")
    assert is_settled(node.follow(nic))
    link = node.kernel.netdev(late)
    assert (link.mtu, link.up, link.name) == (9000, True, f"{NAME0}v1")


def test_vfs_that_are_there_only_after_their_number_are_configured_then(node: Node) -> None:
    """On s390 writing the number does not wait for the VFs (sriov-network-operator 1015)."""
    tree, link = node.kernel.tree, f"/sys/bus/pci/devices/{PF0}/virtfn1"
    held: list[str] = []

    def late(operation: str, where: str, value: str) -> None:
        if link in tree.links:
            held.append(tree.links[link])
            tree.remove(link)

    node.kernel.fault = late
    vfs = {"vfs": {"count": 3, "defaults": {"vlan": 7}}}
    assert not is_settled(node.follow(vfs))
    node.kernel.fault = no_fault
    tree.link(link, held[-1])
    assert is_settled(node.follow(vfs))
    assert [each.vlan for each in node.kernel.vfs(PF0)] == [7, 7, 7]


def test_a_vf_that_is_nowhere_after_its_pod_is_named(kernel: Kernel) -> None:
    """It is bound to iavf, and no network namespace has its netdev (sriov-cni 349)."""
    probed = with_vfs(kernel)
    probed.look()
    vf = vf_addresses(kernel.files, PF0)[1]
    kernel.move_away(vf)
    probed.now += 60
    assert probed.look()["VfNetdevs"].status == "True"
    kernel.lose_away(vf)
    assert probed.look()["VfNetdevs"].status == "True"
    probed.now += 60
    lost = probed.look()["VfNetdevs"]
    assert (lost.reason, f"{PF0}#1" in lost.message) == ("NetdevMissing", True)


@pytest.mark.parametrize(
    ("lasts", "reason"), [pytest.param(1, "NetdevUnstable", id="ethernet-linux-ice-57"), (40, "AllCreated")]
)
def test_a_vf_whose_driver_creates_ever_new_netdevs_is_named(kernel: Kernel, lasts: int, reason: str) -> None:
    """Its PF refuses what iavf asks for, and iavf removes the netdev and begins anew."""
    probed = with_vfs(kernel)
    probed.look()
    vf = vf_addresses(kernel.files, PF0)[1]
    for _ in range(8):
        kernel.unbind(vf)
        probed.look()
        kernel.sriov.probe(vf)
        probed.look()
        probed.now += lasts
        judged = probed.look()["VfNetdevs"]
    assert judged.reason == reason
    assert (f"{PF0}#1" in judged.message) is (reason == "NetdevUnstable")
    probed.now += 60
    assert probed.look()["VfNetdevs"].reason == "AllCreated"


@pytest.mark.parametrize(
    ("lasts", "link"),
    [pytest.param(4, "quarantined", id="azure-docs-100444"), pytest.param(86400, "good", id="lis-next-556")],
)
def test_a_nic_that_is_taken_away_and_given_back_is_quarantined_only_if_that_is_often(lasts: int, link: str) -> None:
    """A cloud takes the VF of a machine away to service its host."""
    probed = Probed.with_two_nics()
    for _ in range(8):
        probed.kernel.unbind(PF0)
        probed.now += 1
        probed.look()
        probed.kernel.bind(PF0, NAME0, MAC0)
        assert is_ready(probed.look().values())
        assert probed.kernel.netdev(PF0).up
        probed.now += lasts
    assert probed.last is not None
    assert probed.last.nics[0].link == link


def test_a_name_that_udev_gives_for_a_moment_is_no_other_nic(node: Node) -> None:
    """Two netdevs change their names, so one is called rename16 meanwhile (systemd 23036)."""
    nic = {"mtu": 9000, "vfs": {"count": 2}, "select": {"netdev": NAME0}}
    assert is_settled(node.follow(nic))
    ifindex = node.kernel.netdev(PF0).ifindex
    node.kernel.netlink.set_link(ifindex, up=False, mtu=1500)
    node.kernel.netlink.rename(ifindex, "rename16")
    node.kernel.udev.lags(PF0)
    node.kernel.writes.clear()
    assert not is_ready(node.follow(nic, passes=1).conditions)
    assert node.kernel.writes == []
    node.kernel.netlink.rename(ifindex, NAME0)
    node.kernel.udev.catches_up(PF0)
    assert is_settled(node.follow(nic))
    assert (node.kernel.netdev(PF0).mtu, len(node.kernel.vfs(PF0))) == (9000, 2)
