"""`trackbed fleet approve` against a real API server, with Nodes that are objects only."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography import x509

from agent.report import names
from fleet import credentials
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import (
    ask,
    decision,
    enrolment,
    fleet,
    make_node,
    no_nodes,
    plane,
    request,
    until,
)

__all__ = ["no_nodes", "plane"]


@pytest.mark.usefixtures("no_nodes")
def test_a_new_node_is_enrolled_once_and_renews_by_itself(plane: ControlPlane) -> None:
    user = f"{names.NODE_USER}fresh"
    ask(plane, enrolment(plane), request(user, "trackbed-fresh-1"))
    left = fleet(plane, "approve")
    assert left.code == 2
    assert "fresh is not named as a new node" in left.out
    assert fleet(plane, "approve", "fresh", "--dry").code == 0
    assert decision(plane, "trackbed-fresh-1") == []

    assert fleet(plane, "approve", "fresh").code == 0
    assert decision(plane, "trackbed-fresh-1") == ["Approved"]
    until(lambda: plane.get("csr", "trackbed-fresh-1")["status"].get("certificate"), "it is signed")
    pem = base64.b64decode(plane.get("csr", "trackbed-fresh-1")["status"]["certificate"])
    subject = x509.load_pem_x509_certificate(pem).subject
    assert subject.rfc4514_string() == f"CN={user}"

    # Whoever has the enrolment's token cannot become a node that there is.
    plane.kubectl("delete", "csr", "trackbed-fresh-1")
    ask(plane, enrolment(plane), request(user, "trackbed-fresh-2"))
    again = fleet(plane, "approve", "fresh")
    assert again.code == 2
    assert (
        "fresh has been enrolled already; if it was installed anew: trackbed fleet approve --again fresh" in again.out
    )
    assert fleet(plane, "approve", "--again", "fresh").code == 0

    make_node(plane, "fresh")
    ask(plane, plane.identity(user), request(user, "trackbed-fresh-3"))
    assert fleet(plane, "approve").code == 0
    assert decision(plane, "trackbed-fresh-3") == ["Approved"]
    assert fleet(plane, "approve").out == "no pending requests of reporters\n"


@pytest.mark.usefixtures("no_nodes")
def test_a_request_that_no_reporter_makes_is_denied_and_requests_of_others_are_left(plane: ControlPlane) -> None:
    ask(plane, plane.admin, request(f"{names.NODE_USER}victim", "trackbed-stolen"))
    ask(plane, plane.admin, request("somebody", "others"))
    done = fleet(plane, "approve", "victim", "--json")
    assert done.code == 2
    (row,) = done.document["requests"]
    assert (row["request"], row["action"]) == ("trackbed-stolen", "deny")
    assert "admin may not ask for trackbed:node:victim" in row["reason"]
    assert decision(plane, "trackbed-stolen") == ["Denied"]
    assert decision(plane, "others") == []


STRANGERS = "system:kube-controller-manager"


def pem(user: str) -> bytes:
    """A request for a user, in PEM."""
    return base64.b64decode(request(user, "none")["spec"]["request"])


def two_ways(user: str) -> dict[str, bytes]:
    """Texts that one parser reads as the user's request, and another as a stranger's or not at all."""
    mine, other = pem(user), pem(STRANGERS)
    return {
        "first": b"x " + mine + other,
        "second": mine + other,
        "between": mine + b"x " + other + mine,
        "label": b"-----BEGIN X-----\n" + other + mine,
        "header": mine.replace(b"-----\n", b"-----\nA: b\n\n", 1),
        "after": mine + b"\n",
    }


@pytest.mark.usefixtures("no_nodes")
def test_an_ambiguous_request_is_approved_by_neither_command_nor_deploy(plane: ControlPlane) -> None:
    user = f"{names.NODE_USER}double"
    token = enrolment(plane)
    for way, text in two_ways(user).items():
        name = f"trackbed-double-{way}"
        plane.kubectl("delete", "csr", name, "--ignore-not-found")
        encoded = base64.b64encode(text).decode()
        document = request(user, name)
        document["spec"]["request"] = encoded
        # Some of them the API server itself does not take.
        made = plane.try_kubectl("create", "--filename=-", stdin=json.dumps(document), kubeconfig=token)
        if made.returncode:
            continue
        with pytest.raises(credentials.NotGiven, match=r"one PEM block|cannot be read"):
            credentials.approve(str(plane.admin), "double", name, encoded)
        assert decision(plane, name) == []
        assert fleet(plane, "approve", "double").code == 2
        assert decision(plane, name) == ["Denied"]
        assert "certificate" not in plane.get("csr", name)["status"]
    assert plane.get("csr", "trackbed-double-first")


@pytest.mark.usefixtures("no_nodes")
def test_the_deploy_approves_what_the_node_shows_and_reads_what_was_signed(plane: ControlPlane) -> None:
    name, document = "trackbed-shown-1", request(f"{names.NODE_USER}shown", "trackbed-shown-1")
    ask(plane, enrolment(plane), document)
    with pytest.raises(credentials.NotGiven, match="is not the name of a reporter's request"):
        credentials.approve(str(plane.admin), "shown", f"x/../{name}", document["spec"]["request"])
    credentials.approve(str(plane.admin), "shown", name, document["spec"]["request"])
    assert plane.get("csr", name)["status"]["certificate"]


def forge(plane: ControlPlane, name: str) -> None:
    """Replace a request's certificate with another one, as a malicious signer could."""
    pair = plane.authority.client(STRANGERS)
    text = base64.b64encode(pair.certificate.read_bytes()).decode()
    body = json.dumps({"status": {"certificate": text}})
    plane.kubectl("patch", "csr", name, "--subresource=status", "--type=merge", "-p", body)


@pytest.mark.usefixtures("no_nodes")
def test_a_certificate_that_is_not_what_was_approved_is_named(plane: ControlPlane) -> None:
    """The signer issues a stranger's certificate."""
    name, document = "trackbed-forged-1", request(f"{names.NODE_USER}forged", "trackbed-forged-1")
    ask(plane, enrolment(plane), document)
    forge(plane, name)
    done = fleet(plane, "approve", "forged")
    assert done.code == 1
    assert "trackbed-forged-1: its certificate is not what was approved: it has another key; the subject is" in done.err


@pytest.mark.usefixtures("no_nodes")
def test_a_request_that_cannot_be_read_is_denied_and_the_others_are_judged(plane: ControlPlane) -> None:
    for name in ("a", "b"):
        make_node(plane, name)
        document = request(f"{names.NODE_USER}{name}", f"trackbed-{name}-1")
        if name == "a":
            entry = {"manager": "m", "operation": "Update", "apiVersion": "certificates.k8s.io/v1"}
            fields = {"time": "0000-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:uid": {}}}}
            document["metadata"]["managedFields"] = [{**entry, **fields}]
        # A node may not write such a time; by an older version of the policies it could.
        ask(plane, plane.admin if name == "a" else enrolment(plane), document)
    done = fleet(plane, "approve", "--again", "a", "--again", "b")
    assert done.code == 2
    assert "it cannot be read: Invalid RFC3339" in done.out
    assert (decision(plane, "trackbed-a-1"), decision(plane, "trackbed-b-1")) == (["Denied"], ["Approved"])
    plane.kubectl("delete", "csr", "--all")
