"""The deploy from the control host: a dry run, the first, the second, and one with a wrong inventory."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

from lab import MACHINES, Node
from tests.lab.conftest import ROOT, Done, changed, inventory_data, pyinfra, ready, refusal, said, spec, succeeded

PF = MACHINES[0].nics[0].netdev


def deploy(**data: object) -> Done:
    """The deploy of the first node, as an operator sees it."""
    return pyinfra("-y", "inventories/lab.py", "deploy.py", "--limit", "node1", *inventory_data(data))


def deploy_nic(**nic: Any) -> Done:
    return deploy(nics=[nic])


def test_a_fresh_node_is_ready_after_one_deploy(first_deploy: Done, nodes: tuple[Node, ...]) -> None:
    succeeded(first_deploy)
    assert all(ready(node) for node in nodes)
    # Through the node's own apt: the image leaves it out.
    assert all(node.run(["jq", "--version"]).returncode == 0 for node in nodes)


def test_a_second_deploy_changes_nothing(nodes: tuple[Node, ...]) -> None:
    again = pyinfra("-y", "--json", "inventories/lab.py", "deploy.py")
    assert changed(again, ("node1", "node2")) == []
    assert len(json.loads(again.stdout)["results"]["operations"]) > 10


def test_a_password_for_sudo_is_given_and_a_wrong_one_fails_the_host(nodes: tuple[Node, ...], tmp_path: Path) -> None:
    asks, password = nodes[1], 'it\'s $1 "new"'
    asks.sh("echo 'admin ALL=(ALL:ALL) ALL' > /etc/sudoers.d/lab")
    asks.run(["chpasswd"], check=True, stdin=f"admin:{password}\n")

    host, data = runpy.run_path(str(ROOT / "inventories/lab.py"))["virtual"][1]
    inventory = tmp_path / "inventories/lab.py"
    inventory.parent.mkdir()
    shutil.copytree(ROOT / "group_data", tmp_path / "group_data")

    def with_password(given: str) -> Done:
        inventory.write_text(f"virtual = {[(host, {**data, '_sudo_password': given})]!r}\n")
        return pyinfra("-y", "--json", str(inventory), "deploy.py")

    assert changed(with_password(password), ("node2",)) == []
    assert "incorrect password" in refusal(with_password("another"))


def test_a_dry_run_shows_the_node_s_own_plan_and_touches_nothing(node: Node) -> None:
    # The agent would repair this at once.
    node.sh(f"systemctl stop trackbed; ip link set {PF} vf 2 trust off; ip link set {PF}v1 mtu 1500")
    before = node.sh("sha256sum /etc/trackbed/node.json")
    node.sh('sed -i \'s/"count": 7/"count": 6/\' /etc/trackbed/node.json')
    shown = pyinfra("--dry", "inventories/lab.py", "deploy.py", "--limit", "node1")
    text = shown.stdout + shown.stderr
    assert shown.returncode == 0, text
    assert "vf_attributes 0000:21:00.0#2 trust: off -> on" in text
    assert "vf_links 0000:21:00.0#1 mtu: 1500 -> 9000  [link-flap]" in text
    assert "vf 2" in node.sh(f"ip link show {PF} | grep 'vf 2.*trust off'")
    assert node.sh("sha256sum /etc/trackbed/node.json") != before


def test_a_nic_that_is_not_there_stops_the_deploy_with_the_old_state_kept(node: Node) -> None:
    before = node.sh("cat /etc/trackbed/node.json")
    refused = refusal(deploy_nic(name="rail9", select={"pci": "0000:99:00.0"}))
    assert "NIC rail9 (pci=0000:99:00.0) is not" in refused
    assert node.sh("cat /etc/trackbed/node.json") == before
    assert ready(node)


def test_more_vfs_than_the_device_has_stop_the_deploy_with_the_remedy(node: Node) -> None:
    before = node.sh("cat /etc/trackbed/node.json")
    refused = refusal(deploy_nic(name="rail0", select={"mac": MACHINES[0].nics[0].mac}, vfs={"count": 8}))
    assert "lower vfs.count to 7" in refused
    assert node.sh("cat /etc/trackbed/node.json") == before
    assert node.sh(f"cat /sys/class/net/{PF}/device/sriov_numvfs").strip() == "7"


def test_a_change_that_the_policy_does_not_allow_is_named_and_the_deploy_goes_on(node: Node) -> None:
    nics = spec(node)["nics"]
    nics[0]["vfs"]["count"] = 5
    done = succeeded(deploy(nics=nics, disruption={"allow": "none"}))
    assert "deferred on 1 of 1 hosts: vfs 0000:21:00.0 count: 7 -> 5: " in said(done)
    assert node.sh(f"cat /sys/class/net/{PF}/device/sriov_numvfs").strip() == "7"
    assert ready(node)


def test_an_unknown_key_stops_the_deploy_before_a_node_is_touched(node: Node) -> None:
    refused = refusal(deploy_nic(name="rail0", select={"pci": "0000:21:00.0"}, mtuu=9000))
    assert "node1.nics[0]: unknown key 'mtuu'" in refused
