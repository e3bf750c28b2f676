"""Surgery on a busy node: the VFs of one rail are made anew while a pod on the other rail moves RDMA data.

The node and its driver of DRA are those of test_device_stories.py. RDMA devices of software (rxe) work in pods with
TRACKBED_LAB_DEBIAN=13-backports.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any

import pytest
from attrs import frozen

from agent.report.names import MAINTENANCE
from lab import Node
from lab.hardware import Nic
from tests.cluster import rendered
from tests.cluster.conftest import LONG, Cluster, Say, is_open
from tests.cluster.fleet.fleet_commands import start
from tests.cluster.test_device_stories import Rails, deployed, pytestmark, rails
from tests.cluster.test_operations import vfs
from tests.cluster.test_sriov_plugin import give_vfs
from tests.lab.conftest import eventually, give, pyinfra, spec, succeeded

__all__ = ["deployed", "pytestmark", "rails"]

UNIT = "neighbour"
SERVER, CLIENT = "10.88.0.2", "10.88.0.1"
# One message at a time, and an acknowledgement may take 17 s: an emulated node that stands still loses no packet by it.
PERFTEST = "ib_send_lat --size=1024 --qp-timeout=22"
SENT, RECEIVED = "sent_pkts", "rcvd_pkts"
# The inventory of a node, in which one rail has another number of VFs, and a deploy may change NICs in use.
INVENTORY = """
import runpy as _runpy

((_name, _data),) = _runpy.run_path($inventory)["lab"]


def _nic(nic):
    return {**nic, "vfs": {**nic["vfs"], "count": $count}} if nic["name"] == $rail else nic


lab = [
    (
        _name,
        {
            **_data,
            "nics": [_nic(nic) for nic in _data["nics"]],
            "kubernetes": {**_data["kubernetes"], "maintain_nics": True},
        },
    )
]
"""
AGAIN = ("duplicate_request", "out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "retry_exceeded_err")


@frozen
class End:
    """An end of the traffic: a VF, by its address and its netdev in the network namespace that ``inside`` enters."""

    node: Node
    pci: str
    netdev: str
    address: str
    inside: str = ""

    @property
    def device(self) -> str:
        """The VF's RDMA device. The lab makes one for each VF that the host has; it goes when the netdev moves to a pod."""
        folder = f"/sys/bus/pci/devices/{self.pci}/infiniband"
        made = f"{self.inside} rdma link add {UNIT} type rxe netdev {self.netdev}"
        return self.node.sh(f"[ -e {folder} ] || {made}; ls {folder}").strip()

    def begin(self, seconds: int, *peer: str) -> None:
        """Give the netdev its address, and start perftest for so long."""
        words = f"ip address add {self.address}/24 dev {self.netdev}", f"ip link set {self.netdev} up"
        self.node.sh("; ".join(f"{self.inside} {each}" for each in words))
        eventually("a GID of the address", lambda: self.gid() is not None, LONG)
        command = f"{PERFTEST} --duration={seconds} -d {self.device} -x {self.gid()} {' '.join(peer)}"
        self.node.sh(f"systemd-run --quiet --unit={UNIT} {self.inside} {command}")

    def gid(self) -> int | None:
        """The index of the address in the GID table."""
        table = self.node.sh(f"cd /sys/class/infiniband/{self.device}/ports/1/gids; grep -s . * || true")
        mapped = "ffff:" + "{:02x}{:02x}:{:02x}{:02x}".format(*map(int, self.address.split(".")))
        found = re.search(rf"^(\d+):\S*{mapped}$", table, re.MULTILINE)
        return int(found[1]) if found else None

    def counters(self) -> dict[str, int]:
        """Rxe's counters of packets."""
        text = self.node.sh(f"cd /sys/class/infiniband/{self.device}/ports/1/hw_counters; grep . *")
        return {name: int(value) for name, value in (line.split(":") for line in text.splitlines())}

    def runs(self) -> bool:
        """Whether perftest runs; it fails the test if perftest has failed."""
        state = self.node.sh(f"systemctl show --value --property=ActiveState {UNIT}").strip()
        assert state != "failed", self.node.sh(f"journalctl --unit={UNIT}")
        return state == "active"

    def end(self) -> None:
        """Stop perftest, and take the address back."""
        undo = f"{self.inside} ip address del {self.address}/24 dev {self.netdev}"
        self.node.run(["sh", "-c", f"systemctl stop {UNIT}; systemctl reset-failed {UNIT}; {undo}"])


@contextmanager
def traffic(server: End, client: End, seconds: int) -> Iterator[None]:
    """RDMA data from one end to the other and back, for so long."""
    try:
        server.begin(seconds)
        eventually("perftest listens", lambda: ":18515 " in server.node.sh("ss --listening --tcp --numeric"), LONG)
        client.begin(seconds, server.address)
        eventually("data move", lambda: client.counters()[RECEIVED] > 100, LONG)
        yield
    finally:
        client.end()
        server.end()


def in_pod(node: Node, rail: Nic, address: str) -> End:
    """The end in the pod that has a VF of this rail."""
    names = f"s|^[0-9]*: \\({rail.netdev}v[0-9]*\\):.*|$each \\1|p"
    found = node.sh(f'for each in /run/netns/*; do nsenter --net=$each ip -oneline link | sed -n "{names}"; done')
    ((namespace, netdev),) = [line.split() for line in found.splitlines()]
    return End(node, rail.vf_pcis[int(netdev.rpartition("v")[2])], netdev, address, f"nsenter --net={namespace}")


def by_the_command(rails: Rails, rail: Nic, count: int, folder: Path) -> str:
    """Give the node the spec with another number of VFs, and maintain the NIC; what is printed."""
    give_vfs(rails.node, rail, count)
    words = ("--device", rail.name, "--inventory", rails.inventory, "--allow", "vf-reset")
    process = start(rails.plane.admin, "maintain", rails.name, *words)
    output = "".join(process.communicate(timeout=LONG))
    assert process.returncode == 0, output
    return output


def by_a_deploy(rails: Rails, rail: Nic, count: int, folder: Path) -> str:
    """Deploy the node with another number of VFs, and with `maintain_nics`; what is printed."""
    # pyinfra reads group_data/lab_cluster.py, since this inventory has that name.
    file = folder / "lab_cluster.py"
    text = Template(INVENTORY).substitute(inventory=repr(rails.inventory), count=count, rail=repr(rail.name))
    file.write_text(text)
    done = succeeded(pyinfra("-y", "--group-data", "group_data", str(file), "deploy.py", timeout=3600))
    output = done.stdout + done.stderr
    assert f"deferred: maintenance of {rail.name}" not in output, output
    return output


def job(rails: Rails, name: str, rail: Nic) -> str:
    """Create a Job whose pod claims a VF of the rail, and is not started again; the pod's name."""
    claiming = rails.claiming(name, rails.template_of(rail))
    made: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": claiming["metadata"]}
    rails.plane.apply({**made, "spec": {"backoffLimit": 0, "template": {"spec": claiming["spec"]}}})

    def pods() -> list[Any]:
        found: list[Any] = rails.plane.get("-n", "rails", "pods", f"--selector=job-name={name}")["items"]
        return found

    eventually("the pod of the Job", lambda: bool(pods()), LONG)
    return str(pods()[0]["metadata"]["name"])


# A whole deploy takes longer.
@pytest.mark.parametrize(("surgery", "seconds"), [(by_the_command, 300), (by_a_deploy, 900)])
def test_surgery_on_a_rail_disturbs_no_pod_on_the_other(
    fresh_cluster: Cluster,
    rails: Rails,
    say: Say,
    tmp_path: Path,
    surgery: Callable[[Rails, Nic, int, Path], str],
    seconds: int,
) -> None:
    rendered.needs_roce_in_pods(fresh_cluster)
    node, other = fresh_cluster.nodes
    changed, good = node.machine.nics
    leaves = job(rails, "leaves", changed)
    rails.claim_of("works", good)
    rails.wait_runs_with(leaves, (changed,))
    rails.wait_runs_with("works", (good,))
    uid, before = rails.pod("works")["metadata"]["uid"], spec(node)
    count = vfs(node, changed.pci)
    server, client = End(other, good.vf_pcis[0], f"{good.netdev}v0", SERVER), in_pod(node, good, CLIENT)
    try:
        began = [end.counters() for end in (client, server)]
        with traffic(server, client, seconds):
            output = surgery(rails, changed, count - 1, tmp_path)
            assert f"{changed.name} has ended" in output, output
            assert client.runs(), "the traffic ended before the surgery"
            assert vfs(node, changed.pci) == count - 1
            eventually("the traffic ends", lambda: not client.runs(), seconds + LONG)
            counted = [end.counters() for end in (client, server)]
            packets = [
                (each[SENT] - old[SENT], each[RECEIVED] - old[RECEIVED])
                for each, old in zip(counted, began, strict=True)
            ]
            again = [each[name] - old[name] for each, old in zip(counted, began, strict=True) for name in AGAIN]
            say(f"packets sent and received by the client: {packets[0]}, by the server: {packets[1]}; again: {again}")
            assert packets[0] == packets[1][::-1]
            assert not any(again)
        assert rails.pod("works")["metadata"]["uid"] == uid
        assert rails.runs("works")
        assert "unschedulable" not in rails.plane.get("node", rails.name)["spec"]
        assert not rails.plane.get("devicetaintrules", f"--selector={MAINTENANCE}")["items"]
        rails.start_driver()
        rails.claim_of("comes", changed)
        rails.wait_runs_with("comes", (changed,))
        eventually("the node is open", lambda: is_open(rails.plane, rails.name), LONG)
    finally:
        rails.plane.kubectl("delete", "jobs,pods", "--all", "-n", "rails", timeout=LONG)
        give(node, before)
        eventually("all VFs again", lambda: vfs(node, changed.pci) == count, LONG)
        rails.start_driver()
