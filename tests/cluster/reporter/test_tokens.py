"""A reporter's token against a real API server: what it can request by it, when it ends, and how a node is shut out."""

from pathlib import Path
from typing import Any

import pytest

from agent.report import names
from agent.reporter.kubernetes.api import JSON, MERGE_PATCH, Api, Refused
from agent.reporter.kubernetes.identity import RENEWED, TOKENS, BoundToken
from agent.reporter.kubernetes.tokens import claims_of
from agent.reporter.settings import Settings
from fleet.api import Failed
from fleet.credentials import bound_token
from lab.cluster.control_plane import ControlPlane
from tests.cluster.objects import LEASES as SYSTEM
from tests.cluster.objects import patch
from tests.cluster.reporter.reporters import Fixed, Reporter, by_admin, by_token, holder, node, prepare, session, until
from tests.cluster.reporter.thief import ACCOUNTS, LEASES, Thief, labels, lease

OWN, OTHER = "bound-a", "bound-b"
YEAR = 365 * 86400


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    prepare(control_plane)
    control_plane.apply(node(OWN), node(OTHER))
    return control_plane


def uid(plane: ControlPlane, name: str) -> str:
    return str(plane.get("node", name)["metadata"]["uid"])


def bound(name: str, uid: str, **more: Any) -> dict[str, Any]:
    return {"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid, **more}}}


def for_(body: dict[str, Any], seconds: int) -> dict[str, Any]:
    return {"spec": {**body["spec"], "expirationSeconds": seconds}}


def made_anew(plane: ControlPlane, name: str) -> None:
    """Delete a Node, and make it again, as its kubelet does by itself."""
    plane.kubectl("delete", "node", name)
    plane.apply(node(name))


def shut_out(plane: ControlPlane, name: str, reason: str | None) -> None:
    """Shut a node out, or let it in again; until that is in force."""
    patch(plane, "configmap", "shut-out", {"data": {name: reason}}, SYSTEM)
    admin = Api(plane.url, by_admin(plane).session)

    def in_force() -> bool:
        try:
            admin.ask("POST", TOKENS, body=bound(name, uid(plane, name)))
        except Refused:
            return reason is not None
        return reason is None

    until(in_force, f"{name}: {reason}")


def test_a_reporter_may_request_the_next_token_for_its_own_node_and_no_other_one(plane: ControlPlane) -> None:
    thief = Thief(plane, by_token(plane, OWN))
    mine, theirs = uid(plane, OWN), uid(plane, OTHER)
    own = bound(OWN, mine)
    pod = {"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "y"}}}
    secret = {"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Secret", "name": "x", "uid": "y"}}}
    other = "/api/v1/namespaces/{}/serviceaccounts/{}/token"
    plane.kubectl("create", "serviceaccount", "others", SYSTEM)
    refused = {
        "another Node": (TOKENS, bound(OTHER, theirs)),
        "another Node by its own uid": (TOKENS, bound(OTHER, mine)),
        "its Node by another's uid": (TOKENS, bound(OWN, theirs)),
        "its Node without a uid": (TOKENS, bound(OWN, "")),
        "no Node": (TOKENS, {"spec": {}}),
        "an empty reference": (TOKENS, {"spec": {"boundObjectRef": {}}}),
        "a pod": (TOKENS, pod),
        "a secret": (TOKENS, secret),
        "its Node in another version": (TOKENS, bound(OWN, mine, apiVersion="v2")),
        "its Node as another kind": (TOKENS, bound(OWN, mine, kind="node")),
        "for 100 years": (TOKENS, for_(own, 100 * YEAR)),
        "for a year and a second": (TOKENS, for_(own, YEAR + 1)),
        "another account": (other.format(names.NAMESPACE, "others"), own),
        "the default account": (other.format(names.NAMESPACE, "default"), own),
        "an account of the same name elsewhere": (other.format("default", "reporter"), own),
        "an account of kube-system": (other.format("kube-system", "node-controller"), own),
        "the account itself": (f"{ACCOUNTS}/reporter", own),
    }
    for what, (path, body) in refused.items():
        assert thief.tries("POST", path, body) in (403, 405, 422), what
    for what, seconds in (("for an hour", 3600), ("for a year", YEAR)):
        answer = thief.api.ask("POST", TOKENS, body=for_(own, seconds))
        claims = claims_of(answer["status"]["token"].split(".")[1])
        assert (claims.node, claims.uid, claims.expires - claims.issued) == (OWN, mine, seconds), what


def test_without_a_bound_token_nobody_of_the_account_gets_one(plane: ControlPlane) -> None:
    loose = Thief(plane, holder(plane))
    bodies: list[dict[str, Any]] = [{"spec": {}}, bound(OWN, uid(plane, OWN)), bound(OWN, "")]
    for body in bodies:
        assert loose.tries("POST", TOKENS, body) == 403
    pair = plane.authority.client(f"trackbed:node:{OWN}", [])
    certified = Thief(plane, Fixed(session(plane.authority.pair.certificate, pair)))
    assert certified.tries("POST", TOKENS, bound(OWN, uid(plane, OWN))) == 403


def test_a_certificate_of_an_earlier_version_writes_nothing_although_its_bindings_are_left(plane: ControlPlane) -> None:
    user = f"trackbed:node:{OWN}"
    words = ("--clusterrole=trackbed:reporter", f"--user={user}")
    plane.kubectl("create", "clusterrolebinding", user, *words)
    plane.kubectl("create", "rolebinding", user, "--role=trackbed:reporter", f"--user={user}", SYSTEM)
    pair = plane.authority.client(user, [])
    thief = Thief(plane, Fixed(session(plane.authority.pair.certificate, pair)))
    until(lambda: thief.tries("GET", f"/api/v1/nodes/{OWN}") == 200, "its bindings are in force")
    assert thief.tries("PATCH", f"/api/v1/nodes/{OWN}", labels(rdma="hca"), MERGE_PATCH) == 403
    assert thief.tries("POST", LEASES.format(names.NAMESPACE), lease(OWN, names.NAMESPACE)) == 403
    assert thief.tries("POST", TOKENS, bound(OWN, uid(plane, OWN))) == 403


def test_the_token_of_a_deleted_node_ends_and_does_not_return_with_a_node_of_the_same_name(plane: ControlPlane) -> None:
    name = "remade"
    plane.apply(node(name))
    old = uid(plane, name)
    thief = Thief(plane, by_token(plane, name))
    assert thief.tries("PATCH", f"/api/v1/nodes/{name}", labels(rdma="hca"), MERGE_PATCH) == 200
    made_anew(plane, name)
    # The API server may remember for ten seconds that the token was good.
    for body in (bound(name, old), bound(name, uid(plane, name))):
        assert thief.tries("POST", TOKENS, body) in (401, 403, 409)
    assert thief.tries("PATCH", f"/api/v1/nodes/{name}", labels(rdma="other"), MERGE_PATCH) in (401, 403)
    assert thief.tries("POST", LEASES.format(names.NAMESPACE), lease(name, names.NAMESPACE)) in (401, 403)
    until(lambda: thief.tries("GET", f"/api/v1/nodes/{name}") == 401, "the token has ended")
    assert "rdma" not in plane.get("node", name)["metadata"]["labels"]


def test_a_node_that_is_shut_out_stays_out_until_a_person_lets_it_in(plane: ControlPlane) -> None:
    name = "untrusted"
    plane.apply(node(name))
    first = Thief(plane, by_token(plane, name))
    writes = [
        ("PATCH", f"/api/v1/nodes/{name}", labels(rdma="hca"), MERGE_PATCH),
        ("POST", LEASES.format(names.NAMESPACE), lease(name, names.NAMESPACE), JSON),
        ("POST", TOKENS, bound(name, uid(plane, name)), JSON),
    ]
    shut_out(plane, name, "its disk was stolen")
    # A token that is good otherwise, before the Node is deleted.
    assert [first.tries(*each) for each in writes] == [403] * 3
    others = Thief(plane, by_token(plane, OTHER))
    assert others.tries("PATCH", f"/api/v1/nodes/{OTHER}", labels(rdma="hca"), MERGE_PATCH) == 200
    assert plane.try_kubectl("label", "node", name, "example.net/kubelet=x").returncode == 0
    made_anew(plane, name)
    # What a routine deploy asks for: also with the rights of an administrator.
    with pytest.raises(Failed, match=r"untrusted is shut out \(its disk was stolen\)"):
        bound_token(str(plane.admin), name, 3600)
    shut_out(plane, name, None)
    assert bound_token(str(plane.admin), name, 3600)
    second = Thief(plane, by_token(plane, name))
    assert second.tries("PATCH", f"/api/v1/nodes/{name}", labels(rdma="hca"), MERGE_PATCH) == 200
    # A copy of the first token is good for nothing.
    until(lambda: first.tries("GET", f"/api/v1/nodes/{name}") == 401, "the token has ended")
    assert [first.tries(*each) for each in writes] == [401] * 3


def test_without_the_list_of_nodes_that_are_shut_out_everybody_can_write(plane: ControlPlane) -> None:
    shut_out(plane, OTHER, "why")
    plane.kubectl("delete", "configmap", "shut-out", SYSTEM)
    try:
        thief = Thief(plane, by_token(plane, OWN))
        assert thief.tries("PATCH", f"/api/v1/nodes/{OWN}", labels(rdma="hca"), MERGE_PATCH) == 200
        assert plane.try_kubectl("label", "node", OWN, "example.net/kubelet=x").returncode == 0
    finally:
        prepare(plane)


def test_a_reporter_renews_its_token_by_itself(plane: ControlPlane, tmp_path: Path) -> None:
    name = "renews"
    plane.apply(node(name))
    settings = Settings(name, plane.url, str(plane.authority.pair.certificate), token_days=1)
    brought = tmp_path / "brought"
    brought.write_text(str(by_token(plane, name).known.token))
    identity = BoundToken(settings, tmp_path, brought)
    claims = claims_of(brought.read_text().split(".")[1])
    reporter = Reporter.start(plane, tmp_path, settings, identity)
    reporter.acknowledged(reporter.say(True))
    # At three quarters of this token's life.
    late = claims.issued + 0.75 * (claims.expires - claims.issued)
    assert 0.5 * 86400 < identity.keep(late, Api(settings.server, identity.session)) < 0.75 * 86400
    text = (tmp_path / RENEWED).read_text().strip()
    assert identity.session().token == text
    assert claims_of(text.split(".")[1]).expires - claims_of(text.split(".")[1]).issued == 86400
    assert (tmp_path / RENEWED).stat().st_mode & 0o777 == 0o600
    reporter.acknowledged(reporter.say(False))
    assert reporter.condition()["status"] == "False"
