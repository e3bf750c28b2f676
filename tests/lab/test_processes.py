"""The agent's processes under systemd: their sandboxes, the reporter, and a device that hangs."""

import json
import re

import pytest

from lab import MACHINES, Node
from tests.lab.conftest import eventually, report, settled

PF, OTHER = MACHINES[0].nics

GET = """
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(f"http://127.0.0.1:9809{sys.argv[1]}", timeout=20)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status)
print(answer.read().decode(), end="")
"""


def get(node: Node, path: str) -> tuple[int, str]:
    """Ask the node's reporter; status and text."""
    status, _, text = node.run(["python3", "-I", "-c", GET, path], check=True, timeout=60).stdout.partition("\n")
    return int(status), text


def reasons(node: Node) -> dict[str, str]:
    """The reason of each condition, by its type."""
    return {condition["type"]: condition["reason"] for condition in report(node)["conditions"]}


def test_both_units_are_sandboxed(node: Node) -> None:
    for unit, most in (("trackbed.service", 3.0), ("trackbed-reporter.service", 1.5)):
        said = node.sh(f"systemd-analyze security --no-pager {unit} | tail -n 1")
        exposure = re.search(r"([0-9.]+) [A-Z]+", said)
        assert exposure is not None, said
        assert float(exposure[1]) <= most
    # The agent asks systemd-timedated, through the sandbox; nothing synchronises the clock of a lab's node.
    eventually("word of the clock", lambda: reasons(node)["ClockSynchronised"] == "NotSynchronised")


def test_the_reporter_says_what_the_agent_says(node: Node) -> None:
    assert get(node, "/readyz") == (200, "ready\n")
    assert json.loads(get(node, "/status")[1])["spec_hash"] == report(node)["spec_hash"]
    assert "trackbed_ready 1.0\n" in get(node, "/metrics")[1]
    node.sh("systemctl stop trackbed")
    status, text = get(node, "/readyz")
    assert (status, text.startswith("WorkerAlive is False (Stopped)")) == (503, True)
    assert get(node, "/livez") == (200, "alive\n")


@pytest.mark.campaign
def test_a_device_that_hangs_leaves_the_others_in_order_and_comes_back(node: Node) -> None:
    file = f"/sys/bus/pci/devices/{PF.pci}/sriov_numvfs"
    # The unit has mounts of its own; what is mounted before it starts is in them.
    node.sh(f"systemctl stop trackbed; mkfifo /run/hangs; mount --bind /run/hangs {file}; systemctl start trackbed")
    eventually("the stuck worker's end", lambda: reasons(node).get("NicsPresent") == "DeviceHung")
    assert not report(node)["ready"]
    node.sh(f"ip link set {OTHER.netdev} vf 0 vlan 99")
    repaired = f"ip link show {OTHER.netdev} | grep -q 'vf 0 .*vlan 100'"
    eventually("the other NIC's repair", lambda: node.run(["sh", "-c", repaired]).returncode == 0)
    heartbeat = report(node)["heartbeat"]
    eventually("the next heartbeat", lambda: report(node)["heartbeat"] > heartbeat)
    assert node.sh("systemctl show --property=NRestarts --value trackbed").strip() == "0"
    # What was mounted when the unit started stays in its mounts; the reader of a FIFO goes on once somebody writes.
    pid = "$(systemctl show --property=MainPID --value trackbed)"
    node.sh(f"umount {file}; nsenter --mount --target {pid} umount {file} || true")
    # Each time that it hangs doubles the time for which it is left alone.
    eventually("the device's return", lambda: reasons(node).get("DevicesAnswer") == "AllAnswer", within=600)
    settled(node)
