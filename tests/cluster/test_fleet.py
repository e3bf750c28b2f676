"""The fleet's commands against a real API server, with Nodes that are objects only."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from lightkube import ALL_NS, ApiError, Client, KubeConfig
from lightkube.resources.core_v1 import NodeStatus, Pod
from lightkube.types import PatchType

from agent.report import names
from fleet import credentials
from fleet.bindings import bindings
from lab.cluster import control_plane as planes
from lab.cluster.control_plane import ControlPlane

ROOT = Path(__file__).parent.parent.parent
DEADLINE = 60.0
OTHERS = {"key": "example.net/busy", "effect": "NoSchedule"}
OURS = {"key": names.TAINT, "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of this module's own: a sweep looks at all Nodes that there are."""
    made = planes.create(tmp_path_factory.mktemp("fleet"))
    try:
        made.start()
        made.kubectl("apply", "-k", str(ROOT / "fleet" / "cluster"))
        yield made
    finally:
        made.stop()


@frozen
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def start(kubeconfig: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    command = [sys.executable, "-m", "agent", "fleet", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return Done(process.returncode, out, err)


def fleet(plane: ControlPlane, *words: str) -> Done:
    return ended(start(plane.admin, *words))


def until(look: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not look():
        assert time.monotonic() < end, f"not within {DEADLINE:.0f} s: {what}"
        time.sleep(0.1)


def stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def conditions(ready: str) -> list[dict[str, str]]:
    said = {names.READY: ready, names.UP_TO_DATE: "True", "Ready": "True"}
    return [
        {"type": type, "status": status, "reason": "AsSpecified", "message": "as it is", "lastTransitionTime": stamp()}
        for type, status in said.items()
    ]


def make_node(plane: ControlPlane, name: str, ready: str = "True", life: int = 900) -> None:
    """A node as its reporter publishes it, whose Lease has so many seconds to live."""
    labels = {names.READY_LABEL: "true", "kubernetes.io/hostname": name}
    plane.kubectl("delete", "node", name, "--ignore-not-found")
    plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": [OTHERS]},
        }
    )
    status = {
        "conditions": conditions(ready),
        "capacity": {"cpu": "4", "memory": "8Gi", "pods": "110"},
        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"},
    }
    plane.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    renew(plane, name, life)


def renew(plane: ControlPlane, name: str, life: int = 900) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "namespace": names.NAMESPACE,
            "annotations": {names.SPEC_HASH: "0123456789abcdef", names.AGENT_VERSION: "0.1.0-abc"},
        },
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": life,
            "renewTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }
    plane.apply(lease)


def node(plane: ControlPlane, name: str) -> Any:
    return plane.get("node", name)


def condition(plane: ControlPlane, name: str) -> Any:
    return next(one for one in node(plane, name)["status"]["conditions"] if one["type"] == names.READY)


def taints(plane: ControlPlane, name: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = node(plane, name)["spec"].get("taints", [])
    return found


@pytest.fixture
def no_nodes(plane: ControlPlane) -> None:
    plane.kubectl("delete", "nodes", "--all")
    plane.kubectl("delete", "leases", "--all", f"--namespace={names.NAMESPACE}")
    # A node that was enrolled by the test before is shown by this one's `status`.
    place = ("rolebindings", f"--namespace={names.NAMESPACE}")
    enrolled = [one["metadata"]["name"] for one in plane.get(*place)["items"]]
    for name in [name for name in enrolled if name.startswith(names.NODE_USER)]:
        plane.kubectl("delete", *place, name)


# --- status and sweep ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_nodes")
def test_status_shows_every_node_and_its_exit_code_says_whether_all_are_ready(plane: ControlPlane) -> None:
    make_node(plane, "a")
    plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "others"}})
    done = fleet(plane, "status", "--json")
    assert done.code == 0
    (found,) = done.document["nodes"]
    assert (found["name"], found["ready"], found["spec_hash"]) == ("a", "True", "0123456789abcdef")
    assert (found["agent_version"], found["up_to_date"], found["reason"]) == ("0.1.0-abc", "True", "AsSpecified")
    assert done.document["other_nodes"] == 1
    make_node(plane, "b", ready="False")
    done = fleet(plane, "status")
    assert done.code == 2
    assert "1 of 2 nodes are ready; 1 other nodes" in done.out
    assert "AsSpecified: as it is" in done.out


@pytest.mark.usefixtures("no_nodes")
def test_a_silent_node_becomes_unknown_and_tainted_and_all_else_of_it_stays(plane: ControlPlane) -> None:
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
def test_half_the_fleet_silent_taints_none(plane: ControlPlane) -> None:
    for name in ("a", "b", "c", "d"):
        make_node(plane, name, life=1 if name in ("a", "b") else 900)
    until(lambda: len(fleet(plane, "sweep", "--dry", "--json").document["expired"]) == 2, "two expire")
    done = fleet(plane, "sweep", "--json")
    assert done.code == 2
    assert done.document["refused"]
    assert "2 of 4 nodes are without a heartbeat, and at most 1 may be: none was tainted" in done.err
    assert [taints(plane, name) for name in ("a", "b", "c", "d")] == [[OTHERS]] * 4
    assert fleet(plane, "sweep", "--max-share", "0.5").code == 0
    assert [taints(plane, name) for name in ("a", "b")] == [[OTHERS, OURS]] * 2


@pytest.mark.usefixtures("no_nodes")
def test_a_heartbeat_in_the_nodes_own_wrong_time_counts(plane: ControlPlane) -> None:
    make_node(plane, "a")
    wrong = {"spec": {"renewTime": "1970-01-01T00:00:00.000000Z"}}
    plane.kubectl("patch", "lease", "a", f"--namespace={names.NAMESPACE}", "--type=merge", "-p", json.dumps(wrong))
    assert fleet(plane, "sweep", "--json").document["expired"] == []


@pytest.mark.usefixtures("no_nodes")
def test_a_node_whose_kubelet_is_lost_is_not_ready(plane: ControlPlane) -> None:
    make_node(plane, "a")
    lost = [{**one, "status": "Unknown"} if one["type"] == "Ready" else one for one in conditions("True")]
    body = json.dumps({"status": {"conditions": lost}})
    plane.kubectl("patch", "node", "a", "--subresource=status", "--type=merge", "-p", body)
    done = fleet(plane, "status")
    assert done.code == 2
    assert "KubeletNotReady: the kubelet's condition Ready is Unknown" in done.out


@pytest.mark.usefixtures("no_nodes")
def test_a_node_that_was_deleted_is_shown(plane: ControlPlane, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_node(plane, name)
    # It was enrolled.
    plane.apply(bindings("a")[1].to_dict())
    plane.kubectl("delete", "node", "a")
    plane.kubectl("delete", "leases", "a", f"--namespace={names.NAMESPACE}")
    inventory = tmp_path / "inventory.py"
    inventory.write_text('hosts = [("host", {"node_name": "c"})]\n')
    try:
        done = fleet(plane, "status", "--inventory", str(inventory), "--json")
        assert done.code == 2
        rows = {one["name"]: one["reason"] for one in done.document["nodes"] if not one["joined"]}
        assert rows == {"a": "NotJoined", "c": "NotJoined"}
        assert "its Node was deleted" in fleet(plane, "status").out
    finally:
        plane.kubectl("delete", "rolebinding", f"{names.NODE_USER}a", f"--namespace={names.NAMESPACE}")


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
def test_all_leases_gone_are_made_anew_and_none_is_swept(plane: ControlPlane) -> None:
    for name in ("a", "b", "c", "d"):
        make_node(plane, name)
    plane.kubectl("delete", "leases", "--all", f"--namespace={names.NAMESPACE}")
    assert fleet(plane, "sweep", "--dry", "--json").document["renewed"] == ["a", "b", "c", "d"]
    assert fleet(plane, "sweep").code == 2
    assert fleet(plane, "sweep").code == 0
    assert [taints(plane, name) for name in ("a", "b", "c", "d")] == [[OTHERS]] * 4


def test_who_may_not_sweep_is_told_so(plane: ControlPlane) -> None:
    done = ended(start(plane.identity("nobody"), "sweep"))
    assert done.code == 1
    assert "the API server refuses" in done.err
    assert len(done.err.splitlines()) == 1


# --- approve ---------------------------------------------------------------------------------------------------


def request(user: str, name: str, **different: Any) -> dict[str, Any]:
    """A CertificateSigningRequest with a key of its own."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, user)])
    made = x509.CertificateSigningRequestBuilder(subject).sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    spec = {
        "request": base64.b64encode(made.public_bytes(serialization.Encoding.PEM)).decode(),
        "signerName": "kubernetes.io/kube-apiserver-client",
        "usages": ["client auth"],
        "expirationSeconds": 86400,
    }
    return {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {**spec, **different},
    }


def ask(plane: ControlPlane, kubeconfig: Path, document: dict[str, Any]) -> None:
    plane.kubectl("create", "--filename=-", stdin=json.dumps(document), kubeconfig=kubeconfig)


def enrolment(plane: ControlPlane) -> Path:
    token = plane.kubectl("create", "token", "enrolment", f"--namespace={names.NAMESPACE}").strip()
    return plane.bearer("enrolment", token)


def decision(plane: ControlPlane, name: str) -> list[str]:
    found = plane.get("csr", name)["status"].get("conditions", [])
    return [one["type"] for one in found]


@pytest.mark.usefixtures("no_nodes")
def test_a_new_node_is_enrolled_once_and_renews_by_itself(plane: ControlPlane) -> None:
    user = f"{names.NODE_USER}fresh"
    ask(plane, enrolment(plane), request(user, "trackbed-fresh-1"))
    left = fleet(plane, "approve")
    assert left.code == 2
    assert "nobody has named fresh as a new node" in left.out
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
def test_a_request_that_is_no_reporters_is_denied_and_others_are_left(plane: ControlPlane) -> None:
    ask(plane, plane.admin, request(f"{names.NODE_USER}victim", "trackbed-stolen"))
    ask(plane, plane.admin, request("somebody", "others"))
    done = fleet(plane, "approve", "victim", "--json")
    assert done.code == 2
    (found,) = done.document["requests"]
    assert (found["request"], found["action"]) == ("trackbed-stolen", "deny")
    assert "admin may not ask for trackbed:node:victim" in found["reason"]
    assert decision(plane, "trackbed-stolen") == ["Denied"]
    assert decision(plane, "others") == []


STRANGERS = "system:kube-controller-manager"


def pem(user: str) -> bytes:
    """A request for a user, in PEM."""
    return base64.b64decode(request(user, "none")["spec"]["request"])


def two_ways(user: str) -> dict[str, bytes]:
    """What one parser reads as the user's request, and another one as a stranger's or not at all."""
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
def test_what_can_be_read_in_two_ways_is_approved_neither_by_the_command_nor_by_the_deploy(plane: ControlPlane) -> None:
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
    with pytest.raises(credentials.NotGiven, match="no name of a reporter's request"):
        credentials.approve(str(plane.admin), "shown", f"x/../{name}", document["spec"]["request"])
    credentials.approve(str(plane.admin), "shown", name, document["spec"]["request"])
    assert plane.get("csr", name)["status"]["certificate"]


def forge(plane: ControlPlane, name: str) -> None:
    """Put another certificate in the place of one that was signed, as somebody may who signs in the cluster."""
    pair = plane.authority.client(STRANGERS)
    text = base64.b64encode(pair.certificate.read_bytes()).decode()
    body = json.dumps({"status": {"certificate": text}})
    plane.kubectl("patch", "csr", name, "--subresource=status", "--type=merge", "-p", body)


@pytest.mark.usefixtures("no_nodes")
def test_a_certificate_that_is_not_what_was_approved_is_named(plane: ControlPlane) -> None:
    """The signer is another one, which gives a stranger's certificate for whatever it is asked."""
    name, document = "trackbed-forged-1", request(f"{names.NODE_USER}forged", "trackbed-forged-1")
    ask(plane, enrolment(plane), document)
    forge(plane, name)
    done = fleet(plane, "approve", "forged")
    assert done.code == 1
    assert "trackbed-forged-1: its certificate is not what was approved: it has another key; the subject is" in done.err


# --- data that a node has made up ------------------------------------------------------------------------------

ESCAPES = "\x1b[2J\x1b]0;mine\x07[bold red]"


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize("when", ["0000-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59"])
@pytest.mark.parametrize("where", ["lastTransitionTime", "lastHeartbeatTime", "renewTime"])
def test_a_time_that_cannot_be_read_stops_nobody(plane: ControlPlane, when: str, where: str) -> None:
    for name in ("a", "b", "c", "d", "e"):
        make_node(plane, name, life=1 if name == "b" else 900)
    if where == "renewTime":
        # Whoever may write every Lease; the policy does not let a node write this one.
        micro = when.replace("00Z", "00.000000Z").replace("59-", "59.000000-")
        words = ("lease", "a", f"--namespace={names.NAMESPACE}")
        change: dict[str, Any] = {"spec": {"renewTime": micro}}
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
    ask(plane, enrolment(plane), request(f"{names.NODE_USER}c", "trackbed-c-1"))
    assert fleet(plane, "approve", "--again", "c").code == 0
    plane.kubectl("delete", "csr", "trackbed-c-1")


@pytest.mark.usefixtures("no_nodes")
def test_a_request_that_cannot_be_read_is_denied_and_the_others_are_judged(plane: ControlPlane) -> None:
    for name in ("a", "b"):
        make_node(plane, name)
        document = request(f"{names.NODE_USER}{name}", f"trackbed-{name}-1")
        if name == "a":
            entry = {"manager": "m", "operation": "Update", "apiVersion": "certificates.k8s.io/v1"}
            fields = {"time": "0000-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:uid": {}}}}
            document["metadata"]["managedFields"] = [{**entry, **fields}]
        ask(plane, enrolment(plane), document)
    done = fleet(plane, "approve", "--again", "a", "--again", "b")
    assert done.code == 2
    assert "it cannot be read: Invalid RFC3339" in done.out
    assert (decision(plane, "trackbed-a-1"), decision(plane, "trackbed-b-1")) == (["Denied"], ["Approved"])
    plane.kubectl("delete", "csr", "--all")


@pytest.mark.usefixtures("no_nodes")
def test_a_heartbeat_from_the_future_does_not_count(plane: ControlPlane) -> None:
    """A client may write the times of a Lease's field managers, by which its renewal is dated."""
    make_node(plane, "a")
    lease = plane.get("lease", "a", f"--namespace={names.NAMESPACE}", "--show-managed-fields")
    managers = [{**entry, "time": "2099-01-01T00:00:00Z"} for entry in lease["metadata"]["managedFields"]]
    body = json.dumps({"metadata": {"managedFields": managers, "labels": {"example.net/a": "b"}}})
    plane.kubectl("patch", "lease", "a", f"--namespace={names.NAMESPACE}", "--type=merge", "-p", body)
    (found,) = fleet(plane, "status", "--json").document["nodes"]
    assert (found["ready"], found["reason"]) == ("Unknown", "Unreadable")
    assert fleet(plane, "sweep", "--json").document["tainted"] == ["a"]


@pytest.mark.usefixtures("no_nodes")
def test_what_a_node_writes_is_shown_and_not_sent_to_the_terminal(plane: ControlPlane) -> None:
    make_node(plane, "a", ready="False")
    said = [{**one, "reason": "Broken", "message": ESCAPES} for one in conditions("False")]
    body = json.dumps({"status": {"conditions": said}})
    plane.kubectl("patch", "node", "a", "--subresource=status", "--type=merge", "-p", body)
    out = fleet(plane, "status").out
    assert "Broken: \\x1b[2J\\x1b]0;mine\\x07[bold red]" in out
    assert "\x1b" not in out
    document = request(f"{names.NODE_USER}a\x1b[2J", "trackbed-a-1")
    ask(plane, enrolment(plane), document)
    out = fleet(plane, "approve").out
    assert "\\x1b[2J" in out
    assert "\x1b" not in out
    plane.kubectl("delete", "csr", "--all")


# --- maintain --------------------------------------------------------------------------------------------------


@contextmanager
def kubelets(plane: ControlPlane, *nodes: str) -> Iterator[None]:
    """What the kubelets of these Nodes do at the API: heartbeats; pods that are bound run, and those that are deleted end."""
    over = Event()
    client = Client(KubeConfig.from_file(plane.admin).get())

    def keep() -> None:
        while not over.wait(0.3):
            for name in nodes:
                beats = [{**one, "lastHeartbeatTime": stamp()} for one in conditions("True")]
                with suppress(ApiError):
                    client.patch(NodeStatus, name, {"status": {"conditions": beats}}, patch_type=PatchType.STRATEGIC)
            for pod in client.list(Pod, namespace=ALL_NS):
                with suppress(ApiError):
                    run(pod)

    def run(pod: Pod) -> None:
        assert pod.metadata and pod.metadata.name and pod.spec and pod.status
        name, namespace = pod.metadata.name, pod.metadata.namespace or ""
        if pod.spec.nodeName not in nodes:
            return
        if pod.metadata.deletionTimestamp:
            client.delete(Pod, name, namespace=namespace, grace_period=0)
        elif pod.status.phase == "Pending":
            running = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            client.patch(Pod.Status, name, {"status": running}, namespace=namespace, patch_type=PatchType.MERGE)

    thread = Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def workload(plane: ControlPlane, name: str, node_name: str) -> None:
    """One pod of a ReplicaSet, on that node only, and nothing else has a place for it."""
    labels = {"app": name}
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": node_name},
        # Not of everything: that would go past the cordon, too.
        "tolerations": [{"key": OTHERS["key"], "operator": "Exists"}],
        "containers": [{"name": "c", "image": "example.net/pause:1"}],
    }
    plane.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }
    )
    until(lambda: pods(plane, name, node_name), f"the pod of {name} runs")


def pods(plane: ControlPlane, name: str, node_name: str) -> list[str]:
    """The UIDs of its pods that run on the node."""
    found = plane.get("pods", f"--selector=app={name}")["items"]
    return [
        pod["metadata"]["uid"]
        for pod in found
        if pod["spec"].get("nodeName") == node_name and pod["status"]["phase"] == "Running"
    ]


def forbid(plane: ControlPlane, name: str) -> None:
    """A budget that lets no pod of the workload go; in force once its controller has counted them."""
    plane.apply(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}},
        }
    )
    until(lambda: plane.get("pdb", name).get("status", {}).get("currentHealthy") == 1, "the budget counts its pod")


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """pyinfra's fake hosts, which say that the change worked; that of m3 says that it did not."""
    file = tmp_path / "fleet.py"
    instantly = {"fake_delay": 0, "fake_delay_jitter": 0}
    hosts: list[tuple[str, dict[str, Any]]] = [
        (f"@fake/{name}", {"node_name": name, **instantly}) for name in ("m1", "m2")
    ]
    broken = {"fake_responses": {"trackbed apply": {"success": False, "stderr": "vfs: deferred"}}}
    hosts.append(("@fake/m3", {"node_name": "m3", **instantly, **broken}))
    file.write_text(f"hosts = {hosts!r}\n")
    return file


@pytest.fixture
def nodes(plane: ControlPlane, no_nodes: None) -> Iterator[None]:
    made = ("m1", "m2", "m3")
    for name in made:
        make_node(plane, name)
    with kubelets(plane, *made):
        yield
        plane.kubectl("delete", "replicasets,poddisruptionbudgets", "--all")
        until(lambda: not plane.get("pods")["items"], "the pods are gone")


def cordoned(plane: ControlPlane, name: str) -> tuple[bool, bool]:
    """Whether the Node is, and whether a maintenance is written down."""
    found = node(plane, name)
    notes = found["metadata"].get("annotations", {})
    return bool(found["spec"].get("unschedulable")), names.MAINTENANCE in notes


@pytest.mark.usefixtures("nodes")
def test_a_node_is_drained_changed_and_brought_back(plane: ControlPlane, inventory: Path) -> None:
    workload(plane, "job", "m1")
    (before,) = pods(plane, "job", "m1")
    done = fleet(plane, "maintain", "m1", "--inventory", str(inventory))
    assert done.code == 0, done
    said = [line.partition(": ")[2].partition(" default/")[0] for line in done.out.splitlines()]
    assert said == [
        "cordoned", "evicting", "changing what its spec wants, up to vf-reset", "ready", "uncordoned",
    ]  # fmt: skip
    assert cordoned(plane, "m1") == (False, False)
    until(lambda: pods(plane, "job", "m1") not in ([], [before]), "another pod takes its place")


@pytest.mark.usefixtures("nodes")
def test_a_budget_that_forbids_it_is_respected_and_the_node_given_back(plane: ControlPlane, inventory: Path) -> None:
    workload(plane, "job", "m1")
    forbid(plane, "job")
    before = pods(plane, "job", "m1")
    words = ("maintain", "m1", "m2", "--inventory", str(inventory), "--drain-timeout", "3", "--json")
    done = fleet(plane, *words)
    assert done.code == 1
    assert done.document["nodes"]["m1"]["result"] == "undone"
    assert "The disruption budget job needs 1 healthy pods" in done.document["nodes"]["m1"]["reason"]
    assert done.document["nodes"]["m2"]["result"] == "not started"
    assert pods(plane, "job", "m1") == before
    assert cordoned(plane, "m1") == (False, False)


@pytest.mark.usefixtures("nodes")
def test_a_change_that_fails_leaves_the_node_cordoned_until_it_is_undone(plane: ControlPlane, inventory: Path) -> None:
    words = ("maintain", "m3", "--inventory", str(inventory))
    done = fleet(plane, *words)
    assert done.code == 1
    assert "m3: failed: trackbed apply on the node failed, and it stays cordoned: vfs: deferred" in done.err
    assert cordoned(plane, "m3") == (True, True)
    refused = fleet(plane, *words)
    assert refused.code == 1
    assert "admin began to maintain m3 at" in refused.err
    assert fleet(plane, *words, "--undo").code == 0
    assert cordoned(plane, "m3") == (False, False)


@pytest.mark.usefixtures("nodes")
def test_a_node_that_somebody_had_cordoned_stays_so(plane: ControlPlane, inventory: Path) -> None:
    plane.kubectl("cordon", "m1")
    assert fleet(plane, "maintain", "m1", "--inventory", str(inventory)).code == 0
    assert cordoned(plane, "m1") == (True, False)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_drain_is_resumed_or_undone(plane: ControlPlane, inventory: Path, how: signal.Signals) -> None:
    workload(plane, "job", "m1")
    forbid(plane, "job")
    words = ("maintain", "m1", "--inventory", str(inventory))
    running = start(plane.admin, *words)
    until(lambda: cordoned(plane, "m1") == (True, True), "the node is cordoned")
    running.send_signal(how)
    stopped = ended(running)
    if how == signal.SIGINT:
        assert stopped.code == 130
        assert cordoned(plane, "m1") == (False, False)
        return
    assert cordoned(plane, "m1") == (True, True)
    plane.kubectl("delete", "pdb", "job")
    assert fleet(plane, *words, "--resume").code == 0
    assert cordoned(plane, "m1") == (False, False)


def test_every_fault_is_named_before_a_node_is_touched(plane: ControlPlane, inventory: Path) -> None:
    make_node(plane, "m1")
    plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "bare"}})
    done = fleet(plane, "maintain", "m1", "nobody", "bare", "--inventory", str(inventory))
    assert done.code == 1
    assert "nobody is the Node of no host in" in done.err
    assert "the cluster has no Node nobody" in done.err
    assert "bare does not say TrackbedReady; deploy it first" in done.err
    assert cordoned(plane, "m1") == (False, False)
