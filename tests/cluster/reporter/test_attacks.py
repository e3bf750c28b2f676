"""Attacks with the credentials of one node's kubelet, and with those of a user with rights in one namespace."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.report import names
from agent.reporter.kubernetes.api import JSON, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import answer
from tests.cluster.objects import manifest
from tests.cluster.reporter.reporters import Fixed, by_token, node, prepare, session
from tests.cluster.reporter.thief import (
    ACCOUNTS,
    APPLY,
    BINDINGS,
    LEASES,
    OURS,
    POLICIES,
    RBAC,
    READY,
    THEIRS,
    Thief,
    add,
    labels,
    lease,
    remove,
    status,
    taints,
)

OWN, OTHER, TENANT = "attacked-a", "attacked-b", "tenant"
SYSTEM = names.NAMESPACE


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    prepare(control_plane)
    control_plane.apply(manifest("v1", "Namespace", TENANT))
    words = ("--clusterrole=admin", "--user=tenant", f"--namespace={TENANT}")
    control_plane.kubectl("create", "rolebinding", "tenant", *words)
    for name in (OWN, OTHER):
        control_plane.apply(node(name), lease(name, SYSTEM))
    return control_plane


def kubelet(plane: ControlPlane) -> Thief:
    """Whoever is root on a node has its kubelet's certificate."""
    return user(plane, f"system:node:{OWN}", "system:nodes")


def tenant(plane: ControlPlane) -> Thief:
    return user(plane, "tenant")


def user(plane: ControlPlane, name: str, *groups: str) -> Thief:
    pair = plane.authority.client(name, list(groups))
    return Thief(plane, Fixed(session(plane.authority.pair.certificate, pair)))


# Method, path and body of writes that would give this node rights, or remove those of another node.
TRUSTED: dict[str, tuple[str, str, Any, str]] = {
    "another node's condition": ("PATCH", f"/api/v1/nodes/{OTHER}/status", status(conditions=[READY]), STRATEGIC_PATCH),
    "another node's label": ("PATCH", f"/api/v1/nodes/{OTHER}", labels(rdma="hca"), MERGE_PATCH),
    "another node's taint": ("PATCH", f"/api/v1/nodes/{OTHER}", taints(THEIRS, OURS), MERGE_PATCH),
    "another node": ("DELETE", f"/api/v1/nodes/{OTHER}", None, JSON),
    "another's Lease": (
        "PATCH",
        f"{LEASES.format(SYSTEM)}/{OTHER}",
        {"spec": {"leaseDurationSeconds": 1}},
        MERGE_PATCH,
    ),
    "its Lease gone": ("DELETE", f"{LEASES.format(SYSTEM)}/{OWN}", None, JSON),
    "a Lease": ("POST", LEASES.format(SYSTEM), lease("made-up", SYSTEM), JSON),
    "a token of a reporter": ("POST", f"{ACCOUNTS}/reporter/token", {"spec": {}}, JSON),
    "the listed labels": (
        *("PATCH", f"/api/v1/namespaces/{SYSTEM}/configmaps/reporter", {"data": {"labels": "x"}}, MERGE_PATCH),
    ),
    "a pod with the reporters' account": (
        "POST",
        f"/api/v1/namespaces/{SYSTEM}/pods",
        {
            "metadata": {"name": "p"},
            "spec": {"serviceAccountName": "reporter", "nodeName": OWN, "containers": [{"name": "c", "image": "x"}]},
        },
        JSON,
    ),
    "a binding": (
        "POST",
        f"{RBAC}/namespaces/{SYSTEM}/rolebindings",
        {
            "metadata": {"name": "x"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "trackbed:reporter"},
            "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "tenant"}],
        },
        JSON,
    ),
    "a policy": ("DELETE", f"{POLICIES}/trackbed-nodes", None, JSON),
    "a policy's binding": ("DELETE", f"{BINDINGS}/trackbed-nodes", None, JSON),
    "secrets": ("GET", f"/api/v1/namespaces/{SYSTEM}/secrets", None, JSON),
}


@pytest.mark.parametrize("who", [kubelet, tenant])
@pytest.mark.parametrize("what", TRUSTED)
def test_only_reporters_write_what_is_trusted(
    plane: ControlPlane, who: Callable[[ControlPlane], Thief], what: str
) -> None:
    method, path, body, kind = TRUSTED[what]
    assert who(plane).tries(method, path, body, kind) == 403


@pytest.mark.parametrize("path", [f"/api/v1/nodes/{OWN}", f"/api/v1/nodes/{OWN}/status"])
def test_a_user_of_one_namespace_touches_no_node(plane: ControlPlane, path: str) -> None:
    thief = tenant(plane)
    assert thief.tries("GET", path) == 403
    assert thief.tries("PATCH", path, labels(rdma="hca"), MERGE_PATCH) == 403


def test_a_lease_with_a_nodes_name_in_another_namespace_is_ignored(plane: ControlPlane) -> None:
    thief = tenant(plane)
    made = lease("attacked-c", TENANT)
    made["metadata"]["annotations"] = {names.NOT_READY: "Made: up"}
    assert thief.tries("POST", LEASES.format(TENANT), made) in (200, 403)
    assert "attacked-c" not in [one["name"] for one in answer(plane, "status")["nodes"]]


# --- as a reporter: what is read in two ways -----------------------------------------------------------------------


SEVERAL = """
apiVersion: v1
kind: Node
metadata: {{name: {name}, labels: {{rdma: hca}}}}
---
apiVersion: v1
kind: Node
metadata: {{name: {name}, labels: {{example.net/gpu: "yes"}}}}
"""
TWICE = """
apiVersion: v1
kind: Node
metadata: {{name: {name}, labels: {{rdma: hca}}}}
metadata: {{name: {name}, labels: {{example.net/gpu: "yes"}}}}
"""
ALIASES = """
apiVersion: v1
kind: Node
metadata: {{name: {name}, labels: &l {{rdma: hca, example.net/gpu: "yes"}}, annotations: *l}}
"""


@pytest.mark.parametrize("text", [SEVERAL, TWICE, ALIASES], ids=["documents", "keys", "aliases"])
@pytest.mark.parametrize("subresource", ["", "/status"])
def test_an_ambiguous_text_changes_nothing_else(
    plane: ControlPlane, text: str, subresource: str, tmp_path: Path
) -> None:
    identity = by_token(plane, OWN)
    thief = Thief(plane, identity)
    before = thief.seen(OWN)
    file = tmp_path / "body"
    file.write_text(text.format(name=OWN))
    url = f"{plane.url}/api/v1/nodes/{OWN}{subresource}?fieldManager=trackbed-reporter&force=true"
    done = subprocess.run(
        [
            *("curl", "--silent", "--show-error", "--request", "PATCH", "--header", f"Content-Type: {APPLY}"),
            *("--cacert", str(plane.authority.pair.certificate)),
            *("--header", f"Authorization: Bearer {identity.known.token}", "--data-binary", f"@{file}", url),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["kind"] in ("Node", "Status"), answer
    after = thief.seen(OWN)
    assert "example.net/gpu" not in after["metadata"]["labels"]
    after["metadata"]["labels"].pop("rdma", None)
    before["metadata"]["labels"].pop("rdma", None)
    for seen in (before, after):
        del seen["managers"]
    assert after == before


DEFAULTED: dict[str, list[dict[str, Any]]] = {
    "a time in another's taint": add("/spec/taints/0/timeAdded", "2026-01-01T00:00:00Z"),
    "a value in another's taint": add("/spec/taints/0/value", "x"),
    "another's taint copied": [{"op": "copy", "from": "/spec/taints/0", "path": "/spec/taints/-"}],
    "its cordon, written as the default": [*add("/spec/unschedulable", True), *add("/spec/unschedulable", None)],
    "the whole spec": add("/spec", {"taints": [THEIRS, OURS], "unschedulable": True}),
    "the whole metadata": add("/metadata", {"name": OWN, "labels": {"example.net/gpu": "yes"}}),
    "the whole Node": add("", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": OWN, "labels": {"x": "y"}}}),
    "its name": add("/metadata/name", OTHER),
    "its kind": add("/kind", "Pod"),
    "its uid": add("/metadata/uid", "00000000-0000-0000-0000-000000000000"),
    "its creation": add("/metadata/creationTimestamp", "2001-01-01T00:00:00Z"),
    "its deletion": add("/metadata/deletionTimestamp", "2001-01-01T00:00:00Z"),
    "its name made by the server": add("/metadata/generateName", "x-"),
    "a field with another case": add("/Spec", {"unschedulable": True}),
    "the labels gone": remove("/metadata/labels"),
}


@pytest.mark.parametrize("subresource", ["", "/status"])
@pytest.mark.parametrize("what", DEFAULTED)
def test_a_json_patch_writes_nothing_else_even_with_server_defaults(
    plane: ControlPlane, what: str, subresource: str
) -> None:
    thief = Thief(plane, by_token(plane, OWN))
    before = thief.seen(OWN)
    thief.tries("PATCH", f"/api/v1/nodes/{OWN}{subresource}", DEFAULTED[what], JSON_PATCH)
    assert thief.seen(OWN) == before
