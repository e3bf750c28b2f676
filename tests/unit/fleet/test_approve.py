"""`trackbed fleet approve` with an API server that fails, or that other approvers use, too."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from attrs import define, field
from cryptography.x509 import ExtendedKeyUsage
from cryptography.x509.oid import ExtendedKeyUsageOID

from agent.report import names
from fleet.connection import _with_status, why
from tests.unit.fleet.test_approval import asked, common_name
from tests.unit.fleet.test_kubeconfig import KUBECONFIG, trackbed
from tests.unit.reporter.scripted import api_server
from tests.unit.reporter.test_identity import signed

Answer = tuple[int, dict[str, Any]] | None

REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
LOST: Answer = None
CLIENT = ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])


def refused(status: int, message: str) -> Answer:
    return status, {"kind": "Status", "code": status, "message": message}


BROKEN = refused(500, "etcdserver: leader changed")
CHANGED = refused(409, "the object has been modified")
INVALID = refused(422, "status.conditions: Invalid value")


@define
class Cluster:
    """An API server with certificate requests and bindings. Each approved request is signed at once.

    ``next_answers``: by method and path, what it answers to the next requests instead; None is a connection that breaks.
    ``written``: whether such a request has its effect nevertheless.
    """

    requests: dict[str, dict[str, Any]] = field(factory=dict)
    bindings: dict[str, dict[str, Any]] = field(factory=dict)
    next_answers: dict[str, list[Answer]] = field(factory=dict)
    written: bool = False
    asked: list[str] = field(factory=list)

    def has_request(self, name: str, node: str, requester: str) -> None:
        self.requests[name] = asked(common_name(f"{names.NODE_USER}{node}"), requester, name=name).to_dict()

    def decision(self, name: str) -> list[str]:
        return [one["type"] for one in self.requests[name].get("status", {}).get("conditions", [])]

    def answer(self, method: str, path: str, body: Any) -> Answer:
        what = f"{method} {path}"
        self.asked.append(what)
        if left := self.next_answers.get(what):
            if self.written:
                self.usual(method, path, body)
            return left.pop(0)
        return self.usual(method, path, body)

    def usual(self, method: str, path: str, body: Any) -> Answer:
        kind, _, name = path.rpartition("/")
        if "bindings" in path:
            return self.bind(method, path, body)
        if path.endswith("/approval"):
            name = kind.rpartition("/")[2]
            text = base64.b64decode(self.requests[name]["spec"]["request"])
            certificate = base64.b64encode(signed(text, CLIENT)).decode()
            self.requests[name] = {**body, "status": {**body["status"], "certificate": certificate}}
            return 200, body
        if kind == REQUESTS:
            return (200, self.requests[name]) if name in self.requests else refused(404, "not found")
        if path == REQUESTS:
            return 200, {"metadata": {}, "items": [*self.requests.values()]}
        if name == "nodes":
            return 200, {"metadata": {}, "items": [{"metadata": {"name": each}} for each in "ab"]}
        user = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": {"userInfo": {"username": "me"}}}
        return 201, user

    def bind(self, method: str, path: str, body: Any) -> Answer:
        if method == "GET":
            return 200, {"metadata": {}, "items": [one for at, one in self.bindings.items() if "/namespaces/" in at]}
        if method == "DELETE":
            return (200, {}) if self.bindings.pop(path, None) else refused(404, "not found")
        self.bindings[f"{path}/{body['metadata']['name']}"] = body
        return 201, body


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Such a server, and a kubeconfig for it."""
    made = Cluster()
    with api_server(tmp_path, made.answer, {"Content-Type": "application/json"}) as (url, authority):
        at = f'"{url}", certificate-authority: "{authority}"'
        (tmp_path / "kubeconfig").write_text(KUBECONFIG.replace('"https://127.0.0.1:1"', at))
        yield made


def approve(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return trackbed("approve", *words, "--kubeconfig", str(folder / "kubeconfig"))


APPROVAL = f"PUT {REQUESTS}/r/approval"


@pytest.mark.parametrize("answers", [[BROKEN] * 2, [INVALID] * 2], ids=["broken", "invalid"])
def test_an_enrolment_whose_approval_fails_is_approved_by_the_next_run(
    cluster: Cluster, tmp_path: Path, answers: list[Answer]
) -> None:
    cluster.has_request("r", "new", names.ENROLMENT)
    cluster.next_answers[APPROVAL] = [*answers]
    failed = approve(tmp_path, "new")
    assert (failed.returncode, cluster.decision("r"), cluster.bindings) == (1, [], {})
    assert answers[0] and answers[0][1]["message"] in failed.stderr
    done = approve(tmp_path, "new")
    assert (done.returncode, done.stderr, cluster.decision("r"), len(cluster.bindings)) == (0, "", ["Approved"], 2)


def test_where_bindings_cannot_be_deleted_the_way_to_approve_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.has_request("r", "new", names.ENROLMENT)
    cluster.next_answers[APPROVAL] = [BROKEN, BROKEN]
    leases = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{names.NAMESPACE}/rolebindings/{names.NODE_USER}new"
    cluster.next_answers[f"DELETE {leases}"] = [refused(403, "you may not")]
    failed = approve(tmp_path, "new")
    assert failed.stderr == (
        "trackbed: r: etcdserver: leader changed; if it stays pending: trackbed fleet approve --again new\n"
    )
    assert approve(tmp_path, "--again", "new").returncode == 0
    assert cluster.decision("r") == ["Approved"]


def test_a_node_keeps_its_bindings_if_its_approval_may_have_been_written(cluster: Cluster, tmp_path: Path) -> None:
    cluster.has_request("r", "new", names.ENROLMENT)
    cluster.next_answers = {APPROVAL: [LOST], f"GET {REQUESTS}/r": [LOST]}
    cluster.written = True
    failed = approve(tmp_path, "new")
    assert (failed.returncode, cluster.decision("r"), len(cluster.bindings)) == (1, ["Approved"], 2)
    assert "cannot be reached" in failed.stderr
    assert failed.stderr.endswith("; if it stays pending: trackbed fleet approve --again new\n")


def test_a_credential_plugin_that_fails_later_does_not_hide_what_was_done(cluster: Cluster, tmp_path: Path) -> None:
    """The token expires, and the plugin gets no other one."""
    plugin = tmp_path / "plugin"
    plugin.write_text('#!/bin/sh\nrm "$0.once" && echo \'{"status": {"token": "t"}}\'\n')
    plugin.chmod(0o755)
    (tmp_path / "plugin.once").touch()
    user = "exec: {apiVersion: client.authentication.k8s.io/v1, command: ./plugin}"
    config = tmp_path / "kubeconfig"
    config.write_text(config.read_text().replace("token: secret-token", user))
    for name in "ab":
        cluster.has_request(f"r-{name}", name, names.ENROLMENT)
    expired = refused(401, "Unauthorized")
    for what in (f"PUT {REQUESTS}/r-b/approval", f"GET {REQUESTS}/r-b", f"GET {REQUESTS}/r-a"):
        cluster.next_answers[what] = [expired] * 9
    failed = approve(tmp_path, "a", "b")
    assert (failed.returncode, cluster.decision("r-a"), cluster.decision("r-b")) == (1, ["Approved"], [])
    assert failed.stdout.splitlines()[-1] == "2 pending requests"
    why_b, why_a = failed.stderr.splitlines()
    fails = f"the kubeconfig's exec command '{plugin}' failed with exit code 1: rm: cannot remove"
    assert why_b.startswith(f"trackbed: r-b: {fails}")
    assert why_b.endswith("; if it stays pending: trackbed fleet approve --again b")
    assert why_a.startswith(f"trackbed: r-a: its certificate cannot be compared: {fails}")


def test_an_approval_whose_answer_was_lost_counts(cluster: Cluster, tmp_path: Path) -> None:
    cluster.has_request("r", "new", names.ENROLMENT)
    cluster.next_answers[APPROVAL] = [LOST]
    cluster.written = True
    done = approve(tmp_path, "new")
    assert (done.returncode, done.stderr, len(cluster.bindings)) == (0, "", 2)
    assert cluster.asked.count(APPROVAL) == 1


def test_a_connection_that_breaks_does_not_keep_the_other_requests_from_their_approval_and_check(
    cluster: Cluster, tmp_path: Path
) -> None:
    for name in "ab":
        cluster.has_request(f"r-{name}", name, f"{names.NODE_USER}{name}")
    cluster.next_answers = {
        f"PUT {REQUESTS}/r-a/approval": [LOST],
        f"GET {REQUESTS}/r-a": [LOST],
        # The comparison of the other one's certificate.
        f"GET {REQUESTS}/r-b": [LOST, refused(503, "it restarts"), (200, {"status": {"certificate": "?"}})],
    }
    done = approve(tmp_path)
    assert (done.returncode, cluster.decision("r-a"), cluster.decision("r-b")) == (1, [], ["Approved"])
    assert [line.partition(" by ")[0] for line in done.stdout.splitlines()] == [
        "r-a: approve: a, asked", "r-b: approve: b, asked", "2 pending requests",
    ]  # fmt: skip
    assert "r-a: the API server cannot be reached" in done.stderr
    assert "r-b: its certificate is not what was approved" in done.stderr


def test_a_load_balancers_answer_is_named_in_a_few_words() -> None:
    request = httpx2.Request("GET", "https://127.0.0.1/api")
    answer = httpx2.Response(502, text="<html>", request=request)
    with pytest.raises(httpx2.HTTPStatusError) as failed:
        answer.raise_for_status()
    assert why(_with_status(failed.value)) == "HTTP status 502"


def test_a_header_that_cannot_be_sent_is_not_quoted() -> None:
    """h11's message, for a token that is read again during the command."""
    said = why(httpx2.LocalProtocolError("Illegal header value b'Bearer secret-token\\n'"))
    assert ("secret" in said, "has the kubeconfig's token a line break" in said) == (False, True)


@pytest.mark.parametrize("first", [CHANGED, INVALID], ids=["changed", "invalid"])
def test_a_request_that_is_still_pending_is_decided_once_more(cluster: Cluster, tmp_path: Path, first: Answer) -> None:
    cluster.has_request("r", "a", f"{names.NODE_USER}a")
    cluster.next_answers[APPROVAL] = [first]
    assert approve(tmp_path).returncode == 0
    assert cluster.decision("r") == ["Approved"]


def test_a_request_that_stays_pending_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    cluster.has_request("r", "a", f"{names.NODE_USER}a")
    cluster.next_answers[APPROVAL] = [CHANGED, CHANGED]
    failed = approve(tmp_path)
    assert (failed.returncode, failed.stderr) == (1, "trackbed: r: the object has been modified\n")
    assert cluster.asked.count(APPROVAL) == 2


@pytest.mark.parametrize(
    ("meanwhile", "code", "said"),
    [
        ("Approved", 0, ""),
        ("Denied", 1, "trackbed: r: it is Denied meanwhile, and should be Approved: renewal\n"),
        ("deleted", 0, ""),
        ("replaced", 1, "trackbed: r: it was changed meanwhile, and must be judged again; run the command again\n"),
    ],
)
def test_another_approvers_decision_is_not_replaced(
    cluster: Cluster, tmp_path: Path, meanwhile: str, code: int, said: str
) -> None:
    cluster.has_request("r", "a", f"{names.NODE_USER}a")
    there = cluster.requests["r"]
    cluster.next_answers[APPROVAL] = [CHANGED]
    decided = {**there, "status": {"conditions": [{"type": meanwhile, "status": "True"}]}}
    other = {**there, "spec": {**there["spec"], "username": "mallory"}}
    answers: dict[str, Answer] = {"deleted": refused(404, "not found"), "replaced": (200, other)}
    # It is gone when its certificate would be compared.
    cluster.next_answers[f"GET {REQUESTS}/r"] = [answers.get(meanwhile, (200, decided)), refused(404, "not found")]
    done = approve(tmp_path)
    assert (done.returncode, done.stderr, cluster.asked.count(APPROVAL)) == (code, said, 1)
