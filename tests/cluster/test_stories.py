"""Trackbed's promises about a node in a real cluster, checked by the API, the audit log and the nodes' journals."""

import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any

from lab import Node
from lab.cluster import join, manifests
from lab.cluster.control_plane import ControlPlane
from tests.cluster.conftest import LONG, Cluster, Member, condition, is_open, joined, restore, tainted
from tests.cluster.objects import unschedulable
from tests.cluster.test_gate import phase, plugin_pods
from tests.lab.conftest import eventually
from tests.lab.test_gate import BLOCKER, VERIFIED, first_said_at, started, unit

SIZE = 4096

NO_GATE = PurePosixPath("/etc/systemd/system/kubelet.service.d/99-no-gate.conf")
"""A drop-in of the kubelet's unit. With it the kubelet starts without waiting at the gate."""


def allocatable(plane: ControlPlane, name: str, resource: str = manifests.RESOURCE) -> str:
    return str(plane.get("node", name)["status"].get("allocatable", {}).get(resource, "0"))


def first_write(plane: ControlPlane, name: str, since: str, holds: Callable[[dict[str, Any]], bool]) -> str:
    """When a write to a Node that the test recognises was over, by the audit log from this moment on."""
    stamps = [
        str(event["stageTimestamp"])
        for event in plane.audit()
        if event.get("objectRef", {}).get("name") == name
        and event["verb"] == "patch"
        and event["stageTimestamp"] >= since
        and event["responseStatus"]["code"] == 200
        and holds(event)
    ]
    assert stamps, "there is no such write"
    return min(stamps)


def body(event: dict[str, Any]) -> str:
    return json.dumps(event.get("requestObject"))


def lifts(event: dict[str, Any]) -> bool:
    """Whether a taint is taken away by a JSON patch: the reporter's is the only one here."""
    return '"op": "remove", "path": "/spec/taints' in body(event)


def sleeping(plane: ControlPlane, node: str, pod: str) -> None:
    """Create a pod that sleeps on a node and has a share of its RDMA devices, and wait until it runs."""
    plane.apply(manifests.pod(pod, ["sleep", "infinity"], rdma=1, selector={"kubernetes.io/hostname": node}))
    eventually("the pod", lambda: phase(plane, pod) == "Running", LONG)


def run_to_end(plane: ControlPlane, pod: str) -> str:
    eventually(f"the end of {pod}", lambda: phase(plane, pod) in ("Succeeded", "Failed"), LONG)
    output = plane.kubectl("logs", pod)
    assert phase(plane, pod) == "Succeeded", output
    return output


def test_a_nodes_first_day_ends_with_a_pod_that_has_its_device(fresh_cluster: Cluster) -> None:
    plane, (_, node) = fresh_cluster.plane, fresh_cluster.nodes
    restore(plane, node)
    began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    name = joined(plane, node)
    plane.apply(manifests.pod("first", ["ibv_devinfo"], rdma=1, selector={"kubernetes.io/hostname": name}))
    join.wait_ready(plane, node)
    eventually("TrackbedReady", lambda: condition(plane, name) == "True", LONG)
    eventually("the plugin's resource", lambda: allocatable(plane, name) == str(manifests.SHARES), LONG)
    eventually("the taint's end", lambda: not tainted(plane, name), LONG)
    output = run_to_end(plane, "first")
    assert "PORT_ACTIVE" in output
    ready = first_write(plane, name, began, lambda e: "TrackbedReady" in body(e) and '"True"' in body(e))
    labelled = first_write(plane, name, began, lambda e: "/metadata/labels/rdma" in body(e))
    lifted = first_write(plane, name, began, lifts)
    created = plugin_pods(plane, name)[0]["metadata"]["creationTimestamp"]
    given = first_write(plane, name, began, lambda e: manifests.RESOURCE in body(e) and "allocatable" in body(e))
    assert ready < labelled < lifted
    assert labelled[:19] <= created.rstrip("Z") <= lifted[:19]
    assert given < lifted
    plane.kubectl("delete", "pod", "first", "--wait=false")


def test_the_vf_driver_unloaded_under_a_running_pod(member: Member) -> None:
    plane, node, name = member
    sleeping(plane, name, "stays")
    uid = plane.get("pod", "stays")["metadata"]["uid"]
    # Loading is made impossible first: the agent would repair it before anybody could look.
    node.sh("mkdir -p /run/modprobe.d; echo 'install igbvf /bin/false' > /run/modprobe.d/blocker.conf; rmmod igbvf")
    took = eventually("TrackbedReady False and the taint", lambda: condition(plane, name) == "False")
    assert tainted(plane, name)
    assert took < 30
    assert "trackbed.internal/ready" not in plane.get("node", name)["metadata"]["labels"]
    pod = plane.get("pod", "stays")
    assert (pod["status"]["phase"], pod["metadata"]["uid"]) == ("Running", uid)
    node.sh("rm /run/modprobe.d/blocker.conf; modprobe igbvf")
    eventually("ready again", lambda: is_open(plane, name), LONG)
    assert plane.get("pod", "stays")["metadata"]["uid"] == uid
    plane.kubectl("delete", "pod", "stays", "--wait=false")


def test_after_a_power_cut_no_container_starts_before_the_node_is_verified(member: Member) -> None:
    plane, node, name = member
    sleeping(plane, name, "bound-before")
    plugin = plugin_pods(plane, name)[0]["metadata"]["uid"]
    node.sh("sync")
    cut = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    node.power_cut()
    node.boot()
    eventually("the kubelet", lambda: unit(node, "kubelet", "SubState") == ["running"], LONG)
    verified = first_said_at(node, "trackbed", VERIFIED)
    assert started(node, "kubelet") > verified
    eventually("ready again", lambda: is_open(plane, name), LONG)
    assert first_said_at(node, "containerd", "StartContainer|RunPodSandbox") > verified
    # What was allocatable before the boot lifts no taint: the kubelet has told the Node of this boot first.
    boot = node.sh("cat /proc/sys/kernel/random/boot_id").strip()
    published = first_write(plane, name, cut, lambda e: boot in body(e))
    assert published < first_write(plane, name, cut, lifts)
    # Behind the gate the plugin saw all devices when it started.
    assert [pod["metadata"]["uid"] for pod in plugin_pods(plane, name)] == [plugin]
    plane.apply(manifests.pod("after", ["ibv_devices"], rdma=1, selector={"kubernetes.io/hostname": name}))
    run_to_end(plane, "after")
    plane.kubectl("delete", "pod", "after", "bound-before", "--wait=false")


def test_without_a_gate_a_plugin_that_started_before_its_devices_starts_again(member: Member) -> None:
    plane, node, name = member
    eventually("the plugin", lambda: allocatable(plane, name) == str(manifests.SHARES), LONG)
    plugin = plugin_pods(plane, name)[0]["metadata"]["uid"]
    node.sh(f"mkdir -p {NO_GATE.parent}; printf '[Service]\\nExecStartPre=\\n' > {NO_GATE}")
    node.sh(f"echo 'install igbvf /bin/false' > {BLOCKER}; sync")
    try:
        node.power_cut()
        node.boot()
        eventually("the kubelet", lambda: unit(node, "kubelet", "SubState") == ["running"], LONG)
        boot = node.sh("cat /proc/sys/kernel/random/boot_id").strip()
        eventually("the Node of this boot", lambda: shown_boot(plane, name) == boot, LONG)
        assert condition(plane, name) != "True"
    finally:
        node.sh(f"rm -f {BLOCKER} {NO_GATE}; systemctl daemon-reload; modprobe igbvf")
    eventually("ready again", lambda: is_open(plane, name), LONG)
    assert plugin not in [pod["metadata"]["uid"] for pod in plugin_pods(plane, name)]
    assert allocatable(plane, name) == str(manifests.SHARES)


def shown_boot(plane: ControlPlane, name: str) -> str:
    return str(plane.get("node", name)["status"]["nodeInfo"]["bootID"])


def test_a_pod_that_wants_a_device_waits_for_a_node_that_has_lost_readiness(member: Member) -> None:
    plane, node, name = member
    node.sh("systemctl stop trackbed")
    eventually("the taint", lambda: tainted(plane, name), LONG)
    plane.apply(manifests.pod("waits", ["ibv_devices"], rdma=1, selector={"kubernetes.io/hostname": name}))
    eventually("the scheduler's refusal", lambda: unschedulable(plane.get("pod", "waits")))
    node.sh("systemctl start trackbed")
    run_to_end(plane, "waits")
    plane.kubectl("delete", "pod", "waits", "--wait=false")


def roce_gid(node: Node, device: str, address: str) -> int:
    """The index of the GID that an IPv4 address has given a device."""
    last = "".join(f"{int(part):02x}" for part in address.split("."))
    gids = node.sh(f"cd /sys/class/infiniband/{device}/ports/1/gids; grep -H . *").splitlines()
    entries = [line.split(":", 1) for line in gids]
    return next(int(index) for index, gid in entries if gid.replace(":", "").endswith(f"ffff{last}"))


def listens(node: Node) -> bool:
    """Whether perftest waits for its client, by TCP or by the RDMA CM, in any pod. It prints that only on a terminal."""
    each = "nsenter --target=$pid --net sh -c 'ss -Hltn; rdma resource show cm_id'"
    return ":18515 " in node.sh(f"for pid in $(lsns --raw --noheadings --type=net --output=PID); do {each}; done")


def test_pods_on_two_nodes_move_data_between_their_devices(fresh_cluster: Cluster) -> None:
    plane, names = fresh_cluster.plane, fresh_cluster.names
    addresses = [f"192.168.61.{number}" for number in (1, 2)]
    arguments = []
    for node, name, address in zip(fresh_cluster.nodes, names, addresses, strict=True):
        eventually(f"{name}: untainted", lambda name=name: not tainted(plane, name), LONG)  # type: ignore[misc]
        nic = node.machine.nics[0]
        netdev = f"{nic.netdev}v0"
        node.sh(f"ip addr replace {address}/24 dev {netdev}")
        device = node.sh(f"ls /sys/bus/pci/devices/{nic.vf_pcis[0]}/infiniband").strip()
        # An emulated node answers late, and rxe of Linux 6.1 refuses what is then sent again (REM_INV_REQ_ERR).
        with_little_load = ["-F", "-n", "200", "-s", str(SIZE), "-t", "4"]
        arguments.append(["-d", device, "-x", str(roce_gid(node, device, address)), *with_little_load])
    for tool, more in (("ib_write_bw", []), ("ib_send_bw", ["-R"])):
        pods = [f"{tool.replace('_', '-')}-{side}" for side in ("server", "client")]
        commands = [[tool, *arguments[0], *more], [tool, *arguments[1], *more, addresses[0]]]
        for pod, command, name in zip(pods, commands, names, strict=True):
            selector = {"kubernetes.io/hostname": name}
            plane.apply(manifests.pod(pod, command, rdma=1, host_network=True, selector=selector))
            if pod == pods[0]:
                eventually(f"{pod} listens", lambda: listens(fresh_cluster.nodes[0]), LONG)
        output = run_to_end(plane, pods[1])
        figures = [line.split() for line in output.splitlines() if line.split()[:2] == [str(SIZE), "200"]]
        assert figures, output
        assert float(figures[0][3]) > 0, output
        plane.kubectl("delete", "pod", *pods, "--wait=false")
