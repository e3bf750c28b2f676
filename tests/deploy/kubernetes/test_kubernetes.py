import datetime
import os
import runpy
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from agent.reporter.settings import Quarantine, read_settings
from agent.spec.node import from_mapping
from tasks import kubernetes
from tasks.common.commands import script
from tasks.common.texts import Texts
from tasks.kubernetes import AUTHORITY, SECRET, SETTINGS
from tests.deploy.conftest import DEBIAN, Answers, Node, OwnConnector, of
from tests.unit.reporter.scripted import Answer, api_server, token_of

ROOT = Path(__file__).parents[3]
SPEC = from_mapping({"node_name": "node-a"}, "node-a")
CREDENTIALS = 'echo "brought'
TEXTS = of(Texts)
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
    first = evolve(node, data={"kubernetes": key}).deploy(configure, {**DEBIAN, CREDENTIALS: [GOOD]})
    lines = []
    for path in (SETTINGS, AUTHORITY):
        (upload,) = [text for name, text in first.uploads.items() if name.endswith(f"{Path(path).name}.new")]
        (tmp_path / Path(path).name).write_bytes(upload)
        lines += [f"file {path}", *(f":{line}" for line in upload.decode().splitlines())]
    return {TEXTS: lines}


def part(start: float, end: float, name: str = "node-a", uid: str = "u1") -> str:
    """The part of a token that a node shows. Without a uid it is an enrolment token of an earlier version."""
    return token_of(name, uid, start, end - start).split(".")[1]


NOW = time.time()
GOOD = f"brought {part(NOW, NOW + 3600)}"
ENDED = part(NOW - 7200, NOW - 3600)
ENROLMENT = f"brought {part(NOW, NOW + 3600, uid='')}"
REFUSED = 'published {"error": "", "refused": true}'


def test_settings_are_what_the_reporter_reads(node: Node, key: dict[str, Any], tmp_path: Path) -> None:
    more = {"taint_lifted_by": "node-readiness-controller", "quarantine": {"evict_after": 600}}
    texts({**key, **more}, node, tmp_path)
    settings = read_settings(tmp_path / "reporter.json")
    assert (settings.node_name, settings.server, settings.ca_file) == ("node-a", "https://10.0.0.1:6443", AUTHORITY)
    assert settings.required_resources == ("rdma/hca_shared_devices_b",)
    assert settings.taint_lifted_by == "node-readiness-controller"
    assert settings.quarantine == Quarantine("NoSchedule", 600)


@pytest.mark.parametrize(
    "credentials",
    [
        [GOOD],
        # The reporter has renewed it.
        [f"brought {ENDED}", "kept yes", f"renewed {part(NOW - 60, NOW + 3600)}"],
        # It will soon.
        [f"brought {part(NOW - 36000, NOW + 3600)}"],
    ],
)
def test_a_node_with_a_valid_token_gets_nothing(
    node: Node, key: dict[str, Any], credentials: list[str], tmp_path: Path
) -> None:
    answers = {**DEBIAN, **texts(key, node, tmp_path), CREDENTIALS: credentials}
    assert evolve(node, data={"kubernetes": key}).deploy(configure, answers).did_nothing


def test_an_authority_without_a_final_line_end_is_no_other_authority(
    node: Node, key: dict[str, Any], authority: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.pem").write_text(authority.read_text().rstrip("\n"))
    key = {**key, "ca_file": str(tmp_path / "own.pem")}
    answers = {**DEBIAN, **texts(key, node, tmp_path), CREDENTIALS: [GOOD]}
    assert evolve(node, data={"kubernetes": key}).deploy(configure, answers).flat == []


@pytest.mark.parametrize(
    "credentials",
    [
        [],
        ["brought "],
        ["brought not-a-token"],
        [f"brought {ENDED}"],
        [f"brought {ENDED}", "kept yes", f"renewed {ENDED}"],
        # The Node or the account was deleted and created again.
        [GOOD, REFUSED],
        # The node had another name.
        [f"brought {part(NOW, NOW + 3600, name='node-b')}"],
        # It has a certificate, or waits for one, from an earlier version.
        [ENROLMENT, "kept yes"],
        ["kept yes"],
    ],
)
def test_a_node_without_a_valid_token_asks_for_one_and_keeps_what_it_has_if_that_fails(
    node: Node, key: dict[str, Any], credentials: list[str], tmp_path: Path
) -> None:
    answers = {**DEBIAN, **texts(key, node, tmp_path), CREDENTIALS: credentials}
    result = evolve(node, data={"kubernetes": key}).deploy(configure, answers)
    assert result.failed
    assert "the kubeconfig /nowhere/kubeconfig is" in "".join(result.log)
    assert result.inputs == [] and not any(RESTART in command for command in result.flat)


def test_a_node_that_deploys_itself_gets_no_token(node: Node, key: dict[str, Any], tmp_path: Path) -> None:
    answers = {**DEBIAN, **texts(key, node, tmp_path), CREDENTIALS: ["brought "]}
    result = evolve(node, data={"kubernetes": key}, connector=OwnConnector).deploy(configure, answers)
    assert result.failed
    assert "only a control host can get one" in "".join(result.log)
    assert result.inputs == []


def test_a_node_that_deploys_itself_keeps_the_authority_that_its_control_host_has_brought(
    node: Node, key: dict[str, Any], tmp_path: Path
) -> None:
    has = {**DEBIAN, **texts(key, node, tmp_path), CREDENTIALS: [GOOD]}
    itself = evolve(node, data={"kubernetes": {**key, "ca_file": "~/absent/ca.pem"}}, connector=OwnConnector)
    result = itself.deploy(configure, has)
    assert not result.failed
    assert result.flat == []
    with pytest.raises(DeployError, match=r"ca_file: the node has neither .* nor /etc/trackbed/cluster-ca\.pem"):
        itself.deploy(configure, DEBIAN)


def test_a_token_stays_while_a_cluster_changes_its_authority_and_goes_with_another_cluster(
    node: Node, key: dict[str, Any], authority: Path, tmp_path: Path
) -> None:
    """The file has both authorities then (kubernetes.io, Manual Rotation of CA Certificates). After that only the next one."""
    following = certificate(datetime.datetime.now(datetime.timezone.utc)).decode()
    both = {**key, "ca_file": str(tmp_path / "both.pem")}
    (tmp_path / "both.pem").write_text(authority.read_text() + following)
    (tmp_path / "next.pem").write_text(following)
    steps = [(key, both, False), (both, {**both, "ca_file": str(tmp_path / "next.pem")}, True)]
    for before, after, asks in steps:
        (tmp_path / "now").mkdir(exist_ok=True)
        answers = {**DEBIAN, **texts(before, node, tmp_path / "now"), CREDENTIALS: [GOOD]}
        result = evolve(node, data={"kubernetes": after}).deploy(configure, answers)
        assert ("no token for node-a" in "".join(result.log), result.failed) == (asks, asks)
        assert any(name.endswith("cluster-ca.pem.new") for name in result.uploads) is not asks
        # The reporter reads it once.
        assert any("try-restart" in command for command in result.flat) is not asks


OPERATORS = "s3cret-of-the-operator"
KUBECONFIG = """
clusters: [{{name: c, cluster: {{server: "{url}", certificate-authority: {authority}}}}}]
users: [{{name: u, user: {{token: {token}}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
"""


@contextmanager
def cluster_at(folder: Path, answer: Answer) -> Iterator[dict[str, Any]]:
    """The inventory's key `kubernetes`, with a kubeconfig for an API server that gives these answers."""
    with api_server(folder, answer) as (url, authority):
        (folder / "kubeconfig").write_text(KUBECONFIG.format(url=url, authority=authority, token=OPERATORS))
        yield {"server": url, "ca_file": str(authority), "kubeconfig": str(folder / "kubeconfig")}


@pytest.mark.parametrize("credentials", [[], [ENROLMENT, "kept yes"], [GOOD, REFUSED]])
def test_the_deploy_brings_a_token_that_is_bound_to_the_node(
    node: Node, tmp_path: Path, credentials: list[str]
) -> None:
    made = token_of("node-a", issued=NOW)
    bound = {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "u1"}

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if method == "POST":
            asked = {name: value for name, value in body["spec"].items() if value is not None}
            assert asked == {"boundObjectRef": bound, "expirationSeconds": 7 * 86400}
            return 201, {"metadata": {}, "spec": body["spec"], "status": {"token": made}}
        return 200, {"metadata": {"name": "node-a", "uid": "u1"}}

    with cluster_at(tmp_path, answer) as key:
        given = {"kubernetes": {**key, "days": 7}}
        result = evolve(node, data=given).deploy(configure, {**DEBIAN, CREDENTIALS: credentials})
    assert not result.failed
    assert result.inputs == [made]
    assert "signature" not in "".join([*result.log, *result.flat])


def test_what_the_reporter_has_kept_goes_when_another_token_comes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    for name in ("token", "reporter.pem", "requested.key", "published.json"):
        (state / name).write_text("x")
    words = shlex.split(str(script(kubernetes._KEEP, kubernetes.SECRET, kubernetes.STATE_FOLDER, kubernetes.UNIT)))
    own = {kubernetes.SECRET: str(tmp_path / "etc" / "secret"), kubernetes.STATE_FOLDER: str(state)}
    subprocess.run([own.get(word, word) for word in words], input="new", text=True, check=True)
    assert [file.name for file in state.iterdir()] == ["published.json"]
    secret = tmp_path / "etc" / "secret"
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("new", 0o600)


def test_a_node_that_is_shut_out_gets_no_token_and_fails_alone(node: Node, tmp_path: Path) -> None:
    denied = 'serviceaccounts "reporter" is forbidden: node-a is shut out (stolen)'

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if method == "POST":
            return 403, {"kind": "Status", "code": 403, "message": denied}
        return 200, {"metadata": {"name": "node-a", "uid": "u2"}}

    with cluster_at(tmp_path, answer) as key:
        result = evolve(node, data={"kubernetes": key}).deploy(configure, {**DEBIAN, CREDENTIALS: [GOOD, REFUSED]})
    assert result.failed and result.inputs == []
    assert denied in "".join(result.log)


def test_a_node_without_a_node_object_is_told_in_which_cluster(node: Node, tmp_path: Path) -> None:
    """In an inventory of several clusters the kubeconfig may be that of another one. The Node may have the short name."""
    with cluster_at(tmp_path, lambda method, path, body: (404, {"code": 404, "message": "no"})) as key:
        result = evolve(node, data={"kubernetes": {**key, "server": "https://10.0.0.1:6443"}}).deploy(configure, DEBIAN)
    assert not result.failed
    said = "".join(result.log)
    assert f"node-a has not joined the cluster of {key['server']}: once it has, run" in said
    assert "if it has, correct node_name (kubectl get nodes)" in said


def test_the_token_alone_can_be_brought_after_the_join(node: Node, key: dict[str, Any]) -> None:
    joined = evolve(node, data={"kubernetes": key, "node_name": "node-a"})
    result = joined.deploy(lambda: runpy.run_path(str(ROOT / "deploys" / "token.py")), {**DEBIAN, CREDENTIALS: [GOOD]})
    assert list(result.planned) == ["Kubernetes | Settings and token"]
    assert not result.failed


def test_without_the_key_nothing_stays(node: Node, key: dict[str, Any], tmp_path: Path) -> None:
    answers = {**DEBIAN, **texts(key, node, tmp_path), CREDENTIALS: ["brought "]}
    files, secret = node.deploy(configure, answers).flat
    assert files.endswith(f" sh remove {SETTINGS} remove {AUTHORITY} --")
    assert secret == f"rm -f {SECRET}"
    (kept,) = node.deploy(configure, {**DEBIAN, CREDENTIALS: ["kept yes"]}).flat
    assert kept == str(script('rm -f "$1"/token "$1"/reporter.pem "$1"/requested.*', kubernetes.STATE_FOLDER))
    assert node.deploy(configure, DEBIAN).flat == []


@pytest.mark.parametrize("said", [True, False, None])
def test_refused_credentials_are_recognised_by_themselves(tmp_path: Path, said: bool | None) -> None:
    if said is not None:
        error = "the API server answers 401: this is only a sentence"
        published.write(tmp_path / "published.json", Published(error=error, refused=said))
    done = subprocess.run(
        ["sh", "-ec", kubernetes._CREDENTIALS, "sh", "/nowhere", "/nowhere", tmp_path / "published.json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert kubernetes.NodeCredentials().process(done.stdout.splitlines()).refused is (said is True)


@pytest.mark.parametrize("kind", ["link", "pipe", "endless"])
def test_root_follows_no_link_of_the_reporter(tmp_path: Path, kind: str) -> None:
    """A reporter that was taken over owns its folder: root must neither show another file there nor wait for ever."""
    (tmp_path / "precious").write_text("root's")
    for name in ("token", "published.json"):
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
    assert done.stdout == "kept yes\nrenewed \npublished \n"
