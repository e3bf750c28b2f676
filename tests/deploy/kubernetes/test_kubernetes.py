from __future__ import annotations

import base64
import datetime
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pyinfra.api.exceptions import DeployError

from agent.report import published
from agent.report.published import Published
from agent.reporter.kubernetes.api import Refused
from agent.reporter.settings import read_settings
from agent.spec.node import from_mapping
from tasks import kubernetes
from tasks.common.commands import script
from tasks.kubernetes import AUTHORITY, SECRET, SETTINGS, UNIT
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, OwnConnector
from tests.deploy.packages.test_packages import install
from tests.unit.reporter.scripted import api_server

SPEC = from_mapping({"node_name": "node-a"}, "node-a")
CREDENTIALS = "checkend"
HAS_OPENSSL = {**DEBIAN, "dpkg -l": ["ii  openssl  3.0-1  amd64  something"]}
TEXTS = 'echo "file $path"'
RESTART = "systemctl try-restart"


def certificate(start: datetime.datetime) -> bytes:
    """One that signs itself, good for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cluster")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, start, start + datetime.timedelta(days=1))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pki") / "ca.pem"
    file.write_bytes(certificate(datetime.datetime.now(datetime.timezone.utc)))
    return file


@pytest.fixture
def key(authority: Path) -> dict[str, Any]:
    return {
        "server": "https://10.0.0.1:6443",
        "ca_file": str(authority),
        "required_resources": ["rdma/hca_shared_devices_b"],
        "kubeconfig": "/nowhere/kubeconfig",
    }


def configure() -> None:
    kubernetes.configure(spec=SPEC)


def texts(key: dict[str, Any], node: Node, tmp_path: Path) -> Answers:
    """What the fact of both files answers once they are there."""
    bound = key.get("identity") == "token"
    credentials = ["certificate yes", f"secret {token(time.time(), time.time() + 3600, bound)}"]
    first = evolve(node, data={"kubernetes": key}).deploy(configure, {**HAS_OPENSSL, CREDENTIALS: credentials})
    lines = []
    for path in (SETTINGS, AUTHORITY):
        (upload,) = [text for name, text in first.uploads.items() if name.endswith(f"{Path(path).name}.new")]
        (tmp_path / Path(path).name).write_bytes(upload)
        lines += [f"file {path}", *(f":{line}" for line in upload.decode().splitlines())]
    return {TEXTS: lines}


def token(start: float, end: float, bound: bool = False) -> str:
    """The part of a token that a node shows. With a ``bound`` token the reporter publishes, else it requests a certificate."""
    account: dict[str, Any] = {"serviceaccount": {"name": "reporter" if bound else "enrolment"}}
    node = {"node": {"name": "node-a", "uid": "u1"}} if bound else {}
    claims = {"iat": start, "exp": end, "kubernetes.io": {**account, **node}}
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")


def test_settings_are_what_the_reporter_reads(node: Node, key: dict[str, Any], tmp_path: Path) -> None:
    texts({**key, "taint_lifted_by": "node-readiness-controller"}, node, tmp_path)
    settings = read_settings(tmp_path / "reporter.json")
    assert (settings.node_name, settings.server, settings.ca_file) == ("node-a", "https://10.0.0.1:6443", AUTHORITY)
    assert settings.required_resources == ("rdma/hca_shared_devices_b",)
    assert settings.taint_lifted_by == "node-readiness-controller"


FRESH, BOUND = (f"secret {token(time.time(), time.time() + 3600, bound)}" for bound in (False, True))
REFUSED = "refused yes"


@pytest.mark.parametrize(
    ("identity", "credentials"),
    [
        ("certificate", ["certificate yes", "secret "]),
        ("certificate", ["certificate yes", "secret ", REFUSED]),
        ("certificate", [FRESH]),
        ("token", [BOUND]),
    ],
)
def test_a_node_with_valid_credentials_gets_nothing(
    node: Node, key: dict[str, Any], identity: str, credentials: list[str], tmp_path: Path
) -> None:
    key = {**key, "identity": identity}
    answers = {**HAS_OPENSSL, **texts(key, node, tmp_path), CREDENTIALS: credentials}
    result = evolve(node, data={"kubernetes": key}).deploy(configure, answers)
    assert result.flat == []
    assert not any(result.planned.values())


def test_an_authority_without_a_final_line_end_is_no_other_authority(
    node: Node, key: dict[str, Any], authority: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.pem").write_text(authority.read_text().rstrip("\n"))
    key = {**key, "ca_file": str(tmp_path / "own.pem")}
    answers = {**HAS_OPENSSL, **texts(key, node, tmp_path), CREDENTIALS: ["certificate yes", "secret "]}
    assert evolve(node, data={"kubernetes": key}).deploy(configure, answers).flat == []


@pytest.mark.parametrize(
    ("identity", "credentials"),
    [
        ("certificate", ["secret "]),
        ("certificate", ["certificate yes"]),
        ("token", [f"secret {token(time.time() - 900, time.time() + 300, bound=True)}"]),
        ("token", ["secret not-a-token"]),
        # The Node or the account was deleted and created again.
        ("token", [BOUND, REFUSED]),
        ("certificate", [FRESH, REFUSED]),
        # The inventory says otherwise now: the one is not good for the other.
        ("token", [FRESH]),
        ("certificate", [BOUND]),
    ],
)
def test_expired_credentials_are_replaced_and_kept_if_that_fails(
    node: Node, key: dict[str, Any], identity: str, credentials: list[str], tmp_path: Path
) -> None:
    key = {**key, "identity": identity}
    answers = {**HAS_OPENSSL, **texts(key, node, tmp_path), CREDENTIALS: credentials}
    result = evolve(node, data={"kubernetes": key}).deploy(configure, answers)
    assert result.failed
    assert "kubernetes.kubeconfig: no token for node-a: the kubeconfig /nowhere/kubeconfig is not found" in "".join(
        result.log
    )
    assert result.inputs == [] and not any(RESTART in command for command in result.flat)


@pytest.mark.parametrize("identity", ["certificate", "token"])
def test_a_node_that_deploys_itself_gets_no_token(
    node: Node, key: dict[str, Any], identity: str, tmp_path: Path
) -> None:
    key = {**key, "identity": identity}
    answers = {**HAS_OPENSSL, **texts(key, node, tmp_path), CREDENTIALS: ["secret "]}
    result = evolve(node, data={"kubernetes": key}, connector=OwnConnector).deploy(configure, answers)
    assert result.failed
    assert "kubernetes: no token for node-a: only a control host can get one; deploy the node from its" in str(
        result.log
    )
    assert result.inputs == []


def test_a_node_that_deploys_itself_keeps_the_authority_that_its_control_host_has_brought(
    node: Node, key: dict[str, Any], tmp_path: Path
) -> None:
    has = {**HAS_OPENSSL, **texts(key, node, tmp_path), CREDENTIALS: ["certificate yes", "secret "]}
    itself = evolve(node, data={"kubernetes": {**key, "ca_file": "~/absent/ca.pem"}}, connector=OwnConnector)
    result = itself.deploy(configure, has)
    assert not result.failed
    assert result.flat == []
    with pytest.raises(
        DeployError, match=r"ca_file: the node has neither .* nor /etc/trackbed/cluster-ca\.pem; deploy the"
    ):
        itself.deploy(configure, HAS_OPENSSL)


@pytest.mark.parametrize("path", [SETTINGS, AUTHORITY])
def test_credentials_of_another_cluster_or_name_are_removed(
    node: Node, key: dict[str, Any], path: str, tmp_path: Path
) -> None:
    other = {SETTINGS: ("node-a", "node-b"), AUTHORITY: ("BEGIN CERTIFICATE", "BEGIN OTHER CERTIFICATE")}[path]
    lines = [line.replace(*other) for line in texts(key, node, tmp_path)[TEXTS]]
    answers = {**HAS_OPENSSL, TEXTS: lines, CREDENTIALS: ["certificate yes", FRESH]}
    result = evolve(node, data={"kubernetes": key}).deploy(configure, answers)
    assert str(script('rm -f "$1"/reporter.pem "$1"/requested.*', kubernetes.STATE_FOLDER)) in result.flat
    assert "no token for node-a" in "".join(result.log)


def test_a_certificate_stays_while_a_cluster_changes_its_authority(
    node: Node, key: dict[str, Any], authority: Path, tmp_path: Path
) -> None:
    """The file has both authorities then (kubernetes.io, Manual Rotation of CA Certificates). After that only the next one."""
    following = certificate(datetime.datetime.now(datetime.timezone.utc)).decode()
    both = {**key, "ca_file": str(tmp_path / "both.pem")}
    (tmp_path / "both.pem").write_text(authority.read_text() + following)
    (tmp_path / "next.pem").write_text(following)
    forget = str(script('rm -f "$1"/reporter.pem "$1"/requested.*', kubernetes.STATE_FOLDER))
    steps = [(key, both, False), (both, {**both, "ca_file": str(tmp_path / "next.pem")}, True)]
    for before, after, forgets in steps:
        (tmp_path / "now").mkdir(exist_ok=True)
        answers = {**HAS_OPENSSL, **texts(before, node, tmp_path / "now"), CREDENTIALS: ["certificate yes", FRESH]}
        result = evolve(node, data={"kubernetes": after}).deploy(configure, answers)
        assert (forget in result.flat, result.failed) == (forgets, forgets)
        assert any(name.endswith("cluster-ca.pem.new") for name in result.uploads) is not forgets


def test_the_deploy_says_what_to_do_with_a_valid_certificate_that_is_refused(
    node: Node, key: dict[str, Any], tmp_path: Path
) -> None:
    answers = {**HAS_OPENSSL, **texts(key, node, tmp_path), CREDENTIALS: ["certificate yes", "secret ", REFUSED]}
    result = evolve(node, data={"kubernetes": key}).deploy(configure, answers)
    said = "the API server refuses the valid certificate of node-a: if it is of another cluster"
    assert [said in line for line in result.log].count(True) == 1
    assert f"remove {kubernetes.STATE_FOLDER}/reporter.pem on the node, and deploy again" in "".join(result.log)


@pytest.mark.parametrize("credentials", [["certificate yes"], ["request trackbed-node-a-1", "csr eA=="]])
def test_without_the_key_no_certificate_stays_for_a_later_cluster(node: Node, credentials: list[str]) -> None:
    """Another cluster refuses it, and it is valid by its date, so the node would never get another one."""
    result = node.deploy(configure, {**HAS_OPENSSL, CREDENTIALS: credentials})
    assert result.flat == [str(script('rm -f "$1"/reporter.pem "$1"/requested.*', kubernetes.STATE_FOLDER))]


KUBECONFIG = """
clusters: [{{name: c, cluster: {{server: "{url}", certificate-authority: {authority}}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
"""


@pytest.mark.parametrize(
    ("days", "given", "warned"), [(365, 1, True), (365, 365, False), (1, 1, False), (2, 365, False)]
)
def test_the_deploy_says_when_a_cluster_shortens_the_life_of_tokens(
    node: Node, key: dict[str, Any], tmp_path: Path, days: int, given: int, warned: bool
) -> None:
    """On EKS a token is valid for a day, whatever is asked for. A day after the deploy all nodes would be silent."""
    now = time.time()
    made = f"e30.{token(now, now + given * 86400, bound=True)}.signature"

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if method == "POST":
            assert body["spec"]["expirationSeconds"] == days * 86400
            return 201, {"metadata": {}, "spec": body["spec"], "status": {"token": made}}
        return 200, {"metadata": {"name": "node-a", "uid": "u1"}}

    with api_server(tmp_path, answer) as (url, authority):
        (tmp_path / "kubeconfig").write_text(KUBECONFIG.format(url=url, authority=authority))
        key = {**key, "identity": "token", "days": days, "kubeconfig": str(tmp_path / "kubeconfig")}
        result = evolve(node, data={"kubernetes": key}).deploy(configure, HAS_OPENSSL)
    assert not result.failed
    assert result.inputs == [made]
    said = "kubernetes.days: node-a got a token for 24 h instead of 365 d"
    assert (said in "".join(result.log)) is warned
    assert ("at least every 8 h" in "".join(result.log)) is warned
    assert "signature" not in "".join(result.log)


def test_a_node_without_a_node_object_is_told_in_which_cluster(node: Node, key: dict[str, Any], tmp_path: Path) -> None:
    """In an inventory of several clusters the kubeconfig may be that of another one."""
    with api_server(tmp_path, lambda method, path, body: (404, {"code": 404, "message": "no"})) as (url, authority):
        (tmp_path / "kubeconfig").write_text(KUBECONFIG.format(url=url, authority=authority))
        key = {**key, "identity": "token", "kubeconfig": str(tmp_path / "kubeconfig")}
        result = evolve(node, data={"kubernetes": key}).deploy(configure, HAS_OPENSSL)
    assert not result.failed
    assert f"node-a has not joined the cluster of {url}: the next deploy brings its token" in "".join(result.log)


def test_a_secret_is_in_no_argument(node: Node) -> None:
    command = kubernetes._keep_secret("s3cret", "")
    assert "s3cret" not in str(command)
    assert command.connector_arguments["_stdin"] == "s3cret"


def test_without_the_key_nothing_stays(node: Node, key: dict[str, Any], tmp_path: Path) -> None:
    answers = {**HAS_OPENSSL, **texts(key, node, tmp_path), CREDENTIALS: ["secret "]}
    assert node.deploy(configure, answers).flat == [str(script('rm -rf "$1" "$2" "$3"', SETTINGS, AUTHORITY, SECRET))]
    assert node.deploy(configure, HAS_OPENSSL).flat == []


def test_refused_credentials_are_recognised_by_the_reporters_error(tmp_path: Path) -> None:
    for error, refused in ((str(Refused(401, "Unauthorized")), True), (str(Refused(403, "forbidden")), False)):
        published.write(tmp_path / "published.json", Published(error=error))
        done = subprocess.run(
            ["sh", "-ec", kubernetes._CREDENTIALS, "sh", "/nowhere", "/nowhere", tmp_path / "published.json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert (REFUSED in done.stdout.splitlines()) is refused


def test_a_renewal_is_approved_too_and_where_it_cannot_be_the_deploy_goes_on(node: Node, key: dict[str, Any]) -> None:
    renews = ["certificate yes", "secret ", "request trackbed-node-a-2", "csr eA=="]
    result = evolve(node, data={"kubernetes": key}).deploy(
        lambda: kubernetes.enrol(spec=SPEC), {**HAS_OPENSSL, CREDENTIALS: renews}
    )
    assert not result.failed
    assert "trackbed-node-a-2 cannot be approved" in "".join(result.log)
    by_itself = evolve(node, data={"kubernetes": key}, connector=OwnConnector).deploy(
        lambda: kubernetes.enrol(spec=SPEC), {**HAS_OPENSSL, CREDENTIALS: renews}
    )
    assert not by_itself.failed
    assert "cannot be approved: only a control host can do that; deploy the node" in "".join(by_itself.log)
    # The deploy does not wait for a request that it did not approve.
    assert str(script(kubernetes._WAIT_FOR_CERTIFICATE, kubernetes.STATE_FOLDER, UNIT)) not in result.flat


@pytest.mark.parametrize("waiting", [kubernetes._WAIT_FOR_REQUEST, kubernetes._WAIT_FOR_CERTIFICATE])
def test_an_expired_certificate_counts_as_none(waiting: str, authority: Path, tmp_path: Path) -> None:
    # Two turns that take no time.
    (tmp_path / "bin").mkdir()
    for name in ("sleep", "systemctl"):
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    text = waiting.replace("seq 60", "seq 2")
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    old = certificate(datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc))
    for pem, code in ((old, 1), (authority.read_bytes(), 0)):
        (tmp_path / "reporter.pem").write_bytes(pem)
        command = ["sh", "-ec", text, "sh", str(tmp_path), UNIT]
        assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == code


def test_only_a_node_without_a_certificate_is_enrolled(node: Node, key: dict[str, Any]) -> None:
    def enrol() -> None:
        kubernetes.enrol(spec=SPEC)

    enrols = evolve(node, data={"kubernetes": key})
    assert enrols.deploy(enrol, {**HAS_OPENSSL, CREDENTIALS: ["certificate yes"]}).flat == []
    asked = ["secret ", "request trackbed-node-a-1", "csr eA=="]
    result = enrols.deploy(enrol, {**HAS_OPENSSL, CREDENTIALS: asked})
    assert result.failed and "trackbed-node-a-1 cannot be approved" in "".join(result.log)
    for other in ({"approved_by": "operator"}, {"identity": "token"}):
        assert evolve(node, data={"kubernetes": {**key, **other}}).deploy(enrol, DEBIAN).flat == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"server": "http://10.0.0.1:6443"}, "is not an API server's URL"),
        ({"server": "10.0.0.1"}, "is not an API server's URL"),
        ({"days": 366}, "days: 366 is not valid; give 1 to 365"),
        ({"required_resources": ["cpu"]}, "'cpu' is not an extended resource"),
        ({"identity": "kubeconfig"}, "is not one of certificate, token"),
        ({"ca_file": "~no-such-user/ca.pem"}, "~no-such-user/ca.pem'; give the cluster's authority"),
        ({"ca_file": "/nowhere/ca.pem"}, "give the cluster's authority, a PEM file"),
        ({"servers": "x"}, "did you mean 'server'"),
    ],
)
def test_bad_data_stops_the_run(node: Node, key: dict[str, Any], change: dict[str, Any], why: str) -> None:
    with pytest.raises(DeployError, match=why):
        evolve(node, data={"kubernetes": {**key, **change}}).deploy(configure, DEBIAN)


def test_openssl_is_there_before_a_certificate_is_asked_for(node: Node, key: dict[str, Any]) -> None:
    result = evolve(node, data={"kubernetes": key}).deploy(configure, {**DEBIAN, CREDENTIALS: ["certificate yes"]})
    assert install("openssl") in result.flat


def test_no_repository_is_asked_for_an_openssl_that_is_there(node: Node, key: dict[str, Any]) -> None:
    there = {**ROCKY_9, "rpm --queryformat": ["openssl 3.0.7-1"], CREDENTIALS: ["certificate yes"]}
    result = evolve(node, data={"kubernetes": key}).deploy(configure, there)
    assert not any("dnf" in command for command in result.ran)


def test_a_name_that_fits_into_no_certificate_is_refused(node: Node, key: dict[str, Any]) -> None:
    """OpenSSL accepts common names of at most 64 characters, and 14 of these are trackbed:node:."""

    def deploy(length: int, **change: str) -> None:
        spec = evolve(SPEC, node_name="a" * length)
        wanted = evolve(node, data={"kubernetes": {**key, **change}})
        wanted.deploy(lambda: kubernetes.configure(spec=spec), {**HAS_OPENSSL, CREDENTIALS: [BOUND]})

    deploy(51, identity="token")
    with pytest.raises(DeployError, match="has 51 characters, and at most 50 fit into a certificate; give identity"):
        deploy(51)


@pytest.mark.parametrize("kind", ["link", "pipe", "endless"])
def test_root_follows_no_link_of_the_reporter(tmp_path: Path, kind: str) -> None:
    """A reporter that was taken over owns its folder: root must neither show another file there nor wait for ever."""
    (tmp_path / "precious").write_text("root's")
    (tmp_path / "requested.name").write_text("csr-1")
    for name in ("requested.csr", "reporter.pem", "published.json"):
        file = tmp_path / name
        match kind:
            case "link":
                file.symlink_to(tmp_path / "precious")
            case "pipe":
                os.mkfifo(file)
            case _:
                file.symlink_to("/dev/zero")
    done = subprocess.run(
        ["sh", "-ec", kubernetes._CREDENTIALS, "sh", "/nowhere", tmp_path, tmp_path / "published.json"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "request csr-1\ncsr \n"
