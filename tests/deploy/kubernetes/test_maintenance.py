"""A reboot of a host in a cluster: its Node is cordoned and drained before, and uncordoned once it is ready again."""

import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import define, evolve, field
from lightkube.models.core_v1 import EmptyDirVolumeSource, NodeSystemInfo
from pyinfra.connectors.util import CommandOutput
from pyinfra.operations import server

from agent.report import names
from fleet.maintenance_record import Record
from tasks import reboot_policy
from tasks.reboot import NodeRebootRequests
from tasks.reboot_users import RebootUsers
from tests.deploy.conftest import Connector, Node, Result, of, status
from tests.deploy.kubernetes.test_kubernetes import cluster_at
from tests.deploy.test_cli import REPORT
from tests.unit.fleet.nodes_api import Cluster
from tests.unit.fleet.test_maintenance import pod
from tests.unit.fleet.test_maintenance_requests import HEALTHY

USERS = of(RebootUsers)
OF_DEPLOY = Record("deployer", "2026", "drain", True, "reboot", "deploy again")


@define
class Machine:
    """The host. ``users``: the answers about who uses it, in turn; the last one stays. ``breaks``: its reboot breaks it.

    ``fails``: the command that fails.

    ``starts``: how many requests an API server on it does not answer after a boot.
    """

    cluster: Cluster
    boot: int = 1
    ready: bool = True
    drained: bool = False
    breaks: bool = False
    fails: str = ""
    starts: int = 0
    users: list[list[str]] = field(factory=lambda: [[]])

    def reports(self, ready: bool) -> None:
        """The agent reports whether the host is ready, and the Node has its conditions or not."""
        self.ready = ready
        self.cluster.nodes["node-a"]["status"] = deepcopy(HEALTHY["status"]) if ready else {"conditions": []}


class OfCluster(Connector):
    """A host that needs a reboot until it has booted once more."""

    machine: ClassVar[Machine]

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        machine, text = self.machine, str(command)
        if "systemctl reboot" in text:
            machine.boot += 1
            machine.cluster.starting = machine.starts
            machine.cluster.events.append("rebooted")
            if machine.breaks:
                machine.reports(ready=False)
        if machine.fails and machine.fails in text:
            return False, CommandOutput([])
        if "deliver the spec" in text and not machine.ready:
            machine.reports(ready=True)
            machine.cluster.events.append("ready")
        if "touch" in text and ".drained" in text:
            machine.drained = True
        elif text.startswith("sh -ec") and 'rm -f "$1/.drained"' in text:
            machine.drained = False
        boot = f"boot-{machine.boot}"
        answers = {
            of(NodeRebootRequests): [boot, "boot boot-1 x is missing ", *(["drained"] if machine.drained else [])]
        }
        if USERS in text:
            answers[USERS] = machine.users.pop(0) if len(machine.users) > 1 else machine.users[0]
        ready = status(REPORT) if machine.ready else {}
        self.data["fake_responses"] = {**ready, **answers, "cat /proc/sys/kernel": [boot]}
        return super().run_shell_command(command, *positional, **arguments)


@pytest.fixture
def cluster() -> Cluster:
    joined = {"metadata": {"name": "node-a", "resourceVersion": "7"}, **deepcopy(HEALTHY)}
    return Cluster({"node-a": joined}, [pod("job").to_dict(), pod("plugin", owner="DaemonSet").to_dict()])


@pytest.fixture
def host(node: Node, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(reboot_policy, "POLL_INTERVAL", 0)
    monkeypatch.setattr("fleet.node_patch.CHECK_INTERVAL", 0.01)
    monkeypatch.setattr("tasks.kubernetes.maintenance.POLL_INTERVAL", 0.01)
    OfCluster.machine = Machine(cluster)
    with cluster_at(tmp_path, cluster.answer) as key:
        yield evolve(node, data={"reboot": {"policy": "allow"}, "kubernetes": key}, connector=OfCluster)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deploy waits for nobody."""
    monkeypatch.setattr("tasks.kubernetes.maintenance.READY_TIMEOUT", 0.0)


impatient = pytest.mark.usefixtures("no_patience")


def deploy(host: Node) -> Result:
    def code() -> None:
        server.shell(name="First", commands=["first step"])
        reboot_policy.by_policy()
        server.shell(name="Spec", commands=["deliver the spec"])
        reboot_policy.return_to_service()

    return host.deploy(code, {})


def deferred(result: Result) -> str:
    assert not result.failed
    [line] = [line for line in result.log if "deferred: reboot: " in line]
    return line.partition("deferred: reboot: ")[2]


def test_a_node_is_drained_before_its_reboot_and_uncordoned_when_it_is_ready(host: Node, cluster: Cluster) -> None:
    result = deploy(host)
    assert not result.failed
    assert cluster.events == ["cordoned", "evicted job", "rebooted", "uncordoned"]
    assert not cluster.recorded()
    assert not OfCluster.machine.drained
    assert [each["metadata"]["name"] for each in cluster.pods] == ["plugin"]
    assert result.commands["Back in service"] == []


def test_an_api_server_on_the_host_itself_is_waited_for_after_the_reboot(host: Node, cluster: Cluster) -> None:
    OfCluster.machine.starts = 5
    assert not deploy(host).failed
    assert cluster.events == ["cordoned", "evicted job", "rebooted", "uncordoned"]


@impatient
def test_an_api_server_that_does_not_come_back_fails_the_host(host: Node, cluster: Cluster) -> None:
    OfCluster.machine.starts = 1000
    result = deploy(host)
    assert result.failed
    assert any("the server is starting" in line for line in result.errors)


@impatient
def test_changes_that_wait_for_a_window_keep_no_node_cordoned(host: Node, cluster: Cluster) -> None:
    for condition in cluster.nodes["node-a"]["status"]["conditions"]:
        condition["status"] = str(condition["type"] != names.UP_TO_DATE)
    assert not deploy(host).failed
    assert cluster.events == ["cordoned", "evicted job", "rebooted", "uncordoned"]


@impatient
@pytest.mark.parametrize(("boot", "is_back"), [("boot-1", False), ("boot-2", True)])
def test_a_node_is_back_once_its_kubelet_has_reported_in_the_new_boot(
    host: Node, cluster: Cluster, boot: str, is_back: bool
) -> None:
    info = NodeSystemInfo("", boot, "", "", "", "", "", "", "", "")
    cluster.nodes["node-a"]["status"]["nodeInfo"] = info.to_dict()
    result = deploy(host)
    assert result.failed is not is_back
    assert bool(cluster.cordoned()) is not is_back
    assert any("kubelet has not reported since" in line for line in result.errors) is not is_back


def test_a_node_that_was_not_ready_is_uncordoned_at_the_end_of_the_deploy(host: Node, cluster: Cluster) -> None:
    OfCluster.machine.reports(ready=False)
    result = deploy(host)
    assert cluster.events[-3:] == ["rebooted", "ready", "uncordoned"]
    assert result.commands["Back in service"]


def test_a_node_whose_reboot_is_deferred_now_does_not_stay_cordoned(host: Node, cluster: Cluster) -> None:
    cluster.note("node-a", OF_DEPLOY)
    OfCluster.machine.drained = True
    host.data["disruption"] = {"allow": "none"}
    assert deferred(deploy(host)).startswith("disruption allows none now")
    assert cluster.events == ["uncordoned"]


def test_a_node_that_was_cordoned_before_stays_so(host: Node, cluster: Cluster) -> None:
    cluster.nodes["node-a"]["spec"] = {"unschedulable": True}
    assert not deploy(host).failed
    assert cluster.cordoned()
    assert cluster.events == ["cordoned", "evicted job", "rebooted"]


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([pod("bare", owner=None)], "ml/bare has no controller"),
        ([pod("job", emptydir=EmptyDirVolumeSource())], "ml/job has local data (emptyDir scratch)"),
    ],
)
def test_a_pod_that_cannot_be_evicted_defers_the_reboot_and_is_named(
    host: Node, cluster: Cluster, pods: list[Any], why: str
) -> None:
    cluster.pods = [each.to_dict() for each in pods]
    assert deferred(deploy(host)).startswith(why)
    assert cluster.events == []
    host.data["disruption"] = {"allow": "reboot", "force": True}
    assert not deploy(host).failed
    assert "rebooted" in cluster.events


@pytest.mark.parametrize("user", ["python3 (30) has a GPU open", "/data is mounted over RDMA"])
def test_a_user_of_the_host_defers_the_reboot_and_is_named(host: Node, cluster: Cluster, user: str) -> None:
    OfCluster.machine.users = [[user]]
    assert deferred(deploy(host)) == f"in use: {user}"
    assert cluster.events == []


def test_a_user_that_the_drain_does_not_end_has_it_undone(host: Node, cluster: Cluster) -> None:
    # Asked in prepare, before the turn, and after the drain.
    OfCluster.machine.users = [[], [], ["nvme0 is NVMe over RDMA"]]
    assert deferred(deploy(host)) == "in use: nvme0 is NVMe over RDMA"
    assert cluster.events == ["cordoned", "evicted job", "uncordoned"]
    assert not OfCluster.machine.drained


class TakenOver(OfCluster):
    """A host whose Node an operator's maintenance takes over as soon as it is drained."""

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        if "evicted job" in self.machine.cluster.events:
            self.machine.cluster.note("node-a", Record("ann", "2026", "apply", True, "rebind"))
        return super().run_shell_command(command, *positional, **arguments)


def test_a_drain_that_somebody_else_has_taken_over_is_not_undone(host: Node, cluster: Cluster) -> None:
    OfCluster.machine.users = [[], [], ["nvme0 is NVMe over RDMA"]]
    result = deploy(evolve(host, connector=TakenOver))
    assert any("ann began to maintain node-a at 2026" in each for each in result.errors)
    assert cluster.events == ["cordoned", "evicted job"]
    assert '"ann"' in cluster.recorded()["node-a"]


def test_a_host_that_has_not_joined_is_rebooted_without_a_drain(host: Node, cluster: Cluster) -> None:
    cluster.nodes.clear()
    assert not deploy(host).failed
    assert cluster.events == ["rebooted"]


def test_without_an_api_server_nothing_is_rebooted(host: Node, cluster: Cluster) -> None:
    host.data["kubernetes"]["kubeconfig"] = "/nowhere/kubeconfig"
    assert "/nowhere/kubeconfig is not found" in deferred(deploy(host))
    assert cluster.events == []


def test_a_deploy_that_was_interrupted_while_the_host_was_away_is_finished(host: Node, cluster: Cluster) -> None:
    cluster.note("node-a", evolve(OF_DEPLOY, step="apply"))
    OfCluster.machine.boot, OfCluster.machine.drained = 2, True
    assert not deploy(host).failed
    assert cluster.events == ["uncordoned"]
    assert not OfCluster.machine.drained


@pytest.mark.parametrize("drained", [True, False], ids=["", "the host was installed anew meanwhile"])
def test_a_deploy_that_was_interrupted_before_the_reboot_goes_on(host: Node, cluster: Cluster, drained: bool) -> None:
    cluster.note("node-a", OF_DEPLOY)
    OfCluster.machine.drained = drained
    assert not deploy(host).failed
    assert cluster.events == ["cordoned", "evicted job", "rebooted", "uncordoned"]


@pytest.mark.parametrize("by", ["ann", "deployer"])
@pytest.mark.parametrize("drained", [False, True], ids=["", "a deploy was interrupted before, and undone by hand"])
def test_the_maintenance_of_somebody_else_is_left_alone(host: Node, cluster: Cluster, by: str, drained: bool) -> None:
    cluster.note("node-a", Record(by, "2026", "drain", True, "reboot"))
    before = cluster.recorded()
    OfCluster.machine.drained = drained
    assert deferred(deploy(host)).startswith(f"{by} began to maintain node-a at 2026")
    assert cluster.events == []
    assert cluster.recorded() == before
    assert not OfCluster.machine.drained


@pytest.mark.parametrize(
    ("pods", "why"),
    [([pod("job").to_dict() | {"spec": 5}], "job cannot be read"), (["no pod"], "gives no answer of an API server")],
)
def test_pods_that_cannot_be_read_defer_the_reboot(host: Node, cluster: Cluster, pods: list[Any], why: str) -> None:
    cluster.pods = pods
    assert why in deferred(deploy(host))
    assert cluster.events == []


@impatient
def test_a_node_that_does_not_become_ready_stays_cordoned_and_fails(host: Node, cluster: Cluster) -> None:
    OfCluster.machine.breaks = True
    result = deploy(host)
    assert result.failed
    assert cluster.cordoned()
    assert any("it stays cordoned" in line and line.endswith("node-a --undo") for line in result.errors)


def test_a_host_that_fails_after_its_drain_says_that_its_node_stays_cordoned(host: Node, cluster: Cluster) -> None:
    stays = "node-a was cordoned for a reboot, and stays so"
    OfCluster.machine.fails = "deliver the spec"
    OfCluster.machine.reports(ready=False)
    result = deploy(host)
    assert result.failed and cluster.cordoned()
    assert stays in result.errors[-1] and result.errors[-1].endswith("node-a --undo")
    # So does the next deploy that fails, also if it fails earlier. One that succeeds brings the Node back.
    OfCluster.machine.boot, OfCluster.machine.fails = 2, "first step"
    assert stays in deploy(host).errors[-1]
    OfCluster.machine.fails = ""
    again = deploy(host)
    assert (again.failed, cluster.events[-1], OfCluster.machine.drained) == (False, "uncordoned", False)
    OfCluster.machine.fails = "first step"
    assert not any(stays in line for line in deploy(host).errors)


def test_a_deploy_that_is_stopped_names_the_nodes_that_stay_cordoned_and_the_nics_that_stay_tainted() -> None:
    ends = """
import sys
from pyinfra.context import ctx_host
from tasks.kubernetes import maintenance
from tests.deploy.conftest import state_of
state = state_of(["left", "back", "tainted"])
for name, notes in [
    ("left", maintenance.note_cordoned), ("back", maintenance.note_cordoned), ("back", maintenance.give_back),
    ("tainted", lambda: maintenance.note_nic("rail0")),
]:
    with ctx_host.use(state.inventory.get_host(name)):
        notes()
sys.exit(0)
"""
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, check=True)
    said = " ".join(done.stderr.split())
    assert "the Node left was cordoned for a reboot" in said and "maintain left --undo" in said
    assert "Node tainted has rail0 in maintenance" in said and "maintain tainted --undo" in said
    assert "Node back" not in said


def test_a_dry_run_names_what_defers_the_reboot(host: Node, cluster: Cluster) -> None:
    cluster.pods = [pod("bare", owner=None).to_dict()]
    result = deploy(host)
    assert not result.planned["Reboot"]
