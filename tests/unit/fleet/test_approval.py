"""Which requests for a reporter's certificate are approved; each way to ask for more rights has a test."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from lightkube.models.certificates_v1 import (
    CertificateSigningRequestCondition,
    CertificateSigningRequestSpec,
    CertificateSigningRequestStatus,
)
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.certificates_v1 import CertificateSigningRequest

from agent.report import names
from agent.reporter.kubernetes.identity import make_request
from fleet.approval import SIGNER, YEAR, KnownNodes, Verdict, verdicts
from fleet.certificate_request import differences
from tests.unit.fleet.made_up_requests import CN, Maker, der

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
A = f"{names.NODE_USER}a"
ENROLMENT = names.ENROLMENT
SAN = x509.SubjectAlternativeName.oid
KNOWN = KnownNodes(expected={"new"}, enrolled={"a"}, joined={"a"})

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def pem(
    *attributes: tuple[x509.ObjectIdentifier, str], key: PrivateKey = KEY, extensions: Sequence[x509.ExtensionType] = ()
) -> bytes:
    builder = x509.CertificateSigningRequestBuilder(x509.Name([x509.NameAttribute(*given) for given in attributes]))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def asked(text: bytes, requester: str = A, name: str = "r", **different: Any) -> CertificateSigningRequest:
    spec: dict[str, Any] = {
        "request": base64.b64encode(text).decode(),
        "signerName": SIGNER,
        "usages": ["client auth"],
        "expirationSeconds": YEAR,
        "username": requester,
        "groups": ["system:authenticated"],
    }
    return CertificateSigningRequest(
        metadata=ObjectMeta(name=name), spec=CertificateSigningRequestSpec(**{**spec, **different})
    )


def common_name(name: str, **options: Any) -> bytes:
    return pem((NameOID.COMMON_NAME, name), **options)


def only(request: CertificateSigningRequest, known: KnownNodes = KNOWN) -> Verdict:
    (verdict,) = verdicts([request], known)
    return verdict


def test_a_node_may_renew_its_own_certificate() -> None:
    verdict = only(asked(common_name(A)))
    assert (verdict.action, verdict.node, verdict.reason) == ("approve", "a", "renewal")


@pytest.mark.parametrize("usages", [["client auth"], ["digital signature", "client auth"]])
def test_a_new_node_that_is_expected_is_enrolled(usages: list[str]) -> None:
    assert only(asked(common_name(f"{names.NODE_USER}new"), ENROLMENT, usages=usages)).reason == "enrolment"


DENIED: dict[str, tuple[CertificateSigningRequest, str]] = {
    "another node's name": (asked(common_name(f"{names.NODE_USER}b")), f"{A} may not ask for {names.NODE_USER}b"),
    "a name of the cluster's own": (asked(common_name("system:node:a")), "the subject is CN=system:node:a"),
    "an administrator's group": (
        asked(pem((NameOID.ORGANIZATION_NAME, "system:masters"), (NameOID.COMMON_NAME, A))),
        "the subject is CN=trackbed:node:a,O=system:masters",
    ),
    "two names": (asked(pem((NameOID.COMMON_NAME, A), (NameOID.COMMON_NAME, "system:admin"))), "the subject is"),
    "no name": (asked(pem()), "the subject is empty"),
    "what is no node's name": (asked(common_name(f"{names.NODE_USER}a:b"), f"{names.NODE_USER}a:b"), "is not a Node's"),
    "no node's name at all": (asked(common_name(names.NODE_USER), names.NODE_USER), "'' is not a Node's name"),
    "a name with a line break": (asked(common_name(f"{A}\n"), f"{A}\n"), "is not a Node's name"),
    "a DNS name": (
        asked(common_name(A, extensions=[x509.SubjectAlternativeName([x509.DNSName("kubernetes.default")])])),
        "it asks for extensions (subjectAltName)",
    ),
    "to be an authority": (
        asked(common_name(A, extensions=[x509.BasicConstraints(ca=True, path_length=None)])),
        "it asks for extensions (basicConstraints)",
    ),
    "another signer": (
        asked(common_name(A), signerName="kubernetes.io/kubelet-serving"),
        "the signer is kubernetes.io/k",
    ),
    "a server's usage": (
        asked(common_name(A), usages=["digital signature", "client auth", "server auth"]),
        "the usages are digital signature, client auth, server auth",
    ),
    "no usage": (asked(common_name(A), usages=None), "the usages are none"),
    "more than a year": (asked(common_name(A), expirationSeconds=YEAR + 1), "more than a year"),
    "no expiry": (asked(common_name(A), expirationSeconds=None), "it names no expiry"),
    "a weak key": (
        asked(common_name(A, key=rsa.generate_private_key(65537, 1024))),  # noqa: S505  # the weak one
        "its key is too weak",
    ),
    "no request": (asked(b"not PEM"), "the request cannot be read"),
    # GeneralName's ediPartyName, which no library reads.
    "a name of a kind that nobody knows": (
        asked(common_name(A, extensions=[x509.UnrecognizedExtension(SAN, b"\x30\x02\xa5\x00")])),
        "the request cannot be read",
    ),
    "a node's name, by somebody": (asked(common_name(A), requester="mallory"), f"mallory may not ask for {A}"),
    "an administrator's name, by the enrolment": (
        asked(common_name("kubernetes-admin"), requester=ENROLMENT),
        "the subject is CN=kubernetes-admin",
    ),
}


@pytest.mark.parametrize("what", DENIED)
def test_a_request_with_wrong_content_is_denied(what: str) -> None:
    request, reason = DENIED[what]
    verdict = only(request, KnownNodes(expected={"a", "b", "new"}, joined={"a", "b"}))
    assert verdict.action == "deny"
    assert reason in verdict.reason


ANYBODY = common_name("system:kube-controller-manager", key=OTHER_KEY)
OURS = common_name(A)
NOT_OURS_ALONE: dict[str, bytes] = {
    # Go's PEM decoder skips a block that does not begin a line; Python's accepts it.
    "a block that only Python reads": b"x " + OURS + ANYBODY,
    "a block that only Go reads": b"-----BEGIN X-----\n" + ANYBODY + OURS,
    "two blocks": OURS + ANYBODY,
    "the same block twice": OURS + OURS,
    "text before it": b"x\n" + OURS,
    "text after it": OURS + b"x\n",
    "a line before it": b"\n" + OURS,
    "a line after it": OURS + b"\n",
    "no last line end": OURS.removesuffix(b"\n"),
    "line ends of Windows": OURS.replace(b"\n", b"\r\n"),
    "another label": OURS.replace(b"CERTIFICATE", b"NEW CERTIFICATE"),
    "headers": OURS.replace(b"REQUEST-----\n", b"REQUEST-----\nProc-Type: 4\n\n", 1),
    "one long line": OURS[:36] + OURS[36:-34].replace(b"\n", b"") + OURS[-34:],
    "a mark of the byte order": b"\xef\xbb\xbf" + OURS,
}


@pytest.mark.parametrize("what", NOT_OURS_ALONE)
def test_a_request_that_two_parsers_read_differently_is_denied(what: str) -> None:
    assert only(asked(NOT_OURS_ALONE[what])).action == "deny"


@pytest.mark.parametrize("tag", [0x13, 0x16, 0x14])
def test_a_name_in_another_type_of_string_is_denied(tag: int) -> None:
    maker = Maker(random.Random(1))  # noqa: S311  no secret
    name = der(0x30, der(0x31, der(0x30, bytes.fromhex(CN), der(tag, A.encode()))))
    content = der(0x30, der(0x02, b"\0"), name, maker.key(KEY), der(0xA0))
    signed = der(0x03, b"\0", KEY.sign(content, ec.ECDSA(hashes.SHA256())))
    whole = x509.load_der_x509_csr(der(0x30, content, bytes.fromhex("300a06082a8648ce3d040302"), signed))
    assert only(asked(whole.public_bytes(serialization.Encoding.PEM))).action == "deny"


def test_what_a_nodes_openssl_writes_is_approved(tmp_path: Path) -> None:
    key, request = tmp_path / "key", tmp_path / "csr"
    make_request("a", key, request)
    assert only(asked(request.read_bytes())).action == "approve"


def test_a_request_with_anothers_signature_is_denied() -> None:
    one, other = (x509.load_pem_x509_csr(common_name(A, key=key)) for key in (KEY, OTHER_KEY))
    der = one.public_bytes(serialization.Encoding.DER)
    # The length of an ECDSA signature varies; only equal ones can be swapped in place.
    while len(other.signature) != len(one.signature):
        other = x509.load_pem_x509_csr(common_name(A, key=OTHER_KEY))
    forged = der.replace(one.signature, other.signature)
    text = (
        b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.encodebytes(forged) + b"-----END CERTIFICATE REQUEST-----\n"
    )
    verdict = only(asked(text))
    assert (verdict.action, verdict.reason) == ("deny", "its signature is not by its own key")


@pytest.mark.parametrize(
    ("node", "known", "reason"),
    [
        ("b", KNOWN, "b is not named as a new node; if it is one: trackbed fleet approve b"),
        (
            "a",
            KnownNodes(expected={"a"}, enrolled={"a"}),
            "a has been enrolled already; if it was installed anew: trackbed fleet approve --again a",
        ),
    ],
)
def test_an_enrolment_that_nobody_expects_is_left_to_the_operator(node: str, known: KnownNodes, reason: str) -> None:
    verdict = only(asked(common_name(f"{names.NODE_USER}{node}"), ENROLMENT), known)
    assert (verdict.action, verdict.reason) == ("leave", reason)


def test_a_reinstalled_node_is_enrolled_again_if_it_is_named() -> None:
    known = KnownNodes(enrolled={"a"}, again={"a"})
    verdict = only(asked(common_name(A), ENROLMENT), known)
    assert (verdict.action, verdict.reason) == ("approve", "enrolment, again")


def test_a_node_that_is_gone_does_not_renew() -> None:
    verdict = only(asked(common_name(A)), KnownNodes(enrolled={"a"}))
    reason = "there is no Node a (any more); if it is yours, name it: trackbed fleet approve a"
    assert (verdict.action, verdict.reason) == ("leave", reason)


def test_two_keys_for_one_new_node_are_left_to_the_operator() -> None:
    new = f"{names.NODE_USER}new"
    requests = [asked(common_name(new, key=key), ENROLMENT, name=str(key)) for key in (KEY, OTHER_KEY)]
    judged = verdicts(requests, KNOWN)
    assert [verdict.action for verdict in judged] == ["leave", "leave"]
    delete = "delete the wrong ones: kubectl delete csr NAME"
    assert {verdict.reason for verdict in judged} == {f"several requests with different keys claim to be new; {delete}"}
    same = [asked(common_name(new), ENROLMENT, name=name) for name in ("1", "2")]
    assert [verdict.action for verdict in verdicts(same, KNOWN)] == ["approve", "approve"]


def test_others_requests_are_left_alone() -> None:
    kubelet = pem((NameOID.ORGANIZATION_NAME, "system:nodes"), (NameOID.COMMON_NAME, "system:node:a"))
    signer = "kubernetes.io/kube-apiserver-client-kubelet"
    assert verdicts([asked(kubelet, "system:bootstrap:abc", signerName=signer)], KNOWN) == []


def test_a_certificate_of_another_signer_may_have_a_name_like_a_reporters() -> None:
    assert verdicts([asked(common_name(A), "somebody", signerName="example.com/signer")], KNOWN) == []


@pytest.mark.parametrize("decision", ["Approved", "Denied", "Failed"])
def test_a_request_that_was_decided_is_left_alone(decision: str) -> None:
    request = asked(common_name(A))
    decided = CertificateSigningRequestCondition(status="True", type=decision)
    request.status = CertificateSigningRequestStatus(conditions=[decided])
    assert verdicts([request], KNOWN) == []


def test_a_request_of_which_not_all_can_be_read_is_denied_and_the_others_are_judged() -> None:
    requests = [asked(common_name(A), name="r1"), asked(common_name(A), name="r2")]
    denied, approved = verdicts(requests, KNOWN, {"r1": "its time is in the year 0"})
    reason = "it cannot be read: its time is in the year 0"
    assert denied == Verdict("r1", A, "a", "deny", reason)
    assert approved == Verdict("r2", A, "a", "approve", "renewal")


@pytest.mark.parametrize("requester", ["", None])
def test_every_fault_of_a_request_is_named(requester: str | None) -> None:
    given: dict[str, Any] = {"usages": ["server auth"], "expirationSeconds": None, "username": requester}
    verdict = only(asked(common_name(A), **given))
    reasons = [
        "the usages are server auth, not client auth",
        "it names no expiry",
        f"nobody may not ask for {A}",
    ]
    assert verdict == Verdict("r", "", "a", "deny", "; ".join(reasons))


def test_a_request_that_names_nobody_is_denied() -> None:
    verdict = only(asked(pem()))
    assert verdict.action == "deny"
    assert verdict.reason.endswith(f"{A} may not ask for no name")


def test_a_certificate_is_valid_for_a_year_at_most() -> None:
    assert only(asked(common_name(A), expirationSeconds=YEAR)).action == "approve"
    verdict = only(asked(common_name(A), expirationSeconds=YEAR + 1))
    reason = "it would be valid for 31536001 s, more than a year (31536000 s)"
    assert (verdict.action, verdict.reason) == ("deny", reason)


@pytest.mark.parametrize("keys", [1, 9], ids=["one-key", "many-keys"])
def test_a_node_that_floods_the_cluster_with_requests_gets_no_certificate_and_others_do(keys: int) -> None:
    made = [ec.generate_private_key(ec.SECP256R1()) for _ in range(keys)]
    flood = [asked(common_name(A, key=made[number % keys]), name=f"flood-{number}") for number in range(9)]
    other = asked(common_name(f"{names.NODE_USER}b"), f"{names.NODE_USER}b", "other")
    known = evolve(KNOWN, joined={"a", "b"})
    by_request = {one.request: one for one in verdicts([*flood, other], known)}
    assert {one.action for name, one in by_request.items() if name != "other"} == {"leave"}
    assert "a has 9 pending requests, and at most 8 are approved" in by_request["flood-0"].reason
    assert by_request["other"].action == "approve"
    assert {one.action for one in verdicts(flood[:8], known)} == {"approve"}


def test_too_many_requests_with_an_enrolment_token_get_no_certificate() -> None:
    new = common_name(f"{names.NODE_USER}new")
    flood = [asked(new, ENROLMENT, name=f"flood-{number}") for number in range(9)]
    judged = verdicts(flood, KNOWN)
    assert {(one.action, one.reason.partition(",")[0]) for one in judged} == {("leave", "new has 9 pending requests")}
    assert {one.action for one in verdicts(flood[:8], KNOWN)} == {"approve"}


def test_a_request_that_the_library_warns_of_prints_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    country = x509.NameAttribute(NameOID.COUNTRY_NAME, "XYZ", _validate=False)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, A), country])
    text = x509.CertificateSigningRequestBuilder(subject).sign(KEY, hashes.SHA256())
    recwarn.clear()
    assert only(asked(text.public_bytes(serialization.Encoding.PEM))).action == "deny"
    assert not recwarn.list


DAY = timedelta(days=1)
SIGNER_KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(
    request: bytes, life: timedelta, *extensions: x509.ExtensionType, key: ec.EllipticCurvePublicKey | None = None
) -> str:
    """What a signer returns, in the API's form."""
    wanted = x509.load_pem_x509_csr(request)
    public = key or wanted.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster")])
    made = x509.CertificateBuilder(issuer, wanted.subject, public, 1, start, start + life)
    for extension in extensions or (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]),):
        made = made.add_extension(extension, critical=False)
    return base64.b64encode(made.sign(SIGNER_KEY, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)).decode()


def test_a_certificate_is_valid_for_no_longer_than_was_requested() -> None:
    request = base64.b64encode(OURS).decode()
    month = 30 * DAY
    # Kube-controller-manager dates it back by five minutes. A signer may give a shorter one.
    for life in (month, month + timedelta(minutes=5), DAY):
        assert differences(certificate(OURS, life), request, month.total_seconds()) == []
    for life in (month + DAY, 3650 * DAY):
        (said,) = differences(certificate(OURS, life), request, month.total_seconds())
        assert said == f"it is valid for {life.total_seconds():.0f} s, and 2592000 s were requested"


def test_a_certificate_of_another_request_is_named() -> None:
    request = base64.b64encode(OURS).decode()
    other = certificate(OURS, DAY, key=OTHER_KEY.public_key())
    assert differences(other, request, YEAR) == ["it has another key"]
    assert differences(certificate(ANYBODY, DAY), request, YEAR) == [
        "it has another key",
        "the subject is CN=system:kube-controller-manager, not CN=trackbed:node:a",
    ]
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
    authority = x509.BasicConstraints(ca=True, path_length=None)
    assert differences(certificate(OURS, DAY, both, authority), request, YEAR) == [
        "its usage is not that of a client alone",
        "it is an authority's",
    ]
