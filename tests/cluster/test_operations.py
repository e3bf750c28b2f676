"""An operator's work on a real cluster: a silent node is found, a busy node is maintained, VFs are moved into pods."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab import Node
from lab.cluster import manifests
from lab.cluster.control_plane import ControlPlane
from tests.cluster.conftest import LONG, Cluster, Member, Say, condition, is_open, opened, tainted
from tests.cluster.fleet.fleet_commands import answer, fleet
from tests.cluster.objects import LEASES, budget, patch_lease, replica_set
from tests.cluster.planes import received
from tests.cluster.reporter.reporters import wrote
from tests.cluster.test_gate import phase
from tests.cluster.test_stories import sleeping
from tests.lab.conftest import ROOT, eventually, report, settled

INVENTORY = "inventories/lab_cluster.py"
CONFLIST = "/etc/cni/net.d/00-vf.conflist"
DROP_INS = "/run/systemd/system/trackbed.service.d"
SUBNET = "192.168.62"
# Where every pass of the agent begins.
BEGINNING = "        if (spec := self.in_force.spec) is None:\n"
PORT = 5001
OUTAGE = 180.0
# What an emulated node adds to the bounds of docs/readiness.md.
SLOWNESS = 10.0
MEBIBYTES = 16
SERVE = f"""
import socket
with socket.create_server(("", {PORT})) as listener:
    print("listening", flush=True)
    with listener.accept()[0] as peer:
        total = 0
        while said := peer.recv(65536):
            total += len(said)
print(total)
"""
SEND = f"""
import socket, time
began = time.monotonic()
with socket.create_connection(("{SUBNET}.1", {PORT})) as peer:
    peer.sendall(bytes({MEBIBYTES} << 20))
print(f"{{{MEBIBYTES} / (time.monotonic() - began):.2f}} MiB/s")
"""


def reason(plane: ControlPlane, name: str) -> str:
    conditions = plane.get("node", name)["status"]["conditions"]
    return next(str(c["reason"]) for c in conditions if c["type"] == "TrackbedReady")


def test_an_agent_that_hangs_is_restarted_and_one_that_is_gone_makes_the_node_unknown(member: Member) -> None:
    plane, node, name = member
    before = node.sh("systemctl show --property=MainPID --value trackbed").strip()
    node.sh("systemctl kill --signal=SIGSTOP trackbed")
    eventually(
        "another agent, by systemd's watchdog",
        lambda: node.sh("systemctl show --property=MainPID --value trackbed").strip() not in (before, "0"),
        LONG,
    )
    eventually("ready again", lambda: is_open(plane, name), LONG)
    node.sh(
        f"mkdir -p {DROP_INS}; printf '[Service]\\nRestart=no\\n' > {DROP_INS}/90-test.conf; systemctl daemon-reload"
    )
    node.sh("systemctl kill --signal=SIGKILL trackbed")
    eventually("Unknown and tainted", lambda: condition(plane, name) == "Unknown" and tainted(plane, name), LONG)
    assert reason(plane, name) == "NoReport"
    node.sh(f"rm -r {DROP_INS}; systemctl daemon-reload; systemctl start trackbed", timeout=LONG)
    eventually("ready again", lambda: is_open(plane, name), LONG)


@pytest.mark.campaign
@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hangs"])
def test_after_an_outage_a_node_that_lost_readiness_is_tainted(member: Member, hangs: bool, say: Say) -> None:
    plane, node, name = member
    server = plane.api_server.pid()
    assert server is not None
    begun = time.monotonic()
    if hangs:
        os.kill(server, signal.SIGSTOP)
    else:
        plane.kill_api_server()
    try:
        node.sh("mkdir -p /run/modprobe.d; echo 'install igbvf /bin/false' > /run/modprobe.d/blocker.conf; rmmod igbvf")
        eventually("the agent's NotReady", lambda: not report(node)["ready"], LONG)
        # The length of the outage is what is measured.
        eventually("the end of the outage", lambda: time.monotonic() - begun > OUTAGE, LONG)
    finally:
        if hangs:
            os.kill(server, signal.SIGCONT)
        plane.start_api_server()
    took = eventually("the taint", lambda: tainted(plane, name), LONG)
    say(
        f"an API server that {'hung' if hangs else 'was away'} for {OUTAGE:.0f} s: tainted {took:.1f} s after its return"
    )
    assert took < (25.0 if hangs else 15.0) + SLOWNESS
    eventually("TrackbedReady False", lambda: condition(plane, name) == "False", LONG)
    node.sh("rm /run/modprobe.d/blocker.conf; modprobe igbvf")
    eventually("ready again", lambda: is_open(plane, name), LONG)


def test_the_sweep_taints_a_node_whose_reporter_is_gone_and_a_new_reporter_lifts_the_taint(member: Member) -> None:
    plane, node, name = member
    node.sh("systemctl stop trackbed-reporter")
    assert is_open(plane, name)
    # A quarter of an hour, shortened: it counts from the last renewal.
    patch_lease(plane, name, {"spec": {"leaseDurationSeconds": 1}})
    swept = fleet(plane, "sweep")
    assert swept.code == 0, swept
    assert (condition(plane, name), tainted(plane, name)) == ("Unknown", True)
    assert "trackbed.internal/ready" not in plane.get("node", name)["metadata"]["labels"]
    assert {one["name"]: one["ready"] for one in answer(plane, "status")["nodes"]}[name] == "Unknown"
    node.sh("systemctl start trackbed-reporter")
    eventually("ready again", lambda: is_open(plane, name), LONG)
    assert plane.get("lease", name, LEASES)["spec"]["leaseDurationSeconds"] == 900


def busy(name: str, command: Sequence[str]) -> list[dict[str, object]]:
    """A ReplicaSet of one pod on a node, and a budget that forbids its eviction."""
    template = manifests.pod("busy", command, rdma=1, selector={"kubernetes.io/hostname": name})["spec"]
    template["restartPolicy"] = "Always"
    return [replica_set("busy", {"app": "busy"}, template), budget("busy", {"app": "busy"})]


def is_busy(plane: ControlPlane) -> bool:
    status = plane.get("replicaset", "busy")["status"]
    return bool(status.get("readyReplicas"))


def vfs(node: Node, pci: str) -> int:
    return int(node.sh(f"cat /sys/bus/pci/devices/{pci}/sriov_numvfs"))


def test_a_change_waits_for_the_pod_that_it_would_disturb_and_maintenance_makes_it(member: Member) -> None:
    plane, node, name = member
    nic = node.machine.nics[1]
    device = node.sh(f"ls /sys/bus/pci/devices/{nic.vf_pcis[0]}/infiniband").strip()
    plane.apply(*busy(name, ["ibv_asyncwatch", "-d", device]))
    eventually("the pod", lambda: is_busy(plane), LONG)
    node.sh("""sed -i 's/"count": 4/"count": 5/' /etc/trackbed/node.json; systemctl reload trackbed""")
    eventually("the change is deferred", lambda: condition(plane, name, "TrackbedUpToDate") == "False", LONG)
    assert is_open(plane, name)
    asked = ("maintain", name, "--inventory", INVENTORY, "--allow", "vf-reset")
    forbidden = fleet(plane, *asked, "--drain-timeout", "15", timeout=900)
    assert forbidden.code == 1, forbidden
    assert "disruption budget" in forbidden.err
    document = plane.get("node", name)
    assert "unschedulable" not in document["spec"]
    assert "trackbed.internal/maintenance" not in document["metadata"].get("annotations", {})
    assert is_busy(plane)
    assert vfs(node, nic.pci) == 4
    plane.kubectl("delete", "poddisruptionbudget", "busy")
    done = fleet(plane, *asked, timeout=900)
    assert done.code == 0, done
    assert vfs(node, nic.pci) == 5
    assert "unschedulable" not in plane.get("node", name)["spec"]
    assert condition(plane, name, "TrackbedUpToDate") == "True"
    # The plugin must restart, since it looks for devices only when it starts.
    eventually("the pod is back", lambda: is_busy(plane), LONG)
    # None came by what the plugin before had offered.
    reasons = [pod["status"].get("reason") for pod in plane.get("pods", "--selector=app=busy")["items"]]
    assert "UnexpectedAdmissionError" not in reasons
    plane.kubectl("delete", "replicaset", "busy", "--wait=false")
    # Its network ends by the configuration that it began with, so that must still be there.
    eventually("the pod is gone", lambda: not plane.get("pods", "--selector=app=busy")["items"], LONG)


def published(plane: ControlPlane, name: str, since: float) -> list[str]:
    """The statuses of TrackbedReady that were written to a Node since a time (seconds since the epoch)."""
    bodies = [
        event["requestObject"]
        for event in plane.audit()
        if received(event) >= since
        and event["verb"] == "patch"
        and event.get("objectRef", {}).get("subresource") == "status"
        and event["objectRef"].get("name") == name
        and wrote(event, name)
        and event["responseStatus"]["code"] == 200
    ]
    conditions = [c for body in bodies for c in body["status"]["conditions"]]
    return [str(c["status"]) for c in conditions if c["type"] == "TrackbedReady"]


def test_an_agent_that_fails_its_first_pass_is_taken_back_and_the_node_not_ready_until_then(
    member: Member, tmp_path: Path
) -> None:
    plane, node, name = member
    sleeping(plane, name, "upgraded")
    before = plane.get("pod", "upgraded")
    current = node.sh("readlink /opt/trackbed/current")
    checkout = tmp_path / "trackbed"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
    loop = checkout / "agent" / "service" / "loop.py"
    whole = loop.read_text()
    assert whole.count(BEGINNING) == 1
    loop.write_text(whole.replace(BEGINNING, f'        raise RuntimeError("broken on purpose")\n{BEGINNING}'))
    began = node.sh("date +@%s").strip()
    words = ["-y", INVENTORY, "deploy.py", "--limit", node.name, "--data", "ready_timeout=60"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pyinfra")), *words],
        cwd=checkout,
        # The environment has the packages of this checkout, which would come first.
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert f"rolled back to {current.strip().rpartition('/')[2]}" in output
    assert node.sh("readlink /opt/trackbed/current") == current
    eventually("ready again", lambda: is_open(plane, name), LONG)
    assert report(node)["agent_version"] == current.strip().rpartition("/")[2]
    # Until it was stopped, the former agent could rightly say again that the node is ready.
    stops = node.sh(f"journalctl --unit=trackbed --since={began} --output=short-unix --no-pager --grep='^Stopping'")
    *meanwhile, last = published(plane, name, float(stops.split()[0]))
    assert last == "True"
    assert meanwhile
    assert "True" not in meanwhile
    after = plane.get("pod", "upgraded")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    plane.kubectl("delete", "pod", "upgraded", "--wait=false")


def network(pci: str, number: int) -> str:
    """A network whose pods get the VF itself."""
    address = f"{SUBNET}.{number}"
    ipam = {"type": "static", "addresses": [{"address": f"{address}/24"}]}
    plugin = {"type": "host-device", "pciBusID": pci, "ipam": ipam}
    return json.dumps({"cniVersion": "1.0.0", "name": "vf", "plugins": [plugin]})


def irqs(node: Node, pci: str) -> list[str]:
    """The affinities of a function's interrupts."""
    return node.sh(
        f"for irq in $(ls /sys/bus/pci/devices/{pci}/msi_irqs); do cat /proc/irq/$irq/smp_affinity; done"
    ).split()


def test_pods_on_two_nodes_talk_by_vfs_of_their_own_which_come_back(fresh_cluster: Cluster) -> None:
    cluster, plane = fresh_cluster, fresh_cluster.plane
    for node in cluster.nodes:
        opened(plane, node)
    before = []
    for number, node in enumerate(cluster.nodes, 1):
        nic = node.machine.nics[0]
        steering = node.sh(f"cat /sys/class/net/{nic.netdev}v2/queues/rx-0/rps_cpus").strip()
        assert int(steering.replace(",", ""), 16) != 0
        before.append((steering, irqs(node, nic.vf_pcis[2])))
        node.write(CONFLIST, network(nic.vf_pcis[2], number))
    pods = ("vf-server", "vf-client")
    try:
        for pod, program, name in zip(pods, (SERVE, SEND), cluster.names, strict=True):
            words = ["/usr/bin/python3", "-u", "-c", program + "import time; time.sleep(3600)"]
            plane.apply(manifests.pod(pod, words, selector={"kubernetes.io/hostname": name}))
            eventually(f"{pod} has said something", lambda pod=pod: logs(plane, pod) != "", LONG)  # type: ignore[misc]
        eventually("all is received", lambda: str(MEBIBYTES << 20) in logs(plane, "vf-server"), LONG)
        print(logs(plane, "vf-client"))  # noqa: T201
        for pod, node, (steering, affinities) in zip(pods, cluster.nodes, before, strict=True):
            assert plane.get("pod", pod)["status"]["podIP"].startswith(f"{SUBNET}.")
            pci = node.machine.nics[0].vf_pcis[2]
            inside = ("exec", pod, "--", "cat", "/sys/class/net/eth0/queues/rx-0/rps_cpus")
            eventually("RPS inside", lambda i=inside, s=steering: plane.kubectl(*i).strip() == s)  # type: ignore[misc]
            assert irqs(node, pci) == affinities
            assert node.run(["trackbed", "plan"]).returncode == 0
    finally:
        plane.kubectl("delete", "pod", *pods, "--ignore-not-found", timeout=LONG)
        for node in cluster.nodes:
            node.sh(f"rm -f {CONFLIST}")
    for node in cluster.nodes:
        nic = node.machine.nics[0]
        eventually("the VF is back", lambda n=node, c=nic: is_back(n, c.vf_pcis[2], f"{c.netdev}v2"))  # type: ignore[misc]
        settled(node)
        assert "inet " not in node.sh(f"ip addr show dev {nic.netdev}v2")


def is_back(node: Node, pci: str, netdev: str) -> bool:
    return node.run(["ls", f"/sys/bus/pci/devices/{pci}/net"]).stdout.split() == [netdev]


def logs(plane: ControlPlane, pod: str) -> str:
    assert phase(plane, pod) != "Failed", plane.try_kubectl("logs", pod).stdout
    return plane.try_kubectl("logs", pod).stdout
