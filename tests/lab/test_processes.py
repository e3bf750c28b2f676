"""The agent's processes under systemd: their sandboxes, the reporter, and a device that hangs."""

import json
import re
from functools import partial
from typing import Any

import pytest

from agent.service.pass_log import MESSAGE_ID
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
        line = node.sh(f"systemd-analyze security --no-pager {unit} | tail -n 1")
        exposure = re.search(r"([0-9.]+) [A-Z]+", line)
        assert exposure is not None, line
        assert float(exposure[1]) <= most
    # The agent asks systemd-timedated, through the sandbox. The clock was set after the restore: chronyd must measure it first.
    eventually("word of the clock", lambda: reasons(node)["ClockSynchronised"] == "Synchronised")


def is_all_true(node: Node) -> bool:
    """Whether every condition is True."""
    return all(condition["status"] == "True" for condition in report(node)["conditions"])


def test_on_a_fresh_node_every_condition_is_true(nodes: tuple[Node, ...]) -> None:
    for node in nodes:
        eventually("every condition True", partial(is_all_true, node))


def test_chronyd_follows_the_host_s_clock(node: Node) -> None:
    eventually("a source", lambda: "^*" in node.sh("chronyc -n sources"))
    eventually(
        "the kernel's word", lambda: node.sh("timedatectl show --property=NTPSynchronized --value").strip() == "yes"
    )


def test_the_reporter_says_what_the_agent_says(node: Node) -> None:
    assert get(node, "/readyz") == (200, "ready\n")
    assert json.loads(get(node, "/status")[1])["spec_hash"] == report(node)["spec_hash"]
    assert "trackbed_ready 1.0\n" in get(node, "/metrics")[1]
    node.sh("systemctl stop trackbed")
    status, text = get(node, "/readyz")
    assert (status, text.startswith("WorkerAlive is False (Stopped)")) == (503, True)
    assert get(node, "/livez") == (200, "alive\n")


def passes(node: Node) -> dict[str, dict[str, Any]]:
    """The journal's entries of passes, by their cursors."""
    lines = node.sh(f"journalctl -u trackbed -p info -o json MESSAGE_ID={MESSAGE_ID}").splitlines()
    return {entry["__CURSOR"]: entry for entry in map(json.loads, lines)}


def test_each_pass_is_an_entry_of_the_journal_with_fields(node: Node) -> None:
    # The deploy's first pass turned the trust on too.
    before = passes(node).keys()
    assert before
    node.sh(f"ip link set {PF.netdev} vf 2 trust off")
    entries: list[dict[str, Any]] = []

    def repaired() -> bool:
        new = [entry for cursor, entry in passes(node).items() if cursor not in before]
        entries[:] = [entry for entry in new if "trust: off -> on" in str(entry.get("TRACKBED_CHANGE"))]
        return bool(entries)

    eventually("the entry", repaired)
    assert (entries[0]["TRACKBED_TRIGGER"], entries[0]["_SYSTEMD_UNIT"]) == ("event", "trackbed.service")
    assert entries[0]["TRACKBED_SPEC_HASH"] == report(node)["spec_hash"]


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
    # The unit keeps the mounts from its start. The reader of a FIFO continues once another program writes.
    pid = "$(systemctl show --property=MainPID --value trackbed)"
    node.sh(f"umount {file}; nsenter --mount --target {pid} umount {file} || true")
    # Each time that it hangs doubles the time for which it is left alone.
    eventually("the device's return", lambda: reasons(node).get("DevicesAnswer") == "AllAnswer", within=600)
    settled(node)
