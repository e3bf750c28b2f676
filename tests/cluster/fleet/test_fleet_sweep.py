"""`trackbed fleet sweep` against a real API server, with Nodes that are objects only."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from agent.report import names
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import (
    OTHERS,
    OURS,
    ROOT,
    Done,
    condition,
    conditions,
    ended,
    fleet,
    make_node,
    no_nodes,
    node,
    plane,
    start,
    taints,
    until,
)

__all__ = ["no_nodes", "plane"]

YEAR_0 = "0000-01-01T00:00:00Z"
# In UTC, which is what the API server writes, it is the year 10000.
YEAR_10000 = "9999-12-31T23:59:59-23:59"


@pytest.mark.usefixtures("no_nodes")
def test_a_silent_node_becomes_unknown_and_tainted_and_nothing_else_of_it_changes(plane: ControlPlane) -> None:
    for name in ("a", "b", "c", "d"):
        make_node(plane, name, life=1 if name == "a" else 900)
    until(lambda: fleet(plane, "status", "--json").document["nodes"][0]["ready"] == "Unknown", "it expires")
    before = node(plane, "a")
    assert fleet(plane, "sweep", "--dry").out.startswith("a: no heartbeat; would be tainted")
    assert condition(plane, "a")["status"] == "True"

    # Twice at once: each may find the other's work done, none fails.
    both = [ended(one) for one in [start(plane.admin, "sweep", "--json") for _ in range(2)]]
    assert [done.code for done in both] == [0, 0], both
    assert {name for done in both for name in done.document["tainted"]} == {"a"}

    after = node(plane, "a")
    assert condition(plane, "a")["status"] == "Unknown"
    assert condition(plane, "a")["reason"] == names.EXPIRED
    assert taints(plane, "a") == [OTHERS, OURS]
    assert after["metadata"]["labels"].keys() == before["metadata"]["labels"].keys() - {names.READY_LABEL}
    assert {one["type"] for one in after["status"]["conditions"]} >= {names.UP_TO_DATE, "Ready"}
    assert [condition(plane, name)["status"] for name in ("b", "c", "d")] == ["True"] * 3

    version = after["metadata"]["resourceVersion"]
    assert fleet(plane, "sweep", "--json").document["tainted"] == []
    swept = node(plane, "a")
    assert (swept["metadata"]["resourceVersion"] == version) or condition(plane, "a")["reason"] == names.EXPIRED


@pytest.mark.usefixtures("no_nodes")
def test_if_most_of_the_fleet_is_silent_no_node_is_tainted(plane: ControlPlane) -> None:
    for name in ("a", "b", "c", "d"):
        make_node(plane, name, life=900 if name == "d" else 1)
    until(lambda: len(fleet(plane, "sweep", "--dry", "--json").document["expired"]) == 3, "three expire")
    done = fleet(plane, "sweep", "--json")
    assert done.code == 2
    assert done.document["refused"]
    assert "3 of 4 nodes are without a heartbeat, and at most 2 may be: none of them was tainted" in done.err
    assert [taints(plane, name) for name in ("a", "b", "c", "d")] == [[OTHERS]] * 4
    assert fleet(plane, "sweep", "--max-share", "0.75").code == 0
    assert [taints(plane, name) for name in ("a", "b", "c")] == [[OTHERS, OURS]] * 3


@pytest.mark.usefixtures("no_nodes")
def test_a_healthy_node_whose_lease_was_deleted_keeps_its_pods(plane: ControlPlane) -> None:
    for name in ("a", "b", "c", "d"):
        make_node(plane, name)
    plane.kubectl("delete", "lease", "a", f"--namespace={names.NAMESPACE}")
    assert fleet(plane, "status", "--json").document["nodes"][0]["ready"] == "Unknown"
    done = fleet(plane, "sweep", "--json")
    assert (done.code, done.document["tainted"], done.document["renewed"]) == (0, [], ["a"])
    assert (taints(plane, "a"), condition(plane, "a")["status"]) == ([OTHERS], "True")
    made = plane.get("lease", "a", f"--namespace={names.NAMESPACE}")
    assert made["metadata"]["ownerReferences"][0]["name"] == "a"
    assert fleet(plane, "status", "--json").document["nodes"][0]["reason"] != "LeaseExpired"
    # A node that is dead lets that one expire.
    body = json.dumps({"spec": {"leaseDurationSeconds": 1}})
    plane.kubectl("patch", "lease", "a", f"--namespace={names.NAMESPACE}", "--type=merge", "-p", body)
    until(lambda: fleet(plane, "sweep", "--json").document["tainted"] == ["a"], "it is swept")


@pytest.mark.usefixtures("no_nodes")
def test_deleted_leases_are_created_again_and_no_node_is_swept(plane: ControlPlane) -> None:
    for name in ("a", "b", "c", "d"):
        make_node(plane, name)
    plane.kubectl("delete", "leases", "--all", f"--namespace={names.NAMESPACE}")
    assert fleet(plane, "sweep", "--dry", "--json").document["renewed"] == ["a", "b", "c", "d"]
    assert fleet(plane, "sweep").code == 2
    assert fleet(plane, "sweep").code == 0
    assert [taints(plane, name) for name in ("a", "b", "c", "d")] == [[OTHERS]] * 4


def test_a_sweep_without_rights_is_one_message(plane: ControlPlane) -> None:
    done = ended(start(plane.identity("nobody"), "sweep"))
    assert done.code == 1
    assert "the API server refuses" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(
    ("where", "when"),
    [
        *itertools.product(["lastTransitionTime", "lastHeartbeatTime", "renewTime"], [YEAR_0, YEAR_10000]),
        ("lastTransitionTime", "0000-01-01T00:00:00+23:59"),
        ("timeAdded", YEAR_0),
        ("timeAdded", YEAR_10000),
        ("managedFields", YEAR_10000),
    ],
)
def test_a_time_that_cannot_be_read_does_not_affect_other_nodes(plane: ControlPlane, when: str, where: str) -> None:
    for name in ("a", "b", "c", "d", "e"):
        make_node(plane, name, life=1 if name == "b" else 900)
    if where == "renewTime":
        # Whoever may write every Lease; the policy does not let a node write this one.
        micro = when.replace("00Z", "00.000000Z").replace("59-", "59.000000-")
        words: tuple[str, ...] = ("lease", "a", f"--namespace={names.NAMESPACE}")
        change: dict[str, Any] = {"spec": {"renewTime": micro}}
    elif where == "timeAdded":
        words, change = ("node", "a"), {"spec": {"taints": [{**OTHERS, where: when}]}}
    elif where == "managedFields":
        managers = plane.get("node", "a", "--show-managed-fields")["metadata"]["managedFields"]
        # A change goes with it: the API server stores no write that changes times alone.
        words, change = (
            ("node", "a"),
            {"metadata": {"labels": {"a": "b"}, where: [{**one, "time": when} for one in managers]}},
        )
    else:
        words = ("node", "a", "--subresource=status")
        change = {"status": {"conditions": [{**conditions("True")[0], where: when}]}}
    plane.kubectl("patch", *words, "--type=merge", "-p", json.dumps(change))
    until(lambda: fleet(plane, "status", "--json").document["nodes"][1]["ready"] == "Unknown", "b expires")
    done = fleet(plane, "status")
    assert done.code == 2
    what = "Lease" if where == "renewTime" else "Node"
    (row,) = [line for line in done.out.splitlines() if line.startswith("a ")]
    assert f"its {what} cannot be read" in row
    assert "3 of 5 nodes are ready" in done.out
    swept = fleet(plane, "sweep", "--max-share", "0.5", "--json")
    assert (swept.code, swept.document["tainted"]) == (0, ["a", "b"])
    assert condition(plane, "a")["status"] == "Unknown"


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize("where", ["acquireTime", "managedFields"])
def test_after_a_sweep_a_lease_with_a_time_that_cannot_be_read_can_be_renewed(plane: ControlPlane, where: str) -> None:
    """The API server refuses each patch of such a Lease, unless the patch replaces that very time."""
    make_node(plane, "a")
    words = ("patch", "lease", "a", f"--namespace={names.NAMESPACE}", "--type=merge", "-p")
    if where == "acquireTime":
        change: dict[str, Any] = {"spec": {where: YEAR_10000.replace("59-", "59.000000-")}}
    else:
        lease = plane.get("lease", "a", f"--namespace={names.NAMESPACE}", "--show-managed-fields")
        managers = [{**entry, "time": YEAR_10000} for entry in lease["metadata"]["managedFields"]]
        change = {"metadata": {"managedFields": managers, "labels": {"example.net/a": "b"}}}
    plane.kubectl(*words, json.dumps(change))
    renewal = json.dumps({"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}})
    assert plane.try_kubectl(*words, renewal).returncode == 1
    assert fleet(plane, "sweep", "--json").document["tainted"] == ["a"]
    plane.kubectl(*words, renewal)
    (row,) = fleet(plane, "status", "--json").document["nodes"]
    assert not row["expired"]


@pytest.mark.usefixtures("no_nodes")
def test_without_the_right_to_repair_a_lease_its_node_is_swept_nevertheless(plane: ControlPlane) -> None:
    make_node(plane, "a")
    change = {"spec": {"acquireTime": YEAR_10000.replace("59-", "59.000000-")}}
    words = ("patch", "lease", "a", f"--namespace={names.NAMESPACE}", "--type=merge", "-p", json.dumps(change))
    plane.kubectl(*words)
    rules = [
        {"apiGroups": [""], "resources": ["nodes", "nodes/status"], "verbs": ["get", "list", "patch"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "list", "create"]},
    ]
    group, name = "rbac.authorization.k8s.io", {"name": "sweeps-without-updates"}
    role = {"apiGroup": group, "kind": "ClusterRole", **name}
    subjects = [{"apiGroup": group, "kind": "User", **name}]
    version = f"{group}/v1"
    plane.apply(
        {"apiVersion": version, "kind": "ClusterRole", "metadata": name, "rules": rules},
        {"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": name, "roleRef": role, "subjects": subjects},
    )
    done = ended(start(plane.identity(name["name"]), "sweep"))
    assert done.code == 1
    assert 'cannot update resource "leases"' in done.err
    assert (taints(plane, "a"), condition(plane, "a")["status"]) == ([OTHERS, OURS], "Unknown")


# What a pod sees of its service account, in a mount namespace: the fixed path, and two variables.
IN_A_POD = """
mount -t tmpfs tmpfs /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$1"/* /run/secrets/kubernetes.io/serviceaccount/ && shift && exec "$@"
"""


def sweep_in_a_pod(plane: ControlPlane, folder: Path, account: str, *words: str) -> Done:
    """Run a sweep as this service account of trackbed-system."""
    folder.mkdir()
    token = plane.kubectl("create", "token", account, f"--namespace={names.NAMESPACE}").strip()
    authority = plane.authority.pair.certificate.read_text()
    for name, text in (("token", token), ("namespace", names.NAMESPACE), ("ca.crt", authority)):
        (folder / name).write_text(text)
    address = urlsplit(plane.url)
    service = {"KUBERNETES_SERVICE_HOST": str(address.hostname), "KUBERNETES_SERVICE_PORT": str(address.port)}
    command = ["unshare", "--mount", "sh", "-ec", IN_A_POD, "sh", str(folder)]
    command += [sys.executable, "-m", "cli", "fleet", "sweep", *words]
    done = subprocess.run(command, cwd=ROOT, env={"HOME": "/", **service}, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def give(plane: ControlPlane, account: str, kind: str, place: dict[str, str], *rules: tuple[str, str, str]) -> None:
    """Give a service account of trackbed-system rights: each is an API group, its resources and the verbs."""
    group, metadata = "rbac.authorization.k8s.io", {"name": account, **place}
    listed = [{"apiGroups": [api], "resources": what.split(), "verbs": verbs.split()} for api, what, verbs in rules]
    role = {"apiGroup": group, "kind": kind, "name": account}
    who = [{"kind": "ServiceAccount", "name": account, "namespace": names.NAMESPACE}]
    version = f"{group}/v1"
    plane.apply(
        {"apiVersion": version, "kind": kind, "metadata": metadata, "rules": listed},
        {"apiVersion": version, "kind": f"{kind}Binding", "metadata": metadata, "roleRef": role, "subjects": who},
    )


@pytest.mark.usefixtures("no_nodes")
def test_in_a_pod_it_needs_the_rights_of_the_docs_and_no_others(plane: ControlPlane, tmp_path: Path) -> None:
    plane.kubectl("create", "serviceaccount", "sweep", f"--namespace={names.NAMESPACE}")
    give(plane, "sweep", "ClusterRole", {}, ("", "nodes", "list get"), ("", "nodes nodes/status", "patch update"))
    leases = ("coordination.k8s.io", "leases", "list get create update")
    give(plane, "sweep", "Role", {"namespace": names.NAMESPACE}, leases)
    for each in ("silent", "gone", "unreadable", "well"):
        make_node(plane, each, life=1 if each == "silent" else 900)
    plane.kubectl("delete", "lease", "gone", f"--namespace={names.NAMESPACE}")
    change = {"spec": {"acquireTime": YEAR_10000.replace("59-", "59.000000-")}}
    words = ("patch", "lease", "unreadable", f"--namespace={names.NAMESPACE}", "--type=merge", "-p", json.dumps(change))
    plane.kubectl(*words)
    until(lambda: "silent" in fleet(plane, "sweep", "--dry", "--json").document["expired"], "it expires")
    done = sweep_in_a_pod(plane, tmp_path / "account", "sweep", "--max-share", "1", "--json")
    assert (done.code, done.err) == (0, "")
    assert (done.document["tainted"], done.document["renewed"]) == (["silent", "unreadable"], ["gone"])


@pytest.mark.usefixtures("no_nodes")
def test_a_heartbeat_from_the_future_does_not_count(plane: ControlPlane) -> None:
    """A client may write the times of a Lease's field managers, from which the time of its renewal is read."""
    make_node(plane, "a")
    lease = plane.get("lease", "a", f"--namespace={names.NAMESPACE}", "--show-managed-fields")
    managers = [{**entry, "time": "2099-01-01T00:00:00Z"} for entry in lease["metadata"]["managedFields"]]
    body = json.dumps({"metadata": {"managedFields": managers, "labels": {"example.net/a": "b"}}})
    plane.kubectl("patch", "lease", "a", f"--namespace={names.NAMESPACE}", "--type=merge", "-p", body)
    (row,) = fleet(plane, "status", "--json").document["nodes"]
    assert (row["ready"], row["reason"]) == ("Unknown", "Unreadable")
    assert fleet(plane, "sweep", "--json").document["tainted"] == ["a"]


@pytest.mark.usefixtures("no_nodes")
def test_of_two_conditions_of_a_silent_node_one_is_left(plane: ControlPlane) -> None:
    make_node(plane, "a", life=1)
    more = [{"op": "add", "path": f"/status/conditions/{at}", "value": conditions("True")[0]} for at in ("0", "-")]
    plane.kubectl("patch", "node", "a", "--subresource=status", "--type=json", "-p", json.dumps(more))
    until(lambda: fleet(plane, "sweep", "--json").document["tainted"] == ["a"], "it is swept")
    statuses = [one["status"] for one in node(plane, "a")["status"]["conditions"] if one["type"] == names.READY]
    assert statuses == ["Unknown"]
    assert fleet(plane, "sweep", "--json").document["tainted"] == []


@pytest.mark.usefixtures("no_nodes")
def test_trackbeds_taint_with_another_effect_does_not_keep_the_sweep_from_tainting(plane: ControlPlane) -> None:
    make_node(plane, "a", life=1)
    weak = {**OURS, "effect": "PreferNoSchedule"}
    plane.kubectl("patch", "node", "a", "--type=merge", "-p", json.dumps({"spec": {"taints": [weak]}}))
    until(lambda: fleet(plane, "sweep", "--json").document["tainted"] == ["a"], "it is swept")
    assert taints(plane, "a") == [weak, OURS]
