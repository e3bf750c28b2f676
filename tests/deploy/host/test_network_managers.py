from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.spec.node import NodeSpec, from_mapping
from tasks.host import network_managers
from tasks.host.network_managers import (
    NETWORK,
    NETWORK_OF_1_0_0,
    NETWORK_TEXT,
    NETWORKD_CONF,
    RULE,
    RULE_TEXT,
    NetworkManagers,
    UnmarkedVfs,
)
from tests.deploy.conftest import Answers, Node, Result, file_answers, files, of
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

MANAGERS = of(NetworkManagers)
UNMARKED = of(UnmarkedVfs)
NEW_RULE = "/etc/udev/rules.d/.70-trackbed-vfs.rules.new"
NEW_NETWORK = "/etc/systemd/network/.00-trackbed-vfs.network.new"
BOTH = ["NetworkManager", "systemd-networkd"]
IN_PLACE = files(**{RULE: RULE_TEXT, NETWORK: NETWORK_TEXT})


def spec(count: int = 4) -> NodeSpec:
    vfs: dict[str, Any] = {"count": count}
    return from_mapping({"node_name": "n1", "nics": [{"name": "a", "select": {"driver": "igb"}, "vfs": vfs}]})


def deploy(node: Node, answers: Answers, wanted: NodeSpec | None = None) -> Result:
    return node.deploy(lambda: network_managers.ignore_vfs(spec=wanted or spec()), answers)


def test_both_managers_get_files_and_existing_vfs_are_marked(node: Node) -> None:
    result = deploy(node, {MANAGERS: BOTH, UNMARKED: ["ens1f0v0", "ens1f0v1"]})
    assert result.uploads == {NEW_RULE: RULE_TEXT.encode(), NEW_NETWORK: NETWORK_TEXT.encode()}
    command = result.flat[-1]
    assert f" sh put {RULE} put {NETWORK} -- " in command
    assert "udevadm trigger" in command
    assert "networkctl reload" in command


def test_without_networkd_only_the_rule_for_networkmanager_is_written(node: Node) -> None:
    assert list(deploy(node, {MANAGERS: ["NetworkManager"]}).uploads) == [NEW_RULE]


OBSERVED = evolve(spec(), mode="observe")


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ({**IN_PLACE, MANAGERS: BOTH, UNMARKED: []}, spec()),
        ({MANAGERS: []}, spec()),
        # NetworkManager takes the addresses off a netdev that it may no longer manage.
        ({MANAGERS: BOTH, UNMARKED: ["ens1f0v0"]}, OBSERVED),
        ({MANAGERS: BOTH, **file_answers(NETWORKD_CONF, "[Network]\n")}, OBSERVED),
    ],
    ids=["in place", "no manager", "observed", "observed with addresses"],
)
def test_the_managers_keep_what_they_manage(node: Node, answers: Answers, wanted: NodeSpec) -> None:
    result = deploy(node, answers, wanted)
    assert not any(result.planned.values())
    assert (result.flat, result.uploads) == ([], {})


def test_the_file_for_vfs_comes_before_those_of_netplan_and_cloud_init() -> None:
    """networkd uses the first file by name that matches (systemd.network(5)). Those of netplan's may match en*."""
    others = ("10-netplan-all-en.network", "10-cloud-init-eth0.network")
    assert min(Path(NETWORK).name, *others) not in others


def test_the_file_of_version_1_0_0_is_removed(node: Node) -> None:
    there = files(**{RULE: RULE_TEXT, NETWORK_OF_1_0_0: NETWORK_TEXT})
    assert f" sh put {NETWORK} remove {NETWORK_OF_1_0_0} -- " in deploy(node, {MANAGERS: BOTH, **there}).flat[-1]
    gone = deploy(node, {MANAGERS: BOTH, **there}, spec(0)).flat[-1]
    assert f" sh remove {RULE} remove {NETWORK_OF_1_0_0} -- " in gone


def test_a_vf_older_than_the_rule_is_marked_by_the_next_deploy(node: Node) -> None:
    result = deploy(node, {**IN_PLACE, MANAGERS: BOTH, UNMARKED: ["ens1f0v1"]})
    assert len(result.flat) == 1
    assert "udevadm trigger" in result.flat[0]


@pytest.fixture
def vfs(tmp_path: Path) -> Path:
    """A node with two VFs, of which udev has marked the first: the folder of its netdevs."""
    text_file(tmp_path / "run/udev/data/n1", "E:TRACKBED_VF=1\n")
    for index, name in enumerate(("ens1f0v0", "eth1"), 1):
        (tmp_path / "sys/class/net" / name / "device/physfn").mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "ifindex").write_text(f"{index}\n")
    program(tmp_path / "bin/systemctl", "exit 1")
    return tmp_path / "sys/class/net"


def mark(vfs: Path, trigger: str) -> list[str]:
    """Mark the VFs with a udevadm that does this for `udevadm trigger`; return the netdevs that it was called for."""
    root = vfs.parents[2]
    calls = root / "calls"
    program(root / "bin/udevadm", f'[ "$1" = trigger ] || exit 0\necho "$3" >> {calls}\n{trigger}')
    sh(network_managers._APPLY, root, programs=root / "bin")
    return [Path(line).name for line in calls.read_text().splitlines()]


def test_only_what_udev_has_not_marked_is_marked(vfs: Path) -> None:
    assert mark(vfs, "exit 0") == ["eth1"]


def test_a_vf_that_a_later_rule_lets_be_managed_is_left_alone(vfs: Path) -> None:
    """Otherwise each deploy would have udev process it, and networkd read its files."""
    root = vfs.parents[2]
    (root / "run/udev/data/n2").write_text("E:NM_UNMANAGED=0\nE:TRACKBED_VF=0\n")
    assert UnmarkedVfs().process(sh(network_managers._UNMARKED, root)) == []


def test_a_netdev_that_udev_renames_meanwhile_does_not_stop_the_deploy(vfs: Path) -> None:
    """During the first pass of a boot. The renaming is an event after the rules were read again, so it marks the VF."""
    assert mark(vfs, f"mv {vfs}/eth1 {vfs}/ens1f0v1; exit 1") == ["eth1"]


def test_a_vf_that_cannot_be_marked_stops_the_deploy(vfs: Path) -> None:
    with pytest.raises(AssertionError):
        mark(vfs, "exit 1")


def test_without_vfs_the_files_are_removed(node: Node) -> None:
    result = deploy(node, {MANAGERS: BOTH, **IN_PLACE}, spec(0))
    (command,) = result.flat
    assert f" sh remove {RULE} remove {NETWORK} -- " in command
    assert "networkctl reload" in command
    assert result.uploads == {}


def test_networkd_is_told_to_leave_the_rules_of_addresses(node: Node) -> None:
    nic = {"name": "a", "select": {"driver": "igb"}, "rail": 0, "addresses": ["192.0.2.11/24"]}
    result = deploy(node, {MANAGERS: BOTH}, from_mapping({"node_name": "n1", "nics": [nic]}))
    assert list(result.uploads) == [NETWORKD_CONF]
    assert result.uploads[NETWORKD_CONF].decode().endswith("[Network]\nManageForeignRoutingPolicyRules=no\n")
    assert not any("restart" in command for command in result.flat)


def test_without_addresses_networkd_s_default_returns(node: Node) -> None:
    result = deploy(node, {MANAGERS: BOTH, **file_answers(NETWORKD_CONF, "[Network]\n")})
    assert f"rm -f {NETWORKD_CONF}" in result.flat
