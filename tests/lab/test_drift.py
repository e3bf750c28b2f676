"""Drift is repaired by itself, on the kernel's events."""

import pytest

from lab import MACHINES, Node
from tests.boots import reboot
from tests.lab.conftest import condition, eventually, ready, report, settled, spec, take_up, wait_first_pass, wait_ready

PF, OTHER = MACHINES[0].nics
SYSFS = f"/sys/bus/pci/devices/{PF.pci}"


@pytest.mark.parametrize(
    ("break_it", "repaired"),
    [
        (f"ip link set {PF.netdev} vf 2 trust off", f"ip link show {PF.netdev} | grep -q 'vf 2 .*trust on'"),
        (f"ip link set {OTHER.netdev} vf 0 vlan 99", f"ip link show {OTHER.netdev} | grep -q 'vf 0 .*vlan 100'"),
        (f"ip link set {PF.netdev}v3 mtu 1500", f"test $(cat /sys/class/net/{PF.netdev}v3/mtu) = 9000"),
        (f"ip link set {PF.netdev}v4 down", f"ip link show {PF.netdev}v4 | grep -q '[<,]UP[,>]'"),
        (f"ip link set {PF.netdev} down", f"ip link show {PF.netdev} | grep -q '[<,]UP[,>]'"),
        (f"echo 0 > {SYSFS}/sriov_numvfs", f"test $(cat {SYSFS}/sriov_numvfs) = 7"),
    ],
    ids=["trust", "vlan", "mtu", "vf-down", "pf-down", "vfs-deleted"],
)
def test_drift_is_repaired_on_its_event(node: Node, break_it: str, repaired: str) -> None:
    node.sh(break_it)
    eventually("the repair", lambda: node.run(["sh", "-c", repaired]).returncode == 0)
    settled(node)


def test_changes_that_only_ethtool_announces_are_noticed_at_once(node: Node) -> None:
    node.sh(f"ethtool -C {PF.netdev} rx-usecs 100")
    repaired = f"ethtool -c {PF.netdev} | grep -q '^rx-usecs:.*50$'"
    eventually("the repair", lambda: node.run(["sh", "-c", repaired]).returncode == 0, within=45)
    settled(node)


def test_while_vfs_are_missing_the_node_is_not_ready(node: Node) -> None:
    generation = report(node)["generation"]
    node.sh(f"echo 0 > {SYSFS}/sriov_numvfs")
    # The report said that it is not, and then that it is again.
    eventually("two more reports", lambda: report(node)["generation"] >= generation + 2)
    wait_ready(node)
    assert node.sh(f"cat {SYSFS}/sriov_numvfs").strip() == "7"


def test_a_driver_reload_brings_everything_back(node: Node) -> None:
    generation = report(node)["generation"]
    # Eleven VFs and their RDMA devices go one by one.
    node.sh("modprobe -r igb; modprobe igb", timeout=240)
    eventually("a report after the reload", lambda: report(node)["generation"] > generation)
    settled(node)
    assert node.sh(f"cat {SYSFS}/sriov_numvfs").strip() == "7"


def test_a_vf_that_appears_while_udev_is_stopped_is_named_later(node: Node) -> None:
    vf = f"{PF.netdev}v3"
    sockets = "systemd-udevd-control.socket systemd-udevd-kernel.socket"
    # The agent may bind the VF again before the shell does; the kernel then refuses the shell's write.
    node.sh(
        f"pci=$(basename $(readlink {SYSFS}/virtfn3)); systemctl stop systemd-udevd {sockets}; cd /sys/bus/pci/drivers/igbvf;"
        " echo $pci > unbind; echo $pci > bind || test -e $pci;"
        f" systemctl start systemd-udevd; ! test -e /sys/class/net/{vf}"
    )
    eventually("the VF's name", lambda: node.run(["test", "-e", f"/sys/class/net/{vf}"]).returncode == 0, within=90)
    settled(node)


def test_an_unplugged_nic_is_not_ready_and_comes_back(node: Node) -> None:
    node.unplug(PF.pci)
    # The first report after the event may say only that the node is being checked.
    eventually("its name", lambda: condition(node, "NicsPresent")["reason"] == "NicMissing")
    assert condition(node, "NicsPresent")["status"] == "False"
    assert PF.pci in condition(node, "NicsPresent")["message"]
    assert not ready(node)
    node.replug()
    settled(node)


def test_after_a_power_cut_the_node_comes_back_by_itself(node: Node) -> None:
    boot_id = report(node)["boot_id"]
    node.power_cut()
    node.boot()
    eventually("a report of this boot", lambda: node.run(["test", "-e", "/run/trackbed/report.json"]).returncode == 0)
    wait_ready(node)
    assert report(node)["boot_id"] != boot_id
    wait_first_pass(node)
    settled(node)


def test_a_reboot_is_in_no_ordering_cycle_and_the_gate_opens_after_the_pass(node: Node) -> None:
    reboot(node)
    wait_first_pass(node)
    assert "ordering cycle" not in node.sh("journalctl -b --no-pager")


def test_a_killed_worker_is_replaced_and_the_node_not_ready_meanwhile(node: Node) -> None:
    generation = report(node)["generation"]
    node.sh("pkill -9 -f '[t]rackbed.* worker --activity'")
    eventually("not ready, then ready", lambda: report(node)["generation"] >= generation + 2)
    wait_ready(node)


def test_an_impossible_spec_is_refused_and_the_old_one_kept(node: Node) -> None:
    spec_hash = report(node)["spec_hash"]
    for wrong, fault in (
        ('s/"count": 7/"count": 8/', "has 7 VFs at most, the spec wants 8"),
        ('s/"mtu":/"mtuu":/', "did you mean 'mtu'?"),
    ):
        node.sh(f"cp /etc/trackbed/node.json /tmp/good; sed -i '{wrong}' /etc/trackbed/node.json")
        node.sh("systemctl reload trackbed")
        eventually("the refusal", lambda fault=fault: fault in report(node)["refusal"])  # type: ignore[misc]
        last = report(node)
        assert (last["spec_hash"], last["ready"], last["up_to_date"]) == (spec_hash, True, False)
        node.sh("cp /tmp/good /etc/trackbed/node.json; systemctl reload trackbed")
        eventually("the good spec", lambda: report(node)["up_to_date"])


def test_netdevs_that_appear_later_are_steered_by_their_pattern(node: Node) -> None:
    before = spec(node)
    take_up(node, {**before, "rps": {**before.get("rps", {}), "netdevs": [{"match": "cali*", "cpus": "1"}]}})
    node.sh("ip link add cali1f type veth peer name veth1f")
    steered = ["grep", "-q", "^0*2$", "/sys/class/net/cali1f/queues/rx-0/rps_cpus"]
    # The next reading of everything comes after a minute: sooner, it was the event.
    eventually("the mask", lambda: node.run(steered).returncode == 0, within=45)
    node.sh("ip link del cali1f")
    settled(node)
