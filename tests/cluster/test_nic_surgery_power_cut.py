"""A node loses power in the midst of a surgery: before the change the surgery is reverted, in it a person resumes it."""

import json

import pytest

from agent.report.names import MAINTENANCE
from tests.cluster.conftest import LONG, is_open
from tests.cluster.fleet.fleet_commands import start
from tests.cluster.test_device_stories import Rails, deployed, pytestmark, rails
from tests.cluster.test_operations import vfs
from tests.cluster.test_sriov_plugin import give_vfs
from tests.lab.conftest import eventually, give, settled, spec

__all__ = ["deployed", "pytestmark", "rails"]


def recorded(rails: Rails) -> str:
    """The step that the Node's record has; empty: there is no record."""
    text = rails.plane.get("node", rails.name)["metadata"]["annotations"].get(MAINTENANCE)
    return str(json.loads(text)["step"]) if text else ""


def tainted(rails: Rails) -> set[str]:
    """The devices that the surgery has tainted."""
    rules = rails.plane.get("devicetaintrules", f"--selector={MAINTENANCE}")["items"]
    return {rule["spec"]["deviceSelector"]["device"] for rule in rules}


@pytest.mark.parametrize("step", ["drain", "apply"])
def test_a_surgery_whose_node_loses_power_leaves_nothing_tainted(rails: Rails, step: str) -> None:
    node, plane = rails.node, rails.plane
    changed, other = node.machine.nics
    count, before = vfs(node, changed.pci), spec(node)
    maintain = ("maintain", rails.name, "--device", changed.name, "--inventory", rails.inventory, "--force")
    rails.claim_of("leaves", changed)
    rails.wait_runs_with("leaves", (changed,))
    give_vfs(node, changed, count - 1)
    try:
        # A drain that waits for a pod on a node without power gives up after this time.
        process = start(plane.admin, *maintain, "--allow", "vf-reset", "--drain-timeout", "90")
        eventually(f"the step {step}", lambda: recorded(rails) == step and bool(tainted(rails)), LONG)
        node.sh("sync")
        node.power_cut()
        output = "".join(process.communicate(timeout=LONG))
        assert process.returncode == 1, output
        assert "Traceback" not in output
        if step == "drain":
            assert "undone" in output
            assert (recorded(rails), tainted(rails)) == ("", set())
        else:
            assert "--resume" in output
            assert (recorded(rails), bool(tainted(rails))) == ("apply", True)
        node.boot()
        # What its Node says is of the boot before, until the reporter has published this one.
        settled(node)
        eventually("the node is ready", lambda: is_open(plane, rails.name), LONG)
        rails.start_driver()
        if step == "apply":
            process = start(plane.admin, *maintain, "--allow", "vf-reset", "--resume")
            output = "".join(process.communicate(timeout=LONG))
            assert process.returncode == 0, output
        assert (recorded(rails), tainted(rails)) == ("", set())
        # Nobody uses a VF at boot, so the agent has made the change then.
        assert vfs(node, changed.pci) == count - 1
        for name, rail in (("comes", changed), ("comes-elsewhere", other)):
            rails.claim_of(name, rail)
            rails.wait_runs_with(name, (rail,))
    finally:
        plane.kubectl("delete", "pods", "--all", "-n", "rails", "--force", timeout=LONG)
        give(node, before)
        eventually("all VFs again", lambda: vfs(node, changed.pci) == count, LONG)
        rails.start_driver()
