"""A deploy that changes NICs in use: their devices are tainted until their pods have ended, and nothing stays tainted."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field
from pyinfra.api.operations import run_ops
from pyinfra.api.state import StateStage
from pyinfra.context import ctx_state
from pyinfra.context import host as this_host

from agent.report.records import Change, Disruption, NicVerdict, Outcome, Report
from agent.spec.node import spec_hash
from fleet.maintenance_record import Record
from tasks import disruption, node_spec
from tasks.kubernetes import maintenance, nics
from tests.deploy.conftest import (
    ASKED,
    OTHERWISE,
    PYTHON,
    Connector,
    Node,
    OwnConnector,
    Result,
    prepare,
    replaced,
    state_of,
    status,
)
from tests.deploy.kubernetes.test_kubernetes import cluster_at
from tests.deploy.test_disruption import careful
from tests.deploy.test_node_spec import plan
from tests.unit.fleet.nodes_api import Cluster, Dra
from tests.unit.fleet.test_maintenance import pod
from tests.unit.fleet.test_maintenance_requests import HEALTHY

VERSION = "2-b"
PCI = {"rail0": "0000:3b:00.0", "rail1": "0000:5e:00.0"}
WANTED = [{"name": rail, "select": {"pci": pci}} for rail, pci in PCI.items()]
USER = "pod ml/{} ({}#0)"
OF_DEPLOY = Record("deployer", "2026", "drain", False, "vf-reset", "deploy again", "rail0")


def count(rail: str, *users: str) -> Change:
    """Another number of VFs, which waits for these users."""
    return Change("vfs", PCI[rail], "count", 4, 2, Disruption.VF_RESET, users)


@define
class Machine:
    """The host. ``waiting``: what waits for pods, by NIC. ``applies``: whether the change of a NIC succeeds.

    ``good``: whether a NIC is good after a change that fails. ``hash``: that of its spec. ``asked``: the NICs of
    `trackbed apply`.
    """

    cluster: Cluster
    waiting: dict[str, Change] = field(factory=dict)
    applies: Callable[[str], bool] = lambda nic: True
    good: bool = True
    ready: bool = True
    hash: str = ""
    asked: list[str] = field(factory=list)

    def report(self) -> Report:
        verdicts = tuple(NicVerdict(name, pci, True, True) for name, pci in PCI.items())
        outcomes = tuple(Outcome(each, "deferred", "it would disturb a pod") for each in self.waiting.values())
        return Report(
            "node-a", self.hash, "boot", VERSION, self.ready, not self.waiting, outcomes=outcomes, nics=verdicts
        )

    def says(self, nic: str) -> dict[str, Any]:
        """The answer of `trackbed status --device`."""
        verdict = {"name": nic, "pci": PCI[nic], "ready": self.good, "vfs": [f"{PCI[nic][:-1]}2"]}
        faults = ["a change waits"] if nic in self.waiting or not self.good else []
        return {"success": not faults, "stdout": json.dumps({"nic": verdict, "faults": faults})}

    def apply(self, nic: str) -> bool:
        self.asked.append(nic)
        if not self.applies(nic):
            return False
        self.waiting.pop(nic, None)
        self.good = True
        return True


class OfMachine(Connector):
    """A connection to that host."""

    machine: Machine

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        text, machine = str(command), self.machine
        known = dict(self.data["fake_responses"])
        for nic in PCI:
            if "trackbed apply" in text and text.count(f"--device {nic}"):
                assert "--allow vf-reset" in text
                known["trackbed apply"] = {"success": machine.apply(nic), "stderr": "a process has it"}
            known[f"trackbed status --device {nic}"] = machine.says(nic)
        self.data["fake_responses"] = {
            **status(machine.report()), **plan(*machine.waiting.values()), PYTHON: "/usr/bin/python3", **known,
        }  # fmt: skip
        return super().run_shell_command(command, *positional, **arguments)


class OwnMachine(OfMachine, OwnConnector):  # type: ignore[misc]
    """That of a node that deploys itself."""


@pytest.fixture
def cluster() -> Cluster:
    joined = {"metadata": {"name": "node-a", "uid": "u-node", "resourceVersion": "7"}, **deepcopy(HEALTHY)}
    pods = [pod(name).to_dict() for name in ("job", "web")]
    for each in pods:
        each["metadata"] |= {"uid": f"u-{each['metadata']['name']}"}
    devices = {rail: f"{pci[:-1]}2" for rail, pci in PCI.items()}
    dra = Dra(devices, {"rail0": ["u-job"], "rail1": ["u-web"]}, pool="node-a")
    return Cluster({"node-a": joined}, pods, dra=dra)


@pytest.fixture
def host(node: Node, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr("fleet.node_patch.CHECK_INTERVAL", 0.01)
    monkeypatch.setattr("tasks.kubernetes.maintenance.POLL_INTERVAL", 0.01)
    waits = {"rail0": count("rail0", USER.format("job", PCI["rail0"]), f"another network namespace ({PCI['rail0']}#0)")}
    OfMachine.machine = Machine(cluster, waits)
    with cluster_at(tmp_path, cluster.answer) as key:
        data = {"kubernetes": {**key, "maintain_nics": True}, "nics": deepcopy(WANTED), "ready_timeout": 1}
        yield evolve(node, data=data, connector=OfMachine)


def deploy(host: Node) -> Result:
    OfMachine.machine.hash = spec_hash(node_spec.node_spec({"node_name": "node-a", **host.data}, "node-a"))

    def code() -> None:
        this_host.state.add_callback_handler(disruption.Summary())  # type: ignore[no-untyped-call]
        nics.maintain(spec=node_spec.read(), version=VERSION)

    return host.deploy(code, {})


def deferred(result: Result, nic: str = "rail0") -> str:
    """Why the maintenance of a NIC is deferred, as it is named at the end."""
    assert not result.failed, result.errors
    (line,) = [line for line in result.log if line.startswith(f"deferred on 1 of 1 hosts: maintenance of {nic}: ")]
    return line.partition(f"maintenance of {nic}: ")[2].removesuffix(": @fake/node-a")


def untouched(cluster: Cluster) -> bool:
    """Whether nothing was tainted, cordoned, recorded or evicted."""
    assert cluster.dra
    return (cluster.dra.made, cluster.events, cluster.recorded(), cluster.dra.users["rail0"]) == (0, [], {}, ["u-job"])


def clean(cluster: Cluster) -> bool:
    """Whether nothing is tainted or recorded, and nobody was disturbed but the user of the first rail."""
    assert cluster.dra
    return (cluster.dra.tainted(), cluster.events, cluster.recorded(), cluster.dra.users["rail1"]) == (
        [], [], {}, ["u-web"],
    )  # fmt: skip


def test_by_default_a_deploy_changes_no_nic_in_use(host: Node, cluster: Cluster) -> None:
    del host.data["kubernetes"]["maintain_nics"]
    assert (deploy(host).ran, untouched(cluster), OfMachine.machine.asked) == ([], True, [])


def test_a_nic_whose_change_waits_for_pods_is_tainted_changed_and_given_back(host: Node, cluster: Cluster) -> None:
    def applies(nic: str) -> bool:
        assert cluster.dra
        assert (nic, cluster.dra.tainted(), cluster.dra.users["rail0"]) == ("rail0", ["rail0"], [])
        assert json.loads(cluster.recorded()["node-a"])["again"] == "deploy again"
        return True

    OfMachine.machine.applies = applies
    result = deploy(host)
    assert not result.failed, result.errors
    assert result.planned == {"NICs in use": True}
    assert (clean(cluster), OfMachine.machine.asked) == (True, ["rail0"])
    assert not any("deferred" in line for line in result.log)


def test_a_node_on_which_nothing_waits_is_not_disturbed(host: Node, cluster: Cluster) -> None:
    OfMachine.machine.waiting.clear()
    result = deploy(host)
    assert (result.planned, result.commands) == ({"NICs in use": False}, {"NICs in use": []})
    assert untouched(cluster)


def test_a_change_that_disturbs_nobody_is_left_to_the_agent(host: Node, cluster: Cluster) -> None:
    OfMachine.machine.waiting = {"rail0": count("rail0")}
    assert not deploy(host).failed
    assert untouched(cluster)


def test_the_node_is_waited_for_and_one_that_is_not_ready_is_left_alone(host: Node, cluster: Cluster) -> None:
    OfMachine.machine.ready = False
    assert not deploy(host).failed
    assert untouched(cluster)


def nobody_publishes(host: Node, cluster: Cluster) -> None:
    assert cluster.dra
    cluster.dra.devices = {}


def a_budget_forbids(host: Node, cluster: Cluster) -> None:
    assert cluster.dra
    cluster.dra.budgets = [{
        "metadata": {"name": "b", "namespace": "ml"}, "spec": {"selector": {}},
        "status": {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
    }]  # fmt: skip


def a_process_has_the_pf(host: Node, cluster: Cluster) -> None:
    OfMachine.machine.waiting = {
        "rail0": count("rail0", USER.format("job", PCI["rail0"]), f"sshd (7) ({PCI['rail0']})")
    }


def the_change_fails(host: Node, cluster: Cluster) -> None:
    OfMachine.machine.applies = lambda nic: False


def an_old_cluster(host: Node, cluster: Cluster) -> None:
    cluster.dra = None


def a_window_is_closed(host: Node, cluster: Cluster) -> None:
    host.data |= careful("link-flap")


def the_nics_own_policy_forbids(host: Node, cluster: Cluster) -> None:
    host.data["nics"][0]["disruption"] = {"allow": "none"}


def somebody_else_maintains(host: Node, cluster: Cluster) -> None:
    cluster.note("node-a", Record("ann", "2026", "drain", False, "vf-reset", device="rail0"))


def a_reboot_is_under_way(host: Node, cluster: Cluster) -> None:
    cluster.note("node-a", Record("deployer", "2026", "drain", True, "reboot", "deploy again"))


def it_has_not_joined(host: Node, cluster: Cluster) -> None:
    cluster.nodes.clear()


def no_api_server(host: Node, cluster: Cluster) -> None:
    host.data["kubernetes"]["kubeconfig"] = "/nowhere/kubeconfig"


@pytest.mark.parametrize(
    ("hinders", "why"),
    [
        (nobody_publishes, "no driver of DRA publishes a device of rail0"),
        (a_budget_forbids, "the PodDisruptionBudget ml/b allows 0"),
        (a_process_has_the_pf, "in use: sshd (7) (0000:3b:00.0)"),
        (the_change_fails, "trackbed apply on the node failed: a process has it"),
        (an_old_cluster, "the cluster has no DeviceTaintRule"),
        (a_window_is_closed, "disruption allows link-flap now, and this is vf-reset"),
        (the_nics_own_policy_forbids, "nics[0].disruption allows none now, and this is vf-reset"),
        (somebody_else_maintains, "ann began to maintain node-a at 2026"),
        (a_reboot_is_under_way, "deployer began to maintain node-a at 2026"),
        (it_has_not_joined, "the cluster has no such Node"),
        (no_api_server, "the kubeconfig /nowhere/kubeconfig is not found"),
    ],
)
def test_what_cannot_be_done_is_deferred_and_named_at_the_end(
    host: Node, cluster: Cluster, hinders: Callable[[Node, Cluster], None], why: str
) -> None:
    hinders(host, cluster)
    before = cluster.recorded()
    assert deferred(deploy(host)).startswith(why)
    assert cluster.recorded() == before
    if cluster.dra:
        # Only a change that fails on the node has ended the pods before.
        assert (cluster.dra.tainted(), cluster.dra.made) == ([], int(hinders is the_change_fails))


def test_in_a_window_a_nic_is_changed(host: Node, cluster: Cluster) -> None:
    host.data |= careful("vf-reset")
    assert not deploy(host).failed
    assert (clean(cluster), OfMachine.machine.asked) == (True, ["rail0"])


def test_the_policy_of_a_nic_replaces_that_of_the_node(host: Node, cluster: Cluster) -> None:
    host.data["disruption"] = {"allow": "none"}
    host.data["nics"][0]["disruption"] = {"allow": "vf-reset"}
    assert not deploy(host).failed
    assert (clean(cluster), OfMachine.machine.asked) == (True, ["rail0"])


def test_a_nic_that_is_deferred_hinders_no_other_one(host: Node, cluster: Cluster) -> None:
    OfMachine.machine.waiting["rail1"] = count("rail1", USER.format("web", PCI["rail1"]))
    assert not deploy(host).failed
    assert OfMachine.machine.asked == ["rail0", "rail1"]
    a_process_has_the_pf(host, cluster)
    OfMachine.machine.waiting["rail1"] = count("rail1", USER.format("web", PCI["rail1"]))
    assert deferred(deploy(host)).startswith("in use: sshd")
    assert OfMachine.machine.asked == ["rail0", "rail1", "rail1"]


def test_a_nic_of_an_entry_with_each_has_the_policy_of_that_entry(host: Node, cluster: Cluster) -> None:
    host.data["nics"] = [
        {"name": "rail{index}", "select": {"vendor": "15b3", "each": True}, "disruption": {"allow": "none"}}
    ]
    assert deferred(deploy(host)).startswith("nics[0].disruption allows none now")
    assert untouched(cluster)


def test_a_change_that_breaks_the_nic_fails_the_host_and_the_next_deploy_goes_on(host: Node, cluster: Cluster) -> None:
    machine = OfMachine.machine
    machine.applies, machine.good = lambda nic: False, False
    result = deploy(host)
    assert result.failed
    (said,) = [line for line in result.errors if "maintenance of rail0" in line]
    assert "in maintenance, with rail0 tainted" in said
    assert cluster.dra and cluster.dra.tainted() == ["rail0"]
    machine.applies = lambda nic: True
    assert not deploy(host).failed
    assert clean(cluster)


@pytest.mark.parametrize("step", ["drain", "apply"])
def test_what_a_deploy_that_was_killed_has_left_goes_on(host: Node, cluster: Cluster, step: Any) -> None:
    cluster.note("node-a", evolve(OF_DEPLOY, step=step))
    cluster.nodes["node-a"]["spec"] = {}
    # The NIC may be half changed: the node is not ready, and no change waits for a user.
    OfMachine.machine.good, OfMachine.machine.waiting = False, {}
    assert not deploy(host).failed
    assert (clean(cluster), OfMachine.machine.asked) == (True, ["rail0"])


@pytest.mark.parametrize("gone", ["its level", "the NIC"])
def test_what_was_left_is_undone_if_it_may_not_go_on(host: Node, cluster: Cluster, gone: str) -> None:
    cluster.note("node-a", OF_DEPLOY)
    cluster.nodes["node-a"]["spec"] = {}
    OfMachine.machine.waiting.clear()
    if gone == "its level":
        host.data["disruption"] = {"allow": "none"}
    else:
        host.data["nics"].pop(0)
    result = deploy(host)
    assert not result.failed
    assert any("earlier deploy has begun is undone" in line for line in result.log)
    assert (clean(cluster), OfMachine.machine.asked) == (True, [])


def test_a_reboot_leaves_the_nics_maintenance_alone(host: Node, cluster: Cluster) -> None:
    cluster.note("node-a", OF_DEPLOY)
    reasons: list[str] = []
    host.deploy(lambda: reasons.extend(maintenance.blockers(force=False)), {})
    assert reasons[0].startswith("deployer began to maintain node-a at 2026")


def test_a_host_that_deploys_itself_defers_it(host: Node, cluster: Cluster) -> None:
    result = deploy(evolve(host, connector=OwnMachine))
    assert deferred(result).startswith("a host that deploys itself")
    assert untouched(cluster)


def test_a_dry_run_says_what_would_be_done(host: Node, cluster: Cluster) -> None:
    OfMachine.machine.hash = "older"
    a_process_has_the_pf(host, cluster)
    result = host.deploy(lambda: nics.maintain(spec=node_spec.read(), version=VERSION), {})
    assert result.planned == {"NICs in use": False}
    assert any("maintenance of rail0: in use: sshd" in line for line in result.log)


def deploy_to(names: Sequence[str], host: Node, machines: Mapping[str, Machine]) -> None:
    """Deploy to several hosts at once."""
    state = state_of(((f"@fake/{name}", {"node_name": name}) for name in names), host.data)
    state.add_callback_handler(disruption.Summary())  # type: ignore[no-untyped-call]
    with host.caplog.at_level(logging.INFO, "pyinfra"), ctx_state.use(state), replaced(*ASKED):
        for each in state.inventory:
            connector = OfMachine(state, each)
            connector.machine = machines[each.data.node_name]
            connector.data["fake_responses"] = OTHERWISE
            each.connector = connector
        prepare(state, lambda: nics.maintain(spec=node_spec.read(), version=VERSION))
        state.set_stage(StateStage.Execute)
        run_ops(state)


def test_hosts_are_done_one_after_the_other_until_one_fails(host: Node, cluster: Cluster, tmp_path: Path) -> None:
    """The budgets count what the host before has evicted."""
    names = ("node-a", "node-b", "node-c")
    cluster.nodes |= {
        name: {**deepcopy(cluster.nodes["node-a"]), "metadata": {"name": name, "uid": name, "resourceVersion": "7"}}
        for name in names
    }
    changed: list[str] = []

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        assert cluster.dra
        if method == "PATCH" and path.startswith("/api/v1/nodes/"):
            # The driver of the node that is maintained now.
            cluster.dra.pool, cluster.dra.users["rail0"] = path.rpartition("/")[2], ["u-job"]
        return cluster.answer(method, path, body)

    def applies(nic: str) -> bool:
        (name,) = cluster.recorded()
        changed.append(name)
        machines[name].good = len(changed) == 1
        return machines[name].good

    waits = OfMachine.machine.waiting
    hashes = {name: spec_hash(node_spec.node_spec({"node_name": name, **host.data}, name)) for name in names}
    machines = {name: Machine(cluster, dict(waits), applies, hash=hashes[name]) for name in names}
    with cluster_at(tmp_path, answer) as key:
        host.data["kubernetes"] |= key
        deploy_to(names, host, machines)
    _, failed = changed
    (left,) = set(names) - set(changed)
    assert list(cluster.recorded()) == [failed]
    assert machines[left].asked == []
    why = f"the same step on @fake/{failed} has failed; mend that, and deploy again"
    said = f"deferred on 1 of 3 hosts: maintenance of rail0: {why}: @fake/{left}"
    assert said in [record.getMessage() for record in host.caplog.records]
