"""Two nodes deployed with an inventory of the test's own, the manifests of that deploy, and data between their test pods."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from string import Template

import attrs
import pytest

from fleet.fabric.results import parse
from fleet.fabric.tests import TESTS, FabricSettings
from lab import Node, instance
from lab.cluster import commands as lab_commands
from lab.cluster import join, manifests
from lab.cluster.control_plane import ControlPlane
from tests.cluster.conftest import LONG, Cluster, is_open, joined, restore
from tests.cluster.test_gate import phase
from tests.cluster.test_stories import allocatable, listens
from tests.lab.conftest import eventually, pyinfra, succeeded

FIRST_NUMBER = 11
"""The number of the first node, which its rails' addresses end with."""

# An emulated node answers late, and rxe of Linux 6.1 refuses what is then sent again (REM_INV_REQ_ERR).
FEW, SMALL, SHORT = ("-n", "100"), ("-s", "4096"), ("-t", "4")


@contextmanager
def deployed(
    cluster: Cluster, work: Path, inventory: str, prepare: Callable[[ControlPlane, Node], None], **values: object
) -> Iterator[Path]:
    """Deploy the nodes, apply what was rendered, let them join, and wait until they are open for pods.

    :param inventory: its text, with ``$folder`` for that of the manifests, and ``values``. The file is in the folder ``work``.
    :param prepare: what makes a node one that has not joined.
    :returns: the folder of the manifests.
    """
    plane, folder = cluster.plane, work / "manifests"
    # pyinfra reads group_data/lab_cluster.py, since this inventory has that name.
    file = work / "lab_cluster.py"
    file.write_text(Template(inventory).substitute(folder=repr(str(folder)), **values))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: prepare(plane, node), cluster.nodes))
    succeeded(pyinfra("-y", "--group-data", "group_data", str(file), "deploy.py", timeout=3600))
    before = lab_commands.rendered(instance.named())
    plane.kubectl("delete", "-k", str(before), "--ignore-not-found", timeout=LONG)
    manifests.apply(plane, folder)
    for node in cluster.nodes:
        joined(plane, node, str(file))
    for node, name in zip(cluster.nodes, cluster.names, strict=True):
        join.wait_ready(plane, node)
        # The spec requires the plugin's resource, so a node is open once the rendered plugin has registered it.
        eventually(f"{name}: ready and untainted", lambda name=name: is_open(plane, name), LONG)  # type: ignore[misc]
    yield folder
    # Other tests of a cluster that is kept find it as its own deploy made it.
    if (folder / "network-plugins").exists():
        plane.kubectl("delete", "-k", str(folder / "network-plugins"), timeout=LONG)
    plane.kubectl("delete", "-k", str(folder), "--ignore-not-found", timeout=LONG)
    manifests.apply(plane, before)
    for node in cluster.nodes:
        restore(plane, node)


def have(cluster: Cluster, resource: str, each: int) -> None:
    """Each node offers so many of a resource."""
    for name in cluster.names:
        assert allocatable(cluster.plane, name, resource) == str(each)


@contextmanager
def running(plane: ControlPlane, folder: Path, pods: str) -> Iterator[None]:
    """Create a file's two pods, and wait until they run, on two nodes. They are deleted in the end."""
    file, names = str(folder / f"{pods}-pods.yaml"), [f"{pods}-{role}" for role in ("server", "client")]
    try:
        plane.kubectl("apply", "--validate=strict", "-f", file)
        for name in names:
            eventually(name, lambda name=name: phase(plane, name) == "Running", LONG)  # type: ignore[misc]
        assert len({plane.get("pod", name)["spec"]["nodeName"] for name in names}) == 2
        yield
    finally:
        plane.try_kubectl("delete", "--ignore-not-found", "-f", file, timeout=LONG)


def with_little_load(command: str, device: str, address: str) -> list[str]:
    """The words of a page's command, with options that make it modest and do not contradict its own."""
    given = [{"DEVICE": device, "ADDRESS": address, "RAIL": address}.get(word, word) for word in command.split()]
    few, small = () if "-D" in given or "-a" in given else FEW, () if "-a" in given else SMALL
    return [given[0], *few, *small, *SHORT, *given[1:]]


def node_of(cluster: Cluster, pod: str) -> Node:
    """The node on which a pod runs."""
    return cluster.nodes[cluster.names.index(cluster.plane.get("pod", pod)["spec"]["nodeName"])]


def exchange(cluster: Cluster, pods: str, serve: list[str], ask: list[str]) -> None:
    """Run a server of perftest in one of two pods and its client in the other: data arrive."""
    plane, node = cluster.plane, node_of(cluster, f"{pods}-server")
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(plane.kubectl, "exec", f"{pods}-server", "--", *serve, timeout=LONG)
        eventually("the server listens", lambda: serving.done() or listens(node), LONG)
        output = plane.kubectl("exec", f"{pods}-client", "--", *ask, timeout=LONG)
        serving.result(LONG)
    print(output)  # noqa: T201
    assert parse(TESTS[ask[0]], output, FabricSettings()), output
    assert ("CPU_Util[%]" in output) == ("--cpu_util" in ask)


@attrs.frozen
class OwnNetdev:
    """A pod's netdev by its network annotation. ``gid``: the index of its address in the GID table of ``device``."""

    address: str
    device: str
    gid: int


def needs_roce_in_pods(cluster: Cluster) -> None:
    """Skip the test if the nodes' rxe works in the host's network namespace only."""
    if not all("rxe_ns_sockets" in node.sh("modprobe rdma_rxe; cat /proc/kallsyms") for node in cluster.nodes):
        pytest.skip("rxe of this kernel works in the host's network namespace only: TRACKBED_LAB_DEBIAN=13-backports")


def own_netdevs(plane: ControlPlane, pods: str, device: str | None = None) -> list[OwnNetdev]:
    """The second netdevs of the two pods, the server's first.

    :param device: the RDMA device whose GIDs their addresses make; None: the pod's only one.
    """
    return [_own_netdev(plane, f"{pods}-{role}", device) for role in ("server", "client")]


def address(plane: ControlPlane, pod: str) -> str:
    """The address of a pod's second netdev, as Multus has reported it to the API server."""
    status = plane.get("pod", pod)["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"]
    (second,) = [each for each in json.loads(status) if each.get("interface") == "net1"]
    return str(second["ips"][0])


def _own_netdev(plane: ControlPlane, pod: str, device: str | None) -> OwnNetdev:
    mine = address(plane, pod)
    devices = plane.kubectl("exec", pod, "--", "sh", "-c", "cd /sys/class/infiniband && echo *").split()
    if device is None:
        (device,) = devices
    assert device in devices
    # RoCE v2's GID is the second one of an address on a card; rxe has no other.
    mapped = "0000:0000:0000:0000:0000:ffff:" + "{:02x}{:02x}:{:02x}{:02x}".format(*map(int, mine.split(".")))
    table = f"/sys/class/infiniband/{device}/ports/1/gids"
    script = f"cd {table} && for index in *; do read gid < $index && [ $gid = {mapped} ] && echo $index; done; true"
    gids: list[str] = []

    def has_gid() -> bool:
        gids[:] = plane.kubectl("exec", pod, "--", "sh", "-c", script).split()
        return bool(gids)

    eventually(f"{pod}: a GID of {mine}", has_gid, LONG)
    return OwnNetdev(mine, device, int(gids[0]))


def exchange_by(cluster: Cluster, pods: str, netdevs: list[OwnNetdev], pair: tuple[str, str]) -> None:
    """Run a page's pair of commands between two pods by their own netdevs."""
    serve, ask = (
        [*with_little_load(words, own.device, netdevs[0].address), "-x", str(own.gid)]
        for words, own in zip(pair, netdevs, strict=True)
    )
    exchange(cluster, pods, serve, ask)
