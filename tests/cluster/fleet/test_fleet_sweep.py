"""`trackbed fleet sweep` against a real API server, with Nodes that are objects only."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from agent.report import names
from lab import LabError
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
    node,
    start,
    taints,
    until,
)
from tests.cluster.fleet.test_fleet_rights import grant, rule, user_with
from tests.cluster.objects import LEASES, patch, patch_lease, patch_status

YEAR_0 = "0000-01-01T00:00:00Z"
# In UTC, which is what the API server writes, it is the year 10000.
YEAR_10000 = "9999-12-31T23:59:59-23:59"
UNREADABLE = {"spec": {"acquireTime": YEAR_10000.replace("59-", "59.000000-")}}


def managed_at(plane: ControlPlane, when: str, *of: str) -> dict[str, Any]:
    """A patch that sets the time of all field managers of a Node or a Lease.

    A label goes with it: the API server stores no write that changes times alone.
    """
    managers = plane.get(*of, "a", "--show-managed-fields")["metadata"]["managedFields"]
    managed = [{**entry, "time": when} for entry in managers]
    return {"metadata": {"managedFields": managed, "labels": {"example.net/a": "b"}}}


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
    plane.kubectl("delete", "lease", "a", LEASES)
    assert fleet(plane, "status", "--json").document["nodes"][0]["ready"] == "Unknown"
    done = fleet(plane, "sweep", "--json")
    assert (done.code, done.document["tainted"], done.document["renewed"]) == (0, [], ["a"])
    assert (taints(plane, "a"), condition(plane, "a")["status"]) == ([OTHERS], "True")
    made = plane.get("lease", "a", LEASES)
    assert made["metadata"]["ownerReferences"][0]["name"] == "a"
    assert fleet(plane, "status", "--json").document["nodes"][0]["reason"] != "LeaseExpired"
    # A node that is dead lets that one expire.
    patch_lease(plane, "a", {"spec": {"leaseDurationSeconds": 1}})
    until(lambda: fleet(plane, "sweep", "--json").document["tainted"] == ["a"], "it is swept")


@pytest.mark.usefixtures("no_nodes")
def test_deleted_leases_are_created_again_and_no_node_is_swept(plane: ControlPlane) -> None:
    for name in ("a", "b", "c", "d"):
        make_node(plane, name)
    plane.kubectl("delete", "leases", "--all", LEASES)
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
        patch_lease(plane, "a", {"spec": {"renewTime": micro}})
    elif where == "timeAdded":
        patch(plane, "node", "a", {"spec": {"taints": [{**OTHERS, where: when}]}})
    elif where == "managedFields":
        patch(plane, "node", "a", managed_at(plane, when, "node"))
    else:
        patch_status(plane, "a", {"status": {"conditions": [{**conditions("True")[0], where: when}]}})
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
    patch_lease(plane, "a", UNREADABLE if where == "acquireTime" else managed_at(plane, YEAR_10000, "lease", LEASES))
    renewal = {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
    with pytest.raises(LabError, match="failed with status 1"):
        patch_lease(plane, "a", renewal)
    assert fleet(plane, "sweep", "--json").document["tainted"] == ["a"]
    patch_lease(plane, "a", renewal)
    (row,) = fleet(plane, "status", "--json").document["nodes"]
    assert not row["expired"]


@pytest.mark.usefixtures("no_nodes")
def test_without_the_right_to_repair_a_lease_its_node_is_swept_nevertheless(plane: ControlPlane) -> None:
    make_node(plane, "a")
    patch_lease(plane, "a", UNREADABLE)
    rights = [
        rule("", ("nodes", "nodes/status"), ("get", "list", "patch")),
        rule("coordination.k8s.io", ("leases",), ("get", "list", "create")),
    ]
    done = ended(start(user_with(plane, "sweeps-without-updates", rights, []), "sweep"))
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
    token = plane.kubectl("create", "token", account, LEASES).strip()
    authority = plane.authority.pair.certificate.read_text()
    for name, text in (("token", token), ("namespace", names.NAMESPACE), ("ca.crt", authority)):
        (folder / name).write_text(text)
    address = urlsplit(plane.url)
    service = {"KUBERNETES_SERVICE_HOST": str(address.hostname), "KUBERNETES_SERVICE_PORT": str(address.port)}
    command = ["unshare", "--mount", "sh", "-ec", IN_A_POD, "sh", str(folder)]
    command += [sys.executable, "-m", "cli", "fleet", "sweep", *words]
    done = subprocess.run(command, cwd=ROOT, env={"HOME": "/", **service}, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.usefixtures("no_nodes")
def test_in_a_pod_it_needs_the_rights_of_the_docs_and_no_others(plane: ControlPlane, tmp_path: Path) -> None:
    plane.kubectl("create", "serviceaccount", "sweep", LEASES)
    account = {"kind": "ServiceAccount", "name": "sweep", "namespace": names.NAMESPACE}
    rights = [rule("", ("nodes",), ("list", "get")), rule("", ("nodes", "nodes/status"), ("patch", "update"))]
    grant(plane, account, rights, [rule("coordination.k8s.io", ("leases",), ("list", "get", "create", "update"))])
    for each in ("silent", "gone", "unreadable", "well"):
        make_node(plane, each, life=1 if each == "silent" else 900)
    plane.kubectl("delete", "lease", "gone", LEASES)
    patch_lease(plane, "unreadable", UNREADABLE)
    until(lambda: "silent" in fleet(plane, "sweep", "--dry", "--json").document["expired"], "it expires")
    done = sweep_in_a_pod(plane, tmp_path / "account", "sweep", "--max-share", "1", "--json")
    assert (done.code, done.err) == (0, "")
    assert (done.document["tainted"], done.document["renewed"]) == (["silent", "unreadable"], ["gone"])


@pytest.mark.usefixtures("no_nodes")
def test_a_heartbeat_from_the_future_does_not_count(plane: ControlPlane) -> None:
    """A client may write the times of a Lease's field managers, from which the time of its renewal is read."""
    make_node(plane, "a")
    patch_lease(plane, "a", managed_at(plane, "2099-01-01T00:00:00Z", "lease", LEASES))
    (row,) = fleet(plane, "status", "--json").document["nodes"]
    assert (row["ready"], row["reason"]) == ("Unknown", "Unreadable")
    assert fleet(plane, "sweep", "--json").document["tainted"] == ["a"]


@pytest.mark.usefixtures("no_nodes")
def test_of_two_conditions_of_a_silent_node_one_is_left(plane: ControlPlane) -> None:
    make_node(plane, "a", life=1)
    more = [{"op": "add", "path": f"/status/conditions/{at}", "value": conditions("True")[0]} for at in ("0", "-")]
    patch_status(plane, "a", more, how="json")
    until(lambda: fleet(plane, "sweep", "--json").document["tainted"] == ["a"], "it is swept")
    statuses = [one["status"] for one in node(plane, "a")["status"]["conditions"] if one["type"] == names.READY]
    assert statuses == ["Unknown"]
    assert fleet(plane, "sweep", "--json").document["tainted"] == []


@pytest.mark.usefixtures("no_nodes")
def test_trackbeds_taint_with_another_effect_does_not_keep_the_sweep_from_tainting(plane: ControlPlane) -> None:
    make_node(plane, "a", life=1)
    weak = {**OURS, "effect": "PreferNoSchedule"}
    patch(plane, "node", "a", {"spec": {"taints": [weak]}})
    until(lambda: fleet(plane, "sweep", "--json").document["tainted"] == ["a"], "it is swept")
    assert taints(plane, "a") == [weak, OURS]
