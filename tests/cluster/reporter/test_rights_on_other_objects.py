"""With a reporter's credentials one can change no other object."""

from http.client import HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from agent.reporter.kubernetes.api import JSON, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import manifest
from tests.cluster.reporter.reporters import holder, node
from tests.cluster.reporter.thief import (
    ACCOUNTS,
    APPLY,
    BINDINGS,
    LEASES,
    OTHER,
    OWN,
    POLICIES,
    RBAC,
    Thief,
    add,
    labels,
    lease,
)

REFUSED: list[tuple[str, str, str, Any]] = [
    ("reading secrets", "GET", "/api/v1/secrets", None),
    ("a secret of its namespace", "GET", "/api/v1/namespaces/trackbed-system/secrets/x", None),
    ("reading pods", "GET", "/api/v1/pods", None),
    (
        "starting a pod",
        "POST",
        "/api/v1/namespaces/default/pods",
        {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "x"}], "nodeName": OWN}},
    ),
    ("its node's proxy", "GET", f"/api/v1/nodes/{OWN}/proxy/pods", None),
    ("another node's proxy", "POST", f"/api/v1/nodes/{OTHER}/proxy/run/default/p/c", None),
    ("another's Lease", "POST", LEASES.format("trackbed-system"), lease(OTHER, "trackbed-system")),
    ("its Lease for another", "POST", LEASES.format("trackbed-system"), lease(OWN, "trackbed-system", OTHER)),
    ("a Lease elsewhere", "POST", LEASES.format("kube-system"), lease(OWN, "kube-system")),
    ("the kubelet's Lease", "POST", LEASES.format("kube-node-lease"), lease(OWN, "kube-node-lease")),
    ("deleting a Lease", "DELETE", f"{LEASES.format('trackbed-system')}/{OWN}", None),
    ("a token for no Node", "POST", f"{ACCOUNTS}/reporter/token", {"spec": {}}),
    ("creating a Node", "POST", "/api/v1/nodes", {"metadata": {"name": "made-up"}}),
    ("deleting its Node", "DELETE", f"/api/v1/nodes/{OWN}", None),
    ("deleting another Node", "DELETE", f"/api/v1/nodes/{OTHER}", None),
    ("replacing its Node", "PUT", f"/api/v1/nodes/{OWN}", node(OWN)),
    ("deleting all Nodes", "DELETE", "/api/v1/nodes", None),
    ("deleting the policy", "DELETE", f"{POLICIES}/trackbed-nodes", None),
    ("the policy's binding", "DELETE", f"{BINDINGS}/trackbed-nodes", None),
    ("the listed labels", "PATCH", "/api/v1/namespaces/trackbed-system/configmaps/reporter", {"data": {"labels": "x"}}),
    (
        "more rights",
        "POST",
        f"{RBAC}/clusterrolebindings",
        {
            "metadata": {"name": "x"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        },
    ),
    ("its own role", "PATCH", f"{RBAC}/clusterroles/trackbed:reporter", {"rules": []}),
]


@pytest.mark.parametrize(
    ("method", "path", "body"), [r[1:] for r in REFUSED], ids=[r[0].replace(" ", "-") for r in REFUSED]
)
def test_a_reporter_may_do_nothing_else(thief: Thief, method: str, path: str, body: Any) -> None:
    assert thief.tries(method, path, body, MERGE_PATCH if method == "PATCH" else JSON) == 403


@pytest.mark.parametrize("kind", [JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY])
@pytest.mark.parametrize(
    "place", [("trackbed-system", OTHER), ("kube-node-lease", OWN)], ids=["another's", "the-kubelet's"]
)
def test_a_lease_that_is_not_its_own_cannot_be_renewed(thief: Thief, place: tuple[str, str], kind: str) -> None:
    namespace, name = place
    thief.plane.apply(lease(name, namespace))
    change = manifest("coordination.k8s.io/v1", "Lease", name, spec={"leaseDurationSeconds": 1})
    body = add("/spec/leaseDurationSeconds", 1) if kind == JSON_PATCH else change
    assert thief.tries("PATCH", f"{LEASES.format(namespace)}/{name}", body, kind) == 403


@pytest.mark.parametrize("who", ["system:admin", "system:serviceaccount:kube-system:default", "system:node:victim-a"])
def test_a_reporter_can_impersonate_nobody(thief: Thief, who: str) -> None:
    address, session = urlsplit(thief.plane.url), thief.identity.session()
    connection = HTTPSConnection(address.hostname or "", address.port, context=session.tls)
    headers = {"Impersonate-User": who, **({"Authorization": f"Bearer {session.token}"} if session.token else {})}
    connection.request("GET", f"/api/v1/nodes/{OWN}", headers=headers)
    assert connection.getresponse().status == 403
    connection.close()


def test_a_token_that_is_bound_to_no_node_may_do_nothing(cluster: ControlPlane) -> None:
    loose = Thief(cluster, holder(cluster))
    assert loose.tries("PATCH", f"/api/v1/nodes/{OWN}", labels(rdma="hca"), MERGE_PATCH) == 403
    assert loose.tries("POST", LEASES.format("trackbed-system"), lease(OWN, "trackbed-system")) == 403
