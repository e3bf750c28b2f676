"""A maintenance of one NIC, by its command and by a deploy, on a real control plane.

Pods claim VFs by DRA, on a Node that is an object only.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.report import names
from agent.reporter.kubernetes.api import Api, Refused
from agent.reporter.kubernetes.quarantine import RULES
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import Done, ended, fleet, make_node, start, until
from tests.cluster.fleet.test_fleet_maintain import cordoned, forbid, kubelets, pods, replica_set
from tests.cluster.fleet.test_fleet_rights import rule, user_with
from tests.cluster.objects import claim_template, device_class, resource_slice, vf_device
from tests.cluster.reporter.reporters import by_token, prepare
from tests.deploy.conftest import Node
from tests.deploy.kubernetes import test_nics
from tests.deploy.kubernetes.test_nics import Machine, OfMachine, deferred
from tests.unit.fleet.nodes_api import Cluster

NODE = "d1"
DRIVER, GROUP = "sriovnetwork.k8snetworkplumbingwg.io", "resource.k8s.io"
VFS = {"rail0": "0000:3b:00.2", "rail1": "0000:5e:00.2"}
NIC = {"name": "rail0", "pci": "0000:3b:00.0", "vfs": [VFS["rail0"]]}


@pytest.fixture(scope="module")
def plane(device_taints_plane: ControlPlane) -> ControlPlane:
    prepare(device_taints_plane)
    return device_taints_plane


@pytest.fixture(scope="module")
def operator(plane: ControlPlane) -> Path:
    """The kubeconfig of a user with the rights that docs/fleet.md lists."""
    rights = [
        rule("", ("nodes",), ("get", "patch")),
        rule("", ("pods",), ("list",)),
        rule("policy", ("poddisruptionbudgets",), ("list",)),
        rule(GROUP, ("devicetaintrules",), ("list", "create", "delete")),
        rule(GROUP, ("resourceclaims", "resourceslices"), ("list",)),
    ]
    return user_with(plane, "maintains-nics", rights, [])


@pytest.fixture
def running(plane: ControlPlane) -> Iterator[ControlPlane]:
    """A pod has a VF of each rail."""
    make_node(plane, NODE)
    devices = [vf_device(rail, vf) for rail, vf in VFS.items()]
    plane.apply(resource_slice(NODE, DRIVER, devices), device_class("vf", f"device.driver == '{DRIVER}'"))
    with kubelets(plane, NODE):
        for rail, vf in VFS.items():
            claim(plane, rail, vf)
        for rail in VFS:
            until(lambda rail=rail: pods(plane, rail, NODE), f"the pod of {rail} runs")  # type: ignore[misc]
        yield plane
        plane.kubectl("delete", "replicasets,poddisruptionbudgets,resourceclaimtemplates", "--all")
        until(lambda: not plane.get("pods")["items"], "the pods are gone")
    plane.kubectl("delete", "node,resourceslice", NODE)


def claim(plane: ControlPlane, name: str, vf: str) -> None:
    """Create a ReplicaSet of one pod that claims this VF."""
    here = f"device.attributes['resource.kubernetes.io'].pciBusID == '{vf}'"
    plane.apply(
        claim_template(name, "default", deviceClassName="vf", selectors=[{"cel": {"expression": here}}]),
        replica_set(name, NODE, {"name": "vf", "resourceClaimTemplateName": name}),
    )


def maintain(kubeconfig: Path, folder: Path, *words: str, succeeds: bool = True) -> Done:
    """Maintain rail0 of the node, whose change succeeds, or breaks the NIC."""
    return ended(begin(kubeconfig, folder, *words, succeeds=succeeds))


def begin(kubeconfig: Path, folder: Path, *words: str, succeeds: bool = True) -> subprocess.Popen[str]:
    """Begin that with one of pyinfra's fake hosts."""
    says = {"nic": {**NIC, "ready": succeeds}, "faults": ["a change waits"]}
    answers = {
        "trackbed status": {"stdout": json.dumps(says)},
        "trackbed apply": {"success": succeeds, "stderr": "" if succeeds else "vfs: deferred"},
    }
    data = {"node_name": NODE, "fake_delay": 0, "fake_delay_jitter": 0, "fake_responses": answers}
    file = folder / "fleet.py"
    file.write_text(f"hosts = {[(f'@fake/{NODE}', data)]!r}\n")
    return start(kubeconfig, "maintain", NODE, "--device", "rail0", "--inventory", str(file), *words)


def tainted(plane: ControlPlane) -> list[Any]:
    return [each["spec"]["deviceSelector"]["device"] for each in plane.get("devicetaintrules")["items"]]


def test_only_the_pod_of_the_nic_ends_and_it_comes_back(running: ControlPlane, operator: Path, tmp_path: Path) -> None:
    before = {rail: pods(running, rail, NODE) for rail in VFS}
    done = maintain(operator, tmp_path)
    assert done.code == 0, done
    assert (tainted(running), cordoned(running, NODE)) == ([], (False, False))
    until(lambda: pods(running, "rail0", NODE) not in ([], before["rail0"]), "another pod has the VF")
    assert pods(running, "rail1", NODE) == before["rail1"]


def test_a_disruption_budget_is_named_and_nothing_tainted(
    running: ControlPlane, operator: Path, tmp_path: Path
) -> None:
    forbid(running, "rail0")
    before = pods(running, "rail0", NODE)
    done = maintain(operator, tmp_path)
    assert (done.code, "the PodDisruptionBudget default/rail0 allows 0 disruptions now" in done.err) == (1, True), done
    assert (tainted(running), cordoned(running, NODE)) == ([], (False, False))
    assert pods(running, "rail0", NODE) == before


@pytest.fixture
def host(running: ControlPlane, operator: Path, caplog: pytest.LogCaptureFixture) -> Node:
    """A simulated host of that Node, on which a change of rail0 waits for the pod."""
    user = test_nics.USER.format("rail0", NIC["pci"])
    OfMachine.machine = Machine(Cluster({}), {"rail0": test_nics.count("rail0", user)})
    authority = str(running.authority.pair.certificate)
    key = {"server": "https://10.0.0.1:6443", "ca_file": authority, "kubeconfig": str(operator), "maintain_nics": True}
    data = {"node_name": NODE, "kubernetes": key, "nics": test_nics.WANTED}
    return evolve(Node(caplog), data=data, connector=OfMachine)


def test_a_deploy_maintains_a_nic_with_the_same_rights(host: Node, running: ControlPlane) -> None:
    before = {rail: pods(running, rail, NODE) for rail in VFS}
    result = test_nics.deploy(host)
    assert not result.failed, result.errors
    assert (OfMachine.machine.asked, tainted(running), cordoned(running, NODE)) == (["rail0"], [], (False, False))
    until(lambda: pods(running, "rail0", NODE) not in ([], before["rail0"]), "another pod has the VF")
    assert pods(running, "rail1", NODE) == before["rail1"]


def test_a_disruption_budget_defers_what_the_deploy_would_do(host: Node, running: ControlPlane) -> None:
    forbid(running, "rail0")
    before = pods(running, "rail0", NODE)
    assert deferred(test_nics.deploy(host)).startswith("the PodDisruptionBudget default/rail0 allows 0 disruptions now")
    assert (OfMachine.machine.asked, tainted(running), cordoned(running, NODE)) == ([], [], (False, False))
    assert pods(running, "rail0", NODE) == before


def test_a_bad_nic_stays_tainted_until_its_maintenance_is_undone(
    running: ControlPlane, operator: Path, tmp_path: Path
) -> None:
    done = maintain(operator, tmp_path, succeeds=False)
    assert (done.code, "it stays in maintenance, with rail0 tainted" in done.err) == (1, True), done
    assert (tainted(running), cordoned(running, NODE)) == (["rail0"], (False, True))
    assert pods(running, "rail0", NODE) == []
    shown = fleet(running, "status").out
    assert f"{NODE}: rail0 of {DRIVER} is tainted by a maintenance that has not ended" in shown
    assert fleet(running, "sweep", "--max-share", "1", "--json").document["rules_removed"] == []
    (left,) = running.get("devicetaintrules")["items"]
    reporter = Api(running.url, by_token(running, NODE).session)
    with pytest.raises(Refused, match="a reporter makes and deletes the DeviceTaintRules of its own Node"):
        reporter.ask("DELETE", f"{RULES}/{left['metadata']['name']}")
    assert maintain(operator, tmp_path, "--undo").code == 0
    assert (tainted(running), cordoned(running, NODE)) == ([], (False, False))
    until(lambda: pods(running, "rail0", NODE), "the pod has the VF again")


@pytest.mark.parametrize("again", ["--resume", "--undo"])
def test_a_run_that_is_killed_while_pods_end_leaves_what_another_run_ends(
    running: ControlPlane, operator: Path, tmp_path: Path, again: str
) -> None:
    killed = begin(operator, tmp_path)
    until(lambda: tainted(running), "the VF is tainted")
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert (tainted(running), cordoned(running, NODE)) == (["rail0"], (False, True))
    refused = maintain(operator, tmp_path)
    assert (refused.code, "give --device rail0 --resume or --undo" in refused.err) == (1, True), refused
    assert maintain(operator, tmp_path, again).code == 0
    assert (tainted(running), cordoned(running, NODE)) == ([], (False, False))


def test_rules_without_their_record_are_removed_by_a_sweep(
    running: ControlPlane, operator: Path, tmp_path: Path
) -> None:
    maintain(operator, tmp_path, succeeds=False)
    running.kubectl("annotate", "node", NODE, f"{names.MAINTENANCE}-")
    (left,) = running.get("devicetaintrules")["items"]
    swept = fleet(running, "sweep", "--max-share", "1", "--json")
    assert (swept.code, swept.document["rules_removed"]) == (0, [left["metadata"]["name"]])
    assert tainted(running) == []
