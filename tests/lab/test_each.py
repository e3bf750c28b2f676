"""One entry for both NICs of a node of the lab, and `trackbed inspect --as-inventory` on that node."""

import json
from typing import Any

from agent.spec.node import from_mapping, to_json
from lab import MACHINES, Node
from lab.checks import run
from tests.lab.conftest import eventually, ready, report, spec, take_up, wait_ready
from tests.lab.test_commands import change_spec

PFS = sorted(nic.pci for nic in MACHINES[0].nics)
EACH = {"vendor": "8086", "device": "10c9", "each": True}


def rails(**select: int) -> list[dict[str, Any]]:
    """The key `nics`."""
    entry = {"name": "port{index}", "select": {**EACH, **select}, "altnames": ["port{index}"], "mtu": 9000}
    return [{**entry, "vfs": {"count": 2}}]


def test_each_nic_has_its_name_and_number(node: Node) -> None:
    take_up(node, {**spec(node), "nics": rails(min=2, max=2)})
    wait_ready(node)
    functions = json.loads(node.sh("trackbed inspect --json"))["functions"]
    named = {function["address"]: function["nic"] for function in functions if function["nic"]}
    assert named == {pci: f"port{index}" for index, pci in enumerate(PFS)}
    for index, pci in enumerate(PFS):
        (netdev,) = node.sh(f"ls /sys/bus/pci/devices/{pci}/net").split()
        link = json.loads(node.sh(f"ip -j link show dev port{index}"))[0]
        assert (link["ifname"], link["mtu"]) == (netdev, 9000)
        assert node.sh(f"cat /sys/bus/pci/devices/{pci}/sriov_numvfs").strip() == "2"
    checked = run((node,), "-k", "test_each_netdev_has_its_mtu", capture=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_spec_with_a_missing_nic_is_refused_and_the_old_one_kept(node: Node) -> None:
    change_spec(node, nics=rails(min=3))
    eventually("the refusal", lambda: "at least 3 must match" in report(node)["refusal"])
    assert all(pci in report(node)["refusal"] for pci in PFS)
    assert ready(node)


def test_an_inventory_of_the_node_changes_nothing_on_it(node: Node) -> None:
    # As a node that has never had an agent: what a spec asked for before would be put back to how it was before that.
    node.sh("systemctl stop trackbed; rm /run/trackbed/originals.jsonl")
    scope: dict[str, Any] = {}
    exec(node.sh("trackbed inspect --as-inventory --node-name node1"), scope)  # noqa: S102  what pyinfra does with it
    hosts, data = scope["servers"]
    assert len(hosts) == 1
    derived = from_mapping({"node_name": "node1", **data})
    assert len(derived.nics) == 2
    planned = node.run(["trackbed", "plan", "--spec", "-"], timeout=60, stdin=to_json(derived))
    assert (planned.returncode, planned.stdout) == (0, "nothing to change\n")
