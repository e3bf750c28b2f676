"""How a reporter requests its certificate, also if an answer is lost."""

import base64
import datetime
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent.reporter.kubernetes.api import TROUBLE, Abandoned, NoCredentials, Refused
from agent.reporter.kubernetes.identity import AFTER_DENIAL, FIRST_CHECK, LAST_CHECK, REQUESTS, Certificate
from agent.reporter.settings import Settings
from tests.unit.reporter.scripted import api_server


@define
class Cluster:
    """An API server that keeps requests for certificates.

    ``losing``: so many answers of the next ones do not arrive. ``refusing``: with this status. ``deleting``: each one at once.
    """

    losing: int = 0
    refusing: int | None = None
    deleting: bool = False
    requests: dict[str, dict[str, Any]] = field(factory=dict)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]] | None:
        if method == "GET":
            request = self.requests.get(path.removeprefix(f"{REQUESTS}/"))
            return (404, {}) if request is None else (200, request)
        code = self._take(body)
        if self.losing:
            self.losing -= 1
            return None
        return code, {}

    def _take(self, body: dict[str, Any]) -> int:
        name = body["metadata"]["name"]
        if self.refusing is not None:
            return self.refusing
        if name in self.requests:
            return 409
        if not self.deleting:
            self.requests[name] = {**body, "status": {}}
        return 201


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def identity(cluster: Cluster, tmp_path: Path) -> Iterator[Certificate]:
    """A reporter's credentials before it has a certificate."""
    (tmp_path / "token").write_text("enrolment")
    with api_server(tmp_path, cluster.answer) as (url, authority):
        yield Certificate(Settings("a", url, str(authority)), tmp_path, tmp_path / "token")


def test_a_request_whose_answer_was_lost_is_not_created_twice(cluster: Cluster, identity: Certificate) -> None:
    cluster.losing = 2
    for _ in range(2):
        with pytest.raises(TROUBLE):
            identity.keep(0.0)
    identity.keep(0.0)
    ((name, made),) = cluster.requests.items()
    assert (identity.folder / "requested.name").read_text().strip() == name
    assert base64.b64decode(made["spec"]["request"]) == (identity.folder / "requested.csr").read_bytes()


def test_a_name_that_a_power_cut_has_emptied_is_written_again(cluster: Cluster, identity: Certificate) -> None:
    identity.keep(0.0)
    ((name, _),) = cluster.requests.items()
    (identity.folder / "requested.name").write_text("")
    identity.keep(0.0)
    assert list(cluster.requests) == [name]
    assert (identity.folder / "requested.name").read_text().strip() == name


def test_a_damaged_certificate_is_named_with_the_remedy(identity: Certificate) -> None:
    (identity.folder / "reporter.pem").write_text("")
    with pytest.raises(NoCredentials, match=r"reporter\.pem: .*; remove it, and another one is requested"):
        identity.keep(0.0)


@pytest.mark.parametrize("how", ["denied", "removed", "refused"])
def test_after_a_failed_request_another_one_has_another_key(cluster: Cluster, identity: Certificate, how: str) -> None:
    identity.keep(0.0)
    ((first, made),) = cluster.requests.items()
    if how == "denied":
        made["status"] = {"conditions": [{"type": "Denied", "message": "nobody knows it"}]}
        assert identity.keep(0.0) == AFTER_DENIAL
    elif how == "removed":
        cluster.requests.clear()
        assert identity.keep(0.0) == 0.0
    else:
        cluster.requests.clear()
        identity.keep(0.0)
        cluster.refusing = 422
        with pytest.raises(TROUBLE):
            identity.keep(0.0)
        cluster.refusing = None
    identity.keep(0.0)
    assert cluster.requests.keys() - {first}


def test_where_each_request_is_deleted_at_once_the_next_one_waits_longer(
    cluster: Cluster, identity: Certificate
) -> None:
    cluster.deleting = True
    assert [identity.keep(0.0) for _ in range(9)] == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, LAST_CHECK, LAST_CHECK]
    with pytest.raises(NoCredentials, match="was deleted at once"):
        identity.session()


def test_where_each_request_is_deleted_a_little_later_the_next_one_waits_longer(
    cluster: Cluster, identity: Certificate
) -> None:
    waits = []
    for _ in range(4):
        waits.append(identity.keep(0.0))
        cluster.requests.clear()
        assert identity.keep(0.0) == 0.0
    assert waits == [5.0, 10.0, 20.0, 40.0]


def test_a_request_that_hangs_is_given_up_when_another_thread_says_so(tmp_path: Path) -> None:
    hung, over = threading.Event(), threading.Event()

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        hung.set()
        over.wait(60.0)
        return 201, {}

    (tmp_path / "token").write_text("enrolment")
    with api_server(tmp_path, answer) as (url, authority), ThreadPoolExecutor() as threads:
        identity = Certificate(Settings("a", url, str(authority)), tmp_path, tmp_path / "token")
        kept = threads.submit(identity.keep, 0.0)
        assert hung.wait(60.0)
        identity.abandon()
        with pytest.raises(Abandoned):
            kept.result(60.0)
        over.set()


def test_after_an_answer_the_next_request_is_looked_at_soon(cluster: Cluster, identity: Certificate) -> None:
    request = asked(cluster, identity)
    assert identity.keep(0.0) == 10.0
    answered(cluster, identity, signed(request, CLIENT, key=SIGNERS_KEY.public_key()))
    assert identity.keep(0.0) == FIRST_CHECK


DAY = datetime.timedelta(days=1)
CLIENT = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
AUTHORITY = x509.BasicConstraints(ca=True, path_length=None)
NO_AUTHORITY = x509.BasicConstraints(ca=False, path_length=None)
NAMES = x509.SubjectAlternativeName([x509.DNSName("kubernetes.default")])
SERVER = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
SIGNERS_KEY = ec.generate_private_key(ec.SECP256R1())


def signed(
    request: bytes,
    *extensions: x509.ExtensionType,
    subject: x509.Name | None = None,
    key: ec.EllipticCurvePublicKey | None = None,
    life: datetime.timedelta = DAY,
) -> bytes:
    """The certificate that a cluster's signer issues for a request, or another one."""
    asked = x509.load_pem_x509_csr(request)
    now = datetime.datetime.now(datetime.timezone.utc)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster")])
    public = key or asked.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    made = x509.CertificateBuilder(issuer, subject or asked.subject, public, 1, now - life, now + life)
    for extension in extensions:
        made = made.add_extension(extension, critical=False)
    return made.sign(SIGNERS_KEY, hashes.SHA256()).public_bytes(Encoding.PEM)


def answered(cluster: Cluster, identity: Certificate, certificate: bytes) -> float:
    """Answer the request; the seconds that the reporter waits then."""
    ((_, made),) = cluster.requests.items()
    made["status"] = {"certificate": base64.b64encode(certificate).decode()}
    return identity.keep(0.0)


def asked(cluster: Cluster, identity: Certificate) -> bytes:
    """The request that the reporter created."""
    identity.keep(0.0)
    ((_, made),) = cluster.requests.items()
    return base64.b64decode(made["spec"]["request"])


def test_the_certificate_that_was_requested_is_installed(cluster: Cluster, identity: Certificate) -> None:
    request = asked(cluster, identity)
    between = signed(request, AUTHORITY)
    answered(cluster, identity, signed(request, CLIENT, NO_AUTHORITY) + between)
    assert isinstance(identity.session().tls, ssl.SSLContext)


def subject(*values: tuple[x509.ObjectIdentifier, str]) -> x509.Name:
    return x509.Name([x509.NameAttribute(*value) for value in values])


NODE = (NameOID.COMMON_NAME, "trackbed:node:a")
MASTERS = (NameOID.ORGANIZATION_NAME, "system:masters")
OTHERS: dict[str, dict[str, Any]] = {
    "another key": {"key": SIGNERS_KEY.public_key()},
    "another name": {"subject": subject((NameOID.COMMON_NAME, "trackbed:node:b"))},
    "a group": {"subject": subject(MASTERS, NODE)},
    "a group in one part": {"subject": x509.Name([x509.RelativeDistinguishedName(list(subject(MASTERS, NODE)))])},
    "two names": {"subject": subject(NODE, NODE)},
    "a longer life": {"life": 200 * DAY},
}
MORE: dict[str, tuple[x509.ExtensionType, ...]] = {
    "no usage": (),
    "a server's usage": (SERVER,),
    "alternative names": (CLIENT, NAMES),
    "an authority": (CLIENT, AUTHORITY),
}


@pytest.mark.parametrize("what", [*OTHERS, *MORE, "a text beside it", "another one before it", "no certificate"])
def test_a_certificate_that_was_not_requested_is_not_installed(
    cluster: Cluster, identity: Certificate, what: str
) -> None:
    request = asked(cluster, identity)
    good = signed(request, CLIENT)
    other = signed(request, *MORE.get(what, (CLIENT,)), **OTHERS.get(what, {}))
    beside = {
        "a text beside it": b"x " + good,
        "another one before it": signed(request, CLIENT, key=SIGNERS_KEY.public_key()) + good,
        "no certificate": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    }
    assert answered(cluster, identity, beside.get(what, other)) == AFTER_DENIAL
    with pytest.raises(NoCredentials, match="not what it asked for"):
        identity.session()
    assert not list(identity.folder.glob("*.pem.new"))


@pytest.mark.parametrize(
    "different",
    [
        {"status": None},
        {"status": []},
        {"status": {"certificate": 5}},
        {"status": {"certificate": "?"}},
        {"status": {"conditions": [{}]}},
        {"status": {"conditions": 5}},
        {"spec": None},
        {"spec": {}},
    ],
)
def test_an_answer_that_is_no_request_is_an_error_of_the_server(
    cluster: Cluster, identity: Certificate, different: dict[str, Any]
) -> None:
    asked(cluster, identity)
    ((name, made),) = cluster.requests.items()
    cluster.requests[name] = {**made, **different}
    with pytest.raises(Refused, match="not a certificate request"):
        identity.keep(0.0)
    cluster.requests[name] = made
    assert identity.keep(0.0) > 0
