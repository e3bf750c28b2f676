"""The kubelet's gate under a real systemd, with a program that sleeps in its place; tests/cluster has the real kubelet."""

import json
import re

import pytest

from lab import Node
from tests.lab.conftest import deploy, eventually, succeeded, wait_ready

VERIFIED = "the node is verified, for the first time in this boot"
JOINED = "/etc/kubernetes/kubelet.conf"
# What keeps the VFs of a node from getting a driver at boot, and so the node from being verified.
BLOCKER = "/etc/modprobe.d/blocker.conf"
STAND_IN = "[Service]\nExecStart=sleep infinity\nRestart=always\nRestartSec=1\n[Install]\nWantedBy=multi-user.target\n"


def unit(node: Node, name: str, *properties: str) -> list[str]:
    """Properties of a unit, by systemd."""
    options = [f"--property={each}" for each in properties]
    lines = node.run(["systemctl", "show", name, *options], check=True).stdout.splitlines()
    values = dict(line.split("=", 1) for line in lines)
    return [values[each] for each in properties]


def first_said_at(node: Node, name: str, message: str) -> float:
    """Seconds since the boot at which a unit said this for the first time, by the journal."""
    lines = node.sh(f"journalctl -b -u {name} -o json --output-fields=MESSAGE --no-pager").splitlines()
    entries = [json.loads(line) for line in lines]
    stamps = [int(e["__MONOTONIC_TIMESTAMP"]) for e in entries if re.search(message, str(e["MESSAGE"]))]
    assert stamps, f"{name} never said {message!r}"
    return stamps[0] / 1e6


def started(node: Node, name: str) -> float:
    """Seconds since the boot at which a unit's program was started."""
    return int(unit(node, name, "ExecMainStartTimestampMonotonic")[0]) / 1e6


@pytest.fixture
def gated(node: Node) -> Node:
    """The first node, with the gate deployed, and with a unit of the kubelet's name that has not been started."""
    node.write("/etc/systemd/system/kubelet.service", STAND_IN)
    succeeded(deploy(kubelet={"policy": "hold"}))
    node.sh("systemctl enable kubelet")
    return node


@pytest.mark.campaign
def test_the_gate_holds_only_members_of_a_cluster_until_they_are_verified(gated: Node) -> None:
    node = gated
    # A node that is not verified and has not joined: a join restarts the kubelet, and waits for that.
    node.sh("systemctl stop trackbed; rm /run/trackbed/first-pass")
    node.sh("systemctl restart kubelet", timeout=30)
    assert unit(node, "kubelet", "SubState") == ["running"]
    node.sh(f"mkdir -p /etc/kubernetes; touch {JOINED}; echo 'install igbvf /bin/false' > {BLOCKER}; sync")
    node.power_cut()
    node.boot()
    eventually("the gate", lambda: unit(node, "kubelet", "SubState") == ["start-pre"])
    assert unit(node, "kubelet", "TimeoutStartUSec") == ["infinity"]
    assert node.run(["test", "-e", "/run/trackbed/first-pass"]).returncode != 0
    node.sh(f"rm {BLOCKER}; modprobe igbvf")
    wait_ready(node)
    eventually("the kubelet", lambda: unit(node, "kubelet", "SubState") == ["running"])
    assert started(node, "kubelet") > first_said_at(node, "trackbed", VERIFIED)
    assert "ordering cycle" not in node.sh("journalctl -b --no-pager")
    # The agent comes and goes without it, and once verified it waits no more.
    before = unit(node, "kubelet", "MainPID")
    node.sh("systemctl restart trackbed; systemctl stop trackbed")
    assert unit(node, "kubelet", "SubState", "MainPID") == ["running", *before]
    node.sh("systemctl mask --runtime --quiet trackbed; systemctl restart kubelet", timeout=30)
    assert unit(node, "kubelet", "SubState") == ["running"]
