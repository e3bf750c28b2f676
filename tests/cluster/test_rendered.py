"""From nodes that have not joined to data between pods: the deploy, `kubectl apply -k` of what it rendered, the test pods.

No step is by hand. It takes two nodes of the lab. Each has an RDMA device on each PF, as cards have it: rxe stands for the
cards. With a lab of its own it takes some 50 minutes, on one that is kept (TRACKBED_KEEP_LAB) some 30; neither was measured.
"""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab import Node
from lab.cluster import bundle, manifests, network_plugins
from lab.cluster.control_plane import ControlPlane
from tests.cluster import rendered
from tests.cluster.conftest import LONG, Cluster, restore
from tests.cluster.rendered import FIRST_NUMBER, exchange, running, with_little_load
from tests.cluster.test_gate import phase
from tests.deploy.examples.perftest_commands import commands
from tests.lab.conftest import ROOT, eventually

pytestmark = pytest.mark.campaign

# The data of the lab's cluster, with an address and an RDMA device on each PF.
INVENTORY = """
from pathlib import Path as _Path

from inventories.lab_cluster import lab as _nodes
from lab.cluster import manifests as _manifests
from lab.cluster import network_plugins as _network_plugins

_rdma = {"gid_type": "RoCE v2", "gid_ipv4": True}


def _nics(nics):
    each = enumerate(nics)
    return [{**nic, "rail": rail, "addresses": [{"network": "10.77.{rail}.0/24"}], "rdma": _rdma} for rail, nic in each]


def _data(number, data):
    plugins = _manifests.wanted(_Path($folder), _network_plugins.built())
    own = {"node_number": number, "nics": _nics(data["nics"]), "device_plugins": plugins, "ready_timeout": 900}
    return {**data, **own}


lab = [(name, _data(number, data)) for number, (name, data) in enumerate(_nodes, $first)]
"""
FIRST_RAIL = "10.77.0.{number}"
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


def prepare(plane: ControlPlane, node: Node) -> None:
    """A node that has not joined, with an RDMA device on each PF."""
    restore(plane, node)
    node.sh("modprobe -a rdma_rxe rdma_ucm ib_umad")
    for nic in node.machine.nics:
        node.sh(f"rdma link add rxe_{nic.netdev} type rxe netdev {nic.netdev}")


@pytest.fixture(scope="module")
def deployed(fresh_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """The cluster, whose nodes are ready and open for pods, and the folder of the rendered manifests."""
    work = tmp_path_factory.mktemp("rendered")
    with rendered.deployed(fresh_cluster, work, INVENTORY, prepare, first=FIRST_NUMBER) as folder:
        rendered.have(fresh_cluster, manifests.RESOURCE, manifests.SHARES)
        yield fresh_cluster, folder


@pytest.fixture
def on_the_hosts_network(deployed: tuple[Cluster, Path]) -> Iterator[Cluster]:
    """The cluster, with the rendered test pods that are in the nodes' network."""
    cluster, folder = deployed
    with running(cluster.plane, folder, "rdma-test"):
        yield cluster


def rdma_device(node: Node, rail: int) -> str:
    """The name of a rail's RDMA device, which rdma-core's udev rule gives it; the same on each node, as the slots are."""
    return node.sh(f"ls /sys/bus/pci/devices/{node.machine.nics[rail].pci}/infiniband").strip()


def measured(cluster: Cluster, pods: str, serve: str, ask: str) -> None:
    """Run a server and a client of perftest in two pods on the nodes' network, over the first rail."""
    node = rendered.node_of(cluster, f"{pods}-server")
    rail = FIRST_RAIL.format(number=FIRST_NUMBER + cluster.nodes.index(node))
    exchange(cluster, pods, *(with_little_load(words, rdma_device(node, 0), rail) for words in (serve, ask)))


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
def with_netdevs(deployed: tuple[Cluster, Path]) -> Iterator[Cluster]:
    """The cluster, and pods with a macvlan each, by a network annotation."""
    cluster, folder = deployed
    missing = {"multus", "whereabouts"} - set(network_plugins.built())
    if missing:
        pytest.skip(f"the Go module proxy does not serve {' and '.join(sorted(missing))}")
    with running(cluster.plane, folder, "macvlan-test"):
        yield cluster


def test_data_between_two_pods_with_a_netdev_of_their_own(with_netdevs: Cluster) -> None:
    """By TCP, on any kernel."""
    plane = with_netdevs.plane
    server, client = (f"macvlan-test-{role}" for role in ("server", "client"))
    assert rendered.address(plane, server) != rendered.address(plane, client)
    assert re.match(r"10\.56\.217\.\d+$", rendered.address(plane, server))
    assert "uverbs" in plane.kubectl("exec", client, "--", "sh", "-c", "cd /dev/infiniband && echo *")
    # The server's own input stays open: at its end nc would shut down its side, and the other nc ends at that, with data left.
    receive = ("sh", "-c", "busybox mkfifo /dev/shm/open; nc -l -p 5001 <>/dev/shm/open | md5sum")
    send = f"cat /usr/bin/ib_write_bw | nc -w 60 {rendered.address(plane, server)} 5001"
    wanted = plane.kubectl("exec", client, "--", "md5sum", "/usr/bin/ib_write_bw").split()[0]
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(plane.kubectl, "exec", server, "--", *receive, timeout=LONG)
        # 5001 is 0x1389, and 0A the state of a socket that listens.
        heard = ("exec", server, "--", "cat", "/proc/net/tcp", "/proc/net/tcp6")
        eventually("the server listens", lambda: bool(re.search(r":1389 \S+ 0A", plane.kubectl(*heard))), LONG)
        plane.kubectl("exec", client, "--", "sh", "-c", send, timeout=LONG)
        assert receiving.result(LONG).split()[0] == wanted


@pytest.mark.parametrize("pair", commands("rdma-test"), ids=lambda pair: pair[1])
def test_roce_data_between_two_pods_with_a_netdev_of_their_own(with_netdevs: Cluster, pair: tuple[str, str]) -> None:
    rendered.needs_roce_in_pods(with_netdevs)
    device = rdma_device(with_netdevs.nodes[0], 0)
    netdevs = rendered.own_netdevs(with_netdevs.plane, "macvlan-test", device)
    rendered.exchange_by(with_netdevs, "macvlan-test", netdevs, pair)
