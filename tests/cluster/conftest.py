"""A real control plane for the tests in this folder, and two nodes of the lab that join it."""

import os
from collections.abc import Callable, Iterator

import attrs
import pytest

# The suite's own lab: one that a person has running is left alone.
os.environ["TRACKBED_LAB"] = os.environ.get("TRACKBED_TEST_LAB", "test")

from agent.report.names import TAINT
from lab import LabError, Node, fleet, instance
from lab.cluster import commands, join, manifests
from lab.cluster.control_plane import ControlPlane
from tests.cluster.planes import WITH_DEVICE_TAINTS, running
from tests.lab.conftest import (
    eventually,
    pyinfra,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    settled,
    succeeded,
)

__all__ = ["pytest_runtest_makereport", "pytest_runtest_protocol"]

INSTALLED = "installed"
# For hangs, not for speed: an emulated node takes minutes to boot, and to start a pod, while others run beside it.
LONG = 600.0
Member = tuple[ControlPlane, Node, str]
Say = Callable[[str], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print a measured number although the test passes."""

    def printed(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")  # noqa: T201

    return printed


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, API server, controller manager and scheduler, without nodes; shared, so give your objects names of their own."""
    with running(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture(scope="session")
def device_taints_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Such a control plane of a version that has DeviceTaintRules; the programs are built once."""
    with running(tmp_path_factory.mktemp("device-taints"), WITH_DEVICE_TAINTS) as plane:
        yield plane


@attrs.frozen
class Cluster:
    """The cluster and its nodes; `names` are those of their Nodes."""

    plane: ControlPlane
    nodes: tuple[Node, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Their node names in their specs."""
        return tuple(join.node_name(node) for node in self.nodes)


def restore(plane: ControlPlane, node: Node) -> None:
    """Restore a node to before it joined. Its reporter is restarted, since the connections in the snapshot are dead."""
    node.restore(INSTALLED)
    plane.kubectl("delete", "node", join.node_name(node), "--ignore-not-found")
    node.sh("systemctl restart trackbed-reporter", timeout=120)


def kept() -> bool:
    """Whether this run uses the lab that an earlier one has kept."""
    try:
        return bool(os.environ.get("TRACKBED_KEEP_LAB")) and all(node.has(INSTALLED) for node in fleet.nodes())
    except LabError:
        return False


@pytest.fixture(scope="session")
def fresh_cluster() -> Iterator[Cluster]:
    """A control plane, and nodes with the whole deploy and with containerd and a kubelet, which have not joined yet.

    Those of a lab that is kept are as the run before left them: a test that needs a fresh node restores it.
    """
    keep = os.environ.get("TRACKBED_KEEP_LAB")
    lab = instance.named()
    if not keep:
        commands.discard(lab)
        fleet.down()
    if kept():
        yield Cluster(commands.plane_of(lab), fleet.nodes())
        return
    fleet.up()
    plane = commands.bring_up(lab)
    nodes = fleet.nodes()
    succeeded(pyinfra("-y", "inventories/lab_cluster.py", "deploy.py"))
    manifests.apply(plane, commands.rendered(lab))
    for node in nodes:
        settled(node)
        node.snapshot(INSTALLED)
    yield Cluster(plane, nodes)
    if not keep:
        commands.discard(lab)
        fleet.down()


def condition(plane: ControlPlane, name: str, type: str = "TrackbedReady") -> str:
    conditions = plane.get("node", name)["status"].get("conditions", [])
    return next((str(c["status"]) for c in conditions if c["type"] == type), "none")


def tainted(plane: ControlPlane, name: str) -> bool:
    return any(taint["key"] == TAINT for taint in plane.get("node", name)["spec"].get("taints", []))


def is_open(plane: ControlPlane, name: str) -> bool:
    return condition(plane, name) == "True" and not tainted(plane, name)


def joined(plane: ControlPlane, node: Node, inventory: str = "inventories/lab_cluster.py") -> str:
    """Join a node, wait until it has a Node, and bring its reporter's token, as an operator does; the Node's name."""
    name = join.join(plane, node)
    eventually(f"{name}: its kubelet registers", lambda: plane.try_kubectl("get", "node", name).returncode == 0, LONG)
    succeeded(pyinfra("-y", inventory, "deploys/token.py", "--limit", node.name))
    return name


def opened(plane: ControlPlane, node: Node) -> str:
    """Join a node unless it has joined, and wait until it is ready and untainted; its Node's name."""
    name = join.node_name(node)
    if not join.ready(plane, name):
        joined(plane, node)
        join.wait_ready(plane, node)
    eventually(f"{name}: ready and untainted", lambda: is_open(plane, name), LONG)
    return name


@pytest.fixture
def member(fresh_cluster: Cluster) -> Member:
    """The control plane, and one node that has joined and is ready, with its Node's name."""
    node = fresh_cluster.nodes[0]
    return fresh_cluster.plane, node, opened(fresh_cluster.plane, node)
