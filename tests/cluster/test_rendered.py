"""From nodes that have not joined to data between pods: the deploy, `kubectl apply -k` of what it rendered, the test pods.

No step is by hand. It takes two nodes of the lab. Each has an RDMA device on each PF, as cards have it: rxe stands for the
cards. With a lab of its own it takes some 50 minutes, on one that is kept (TRACKBED_KEEP_LAB) some 30; neither was measured.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleet.fabric.results import parse
from fleet.fabric.tests import TESTS
from lab import Node, instance
from lab.cluster import bundle, join, manifests, network_plugins
from lab.cluster import commands as lab_commands
from lab.cluster.control_plane import ControlPlane
from tests.cluster.conftest import LONG, Cluster, is_open, restore
from tests.cluster.test_gate import phase
from tests.cluster.test_stories import allocatable, listens
from tests.deploy.examples.perftest_commands import commands
from tests.lab.conftest import ROOT, eventually, pyinfra

pytestmark = pytest.mark.campaign

NETWORK = "10.77.{rail}.0/24"
FIRST_NUMBER = 11
# The data of the lab's cluster, with an address and an RDMA device on each PF. The file's name makes pyinfra read
# group_data/lab_cluster.py.
INVENTORY = """
from pathlib import Path as _Path

from inventories.lab_cluster import lab as _nodes
from lab.cluster import manifests as _manifests
from lab.cluster import network_plugins as _network_plugins

_rdma = {{"gid_type": "RoCE v2", "gid_ipv4": True}}


def _nics(nics):
    each = enumerate(nics)
    return [{{**nic, "rail": rail, "addresses": [{{"network": {network!r}}}], "rdma": _rdma}} for rail, nic in each]


def _data(number, data):
    plugins = _manifests.wanted(_Path({folder!r}), _network_plugins.built())
    own = {{"node_number": number, "nics": _nics(data["nics"]), "device_plugins": plugins, "ready_timeout": 900}}
    return {{**data, **own}}


lab = [(name, _data(number, data)) for number, (name, data) in enumerate(_nodes, {first})]
"""
EXAMPLES = ROOT / "examples"
# What a user of the examples changes for a cluster: the image, and the resource of the inventory.
OVERLAY = f"""
resources: ["{{example}}"]
images: [{{{{name: docker.io/mellanox/rping-test, newName: "{{image}}", newTag: "1"}}}}]
patches:
  - target: {{{{kind: Pod}}}}
    patch: |-
      - op: replace
        path: /spec/containers/0/resources/limits
        value: {{{{"{manifests.RESOURCE}": "1"}}}}
"""
# An emulated node answers late, and rxe of Linux 6.1 refuses what is then sent again (REM_INV_REQ_ERR).
FEW, SMALL, SHORT = ("-n", "100"), ("-s", "4096"), ("-t", "4")


def prepare(plane: ControlPlane, node: Node) -> None:
    """A node that has not joined, with an RDMA device on each PF."""
    restore(plane, node)
    node.sh("modprobe -a rdma_rxe rdma_ucm ib_umad")
    for nic in node.machine.nics:
        node.sh(f"rdma link add rxe_{nic.netdev} type rxe netdev {nic.netdev}")


@pytest.fixture(scope="module")
def deployed(fresh_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """The cluster, whose nodes are ready and open for pods, and the folder of the rendered manifests."""
    plane, work = fresh_cluster.plane, tmp_path_factory.mktemp("rendered")
    folder = work / "manifests"
    inventory = work / "lab_cluster.py"
    inventory.write_text(INVENTORY.format(network=NETWORK, folder=str(folder), first=FIRST_NUMBER))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: prepare(plane, node), fresh_cluster.nodes))
    done = pyinfra("-y", str(inventory), "deploy.py", timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    manifests.apply(plane, folder)
    for node in fresh_cluster.nodes:
        join.join(plane, node)
    for node, name in zip(fresh_cluster.nodes, fresh_cluster.names, strict=True):
        join.wait_ready(plane, node)
        # The spec requires the plugin's resource, so a node is open once the rendered plugin has registered it.
        eventually(f"{name}: ready and untainted", lambda name=name: is_open(plane, name), LONG)  # type: ignore[misc]
        assert allocatable(plane, name) == str(manifests.SHARES)
    yield fresh_cluster, folder
    # Other tests of a cluster that is kept find it as its own deploy made it.
    if (folder / "network-plugins").exists():
        plane.kubectl("delete", "-k", str(folder / "network-plugins"), timeout=LONG)
    manifests.apply(plane, lab_commands.rendered(instance.named()))
    for node in fresh_cluster.nodes:
        restore(plane, node)


def start(plane: ControlPlane, folder: Path, pods: str) -> None:
    """Create a file's two pods, and wait until they run, on two nodes."""
    plane.kubectl("apply", "--validate=strict", "-f", str(folder / f"{pods}-pods.yaml"))
    names = [f"{pods}-{role}" for role in ("server", "client")]
    for name in names:
        eventually(name, lambda name=name: phase(plane, name) == "Running", LONG)  # type: ignore[misc]
    assert len({plane.get("pod", name)["spec"]["nodeName"] for name in names}) == 2


def stop(plane: ControlPlane, folder: Path, pods: str) -> None:
    """Delete a file's pods."""
    plane.try_kubectl("delete", "--ignore-not-found", "-f", str(folder / f"{pods}-pods.yaml"), timeout=LONG)


@pytest.fixture
def on_the_hosts_network(deployed: tuple[Cluster, Path]) -> Iterator[Cluster]:
    """The cluster, with the rendered test pods that are in the nodes' network."""
    cluster, folder = deployed
    try:
        start(cluster.plane, folder, "rdma-test")
        yield cluster
    finally:
        stop(cluster.plane, folder, "rdma-test")


def modest(command: str, device: str, address: str) -> list[str]:
    """The words of a page's command, with options that make it modest and do not contradict its own."""
    given = [{"DEVICE": device, "ADDRESS": address, "RAIL": address}.get(word, word) for word in command.split()]
    few, small = () if "-D" in given or "-a" in given else FEW, () if "-a" in given else SMALL
    return [given[0], *few, *small, *SHORT, *given[1:]]


def rdma_device(node: Node, rail: int) -> str:
    """The name of a rail's RDMA device, which rdma-core's udev rule gives it; the same on each node, as the slots are."""
    return node.sh(f"ls /sys/bus/pci/devices/{node.machine.nics[rail].pci}/infiniband").strip()


def measured(cluster: Cluster, pods: str, serve: str, ask: str) -> None:
    """Run a server of perftest in one of two pods and its client in the other, over the first rail: data arrive."""
    plane, server, client = cluster.plane, f"{pods}-server", f"{pods}-client"
    node = cluster.nodes[cluster.names.index(plane.get("pod", server)["spec"]["nodeName"])]
    rail = f"10.77.0.{FIRST_NUMBER + cluster.nodes.index(node)}"
    device = rdma_device(node, 0)
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(plane.kubectl, "exec", server, "--", *modest(serve, device, rail), timeout=LONG)
        eventually("the server listens", lambda: serving.done() or listens(node), LONG)
        said = plane.kubectl("exec", client, "--", *modest(ask, device, rail), timeout=LONG)
        serving.result(LONG)
    print(said)  # noqa: T201
    assert parse(TESTS[ask.split()[0]], said), said
    assert ("CPU_Util[%]" in said) == ("--cpu_util" in ask)


@pytest.mark.parametrize("pair", commands("rdma-test"), ids=lambda pair: pair[1])
def test_data_between_two_pods_on_the_hosts_network(on_the_hosts_network: Cluster, pair: tuple[str, str]) -> None:
    measured(on_the_hosts_network, "rdma-test", *pair)


@pytest.fixture
def example(
    deployed: tuple[Cluster, Path], request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Cluster, list[str]]]:
    """The cluster, and the names of the pods of a file of examples/, with the lab's image and resource."""
    plane = deployed[0].plane
    shutil.copy(EXAMPLES / request.param, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        OVERLAY.format(example=request.param, image=bundle.perftest().reference.partition(":")[0])
    )
    try:
        said = plane.kubectl("apply", "--validate=strict", "-o", "name", "-k", str(tmp_path))
        yield deployed[0], [line.partition("/")[2] for line in said.split()]
    finally:
        plane.try_kubectl("delete", "--ignore-not-found", "-k", str(tmp_path), timeout=LONG)


@pytest.mark.parametrize("example", ["perftest.yaml"], indirect=True)
def test_the_pods_of_the_example_measure_the_first_rail(example: tuple[Cluster, list[str]]) -> None:
    cluster, pods = example
    for pod in pods:
        eventually(pod, lambda pod=pod: phase(cluster.plane, pod) == "Running", LONG)  # type: ignore[misc]
    measured(cluster, "perftest", *commands("perftest")[0])


@pytest.mark.parametrize("example", ["rdma-pod.yaml"], indirect=True)
def test_the_pod_of_the_example_lists_the_nodes_devices(example: tuple[Cluster, list[str]]) -> None:
    cluster, (pod,) = example
    eventually("its end", lambda: phase(cluster.plane, pod) == "Succeeded", LONG)
    said = cluster.plane.kubectl("logs", pod)
    for rail in range(len(cluster.nodes[0].machine.nics)):
        assert rdma_device(cluster.nodes[0], rail) in said
    assert said.count("PORT_ACTIVE") >= len(cluster.nodes[0].machine.nics), said


@pytest.fixture
def with_netdevs(deployed: tuple[Cluster, Path]) -> Iterator[ControlPlane]:
    """The control plane, and pods with a macvlan each, by a network annotation."""
    cluster, folder = deployed
    missing = {"multus", "whereabouts"} - set(network_plugins.built())
    if missing:
        pytest.skip(f"the Go module proxy does not serve {' and '.join(sorted(missing))}")
    try:
        start(cluster.plane, folder, "macvlan-test")
        yield cluster.plane
    finally:
        stop(cluster.plane, folder, "macvlan-test")


def address(plane: ControlPlane, pod: str) -> str:
    """The address of a pod's second netdev, as Multus has told the API server."""
    status = plane.get("pod", pod)["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"]
    (told,) = [each for each in json.loads(status) if each.get("interface") == "net1"]
    return str(told["ips"][0])


def test_data_between_two_pods_with_a_netdev_of_their_own(with_netdevs: ControlPlane) -> None:
    """By TCP: rxe has its socket in the host's network namespace only, and routes there (rxe_net.c of Linux 6.1)."""
    plane = with_netdevs
    server, client = (f"macvlan-test-{role}" for role in ("server", "client"))
    assert address(plane, server) != address(plane, client)
    assert re.match(r"10\.56\.217\.\d+$", address(plane, server))
    assert "uverbs" in plane.kubectl("exec", client, "--", "sh", "-c", "cd /dev/infiniband && echo *")
    # The server's own input stays open: at its end nc would shut down its side, and the other nc ends at that, with data left.
    receive = ("sh", "-c", "busybox mkfifo /dev/shm/open; nc -l -p 5001 <>/dev/shm/open | md5sum")
    send = f"cat /usr/bin/ib_write_bw | nc -w 60 {address(plane, server)} 5001"
    wanted = plane.kubectl("exec", client, "--", "md5sum", "/usr/bin/ib_write_bw").split()[0]
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(plane.kubectl, "exec", server, "--", *receive, timeout=LONG)
        # 5001 is 0x1389, and 0A the state of a socket that listens.
        heard = ("exec", server, "--", "cat", "/proc/net/tcp", "/proc/net/tcp6")
        eventually("the server listens", lambda: bool(re.search(r":1389 \S+ 0A", plane.kubectl(*heard))), LONG)
        plane.kubectl("exec", client, "--", "sh", "-c", send, timeout=LONG)
        assert receiving.result(LONG).split()[0] == wanted
