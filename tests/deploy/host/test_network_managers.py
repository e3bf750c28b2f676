from __future__ import annotations

from typing import Any

from attrs import evolve

from agent.spec.node import NodeSpec, from_mapping
from tasks.host import network_managers
from tasks.host.network_managers import (
    NETWORK,
    NETWORK_TEXT,
    NETWORKD_CONF,
    RULE,
    RULE_TEXT,
    NetworkManagers,
    UnmarkedVfs,
)
from tests.deploy.conftest import Answers, Node, Result, file_answers, files, of

MANAGERS = of(NetworkManagers)
UNMARKED = of(UnmarkedVfs)
NEW_RULE = "/etc/udev/rules.d/.70-trackbed-vfs.rules.new"
NEW_NETWORK = "/etc/systemd/network/.10-trackbed-vfs.network.new"
BOTH = ["NetworkManager", "systemd-networkd"]


def spec(count: int = 4) -> NodeSpec:
    vfs: dict[str, Any] = {"count": count}
    return from_mapping({"node_name": "n1", "nics": [{"name": "a", "select": {"driver": "igb"}, "vfs": vfs}]})


def deploy(node: Node, answers: Answers, wanted: NodeSpec | None = None) -> Result:
    return node.deploy(lambda: network_managers.ignore_vfs(spec=wanted or spec()), answers)


def test_both_managers_get_files_and_existing_vfs_are_marked(node: Node) -> None:
    result = deploy(node, {MANAGERS: BOTH, UNMARKED: ["ens1f0v0", "ens1f0v1"]})
    assert result.uploads == {NEW_RULE: RULE_TEXT.encode(), NEW_NETWORK: NETWORK_TEXT.encode()}
    command = result.flat[-1]
    assert command.endswith(f" sh put {RULE} put {NETWORK} -- ens1f0v0 ens1f0v1")
    assert "networkctl reload" in command


def test_without_networkd_only_the_rule_for_networkmanager_is_written(node: Node) -> None:
    result = deploy(node, {MANAGERS: ["NetworkManager"]})
    assert list(result.uploads) == [NEW_RULE]


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    there = files(**{RULE: RULE_TEXT, NETWORK: NETWORK_TEXT})
    result = deploy(node, {**there, MANAGERS: BOTH, UNMARKED: []})
    assert not any(result.planned.values())
    assert result.flat == []


def test_a_vf_older_than_the_rule_is_marked_by_the_next_deploy(node: Node) -> None:
    there = files(**{RULE: RULE_TEXT, NETWORK: NETWORK_TEXT})
    result = deploy(node, {**there, MANAGERS: BOTH, UNMARKED: ["ens1f0v1"]})
    assert len(result.flat) == 1
    assert result.flat[0].endswith(" sh ens1f0v1")


def test_in_observe_mode_the_managers_keep_what_they_manage(node: Node) -> None:
    """NetworkManager takes the addresses off a netdev that it may no longer manage."""
    observed = evolve(spec(), mode="observe")
    assert deploy(node, {MANAGERS: BOTH, UNMARKED: ["ens1f0v0"]}, observed).flat == []
    assert deploy(node, {MANAGERS: BOTH, **file_answers(NETWORKD_CONF, "[Network]\n")}, observed).flat == []


def test_without_a_network_manager_nothing_is_written(node: Node) -> None:
    result = deploy(node, {MANAGERS: []})
    assert result.flat == []
    assert result.uploads == {}


def test_without_vfs_the_files_are_removed(node: Node) -> None:
    result = deploy(node, {MANAGERS: BOTH, **files(**{RULE: RULE_TEXT, NETWORK: NETWORK_TEXT})}, spec(0))
    (command,) = result.flat
    assert command.endswith(f" sh remove {RULE} remove {NETWORK} --")
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
