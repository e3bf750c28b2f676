"""Which requests for a reporter's certificate are approved: pure.

A certificate of this signer is a client's identity for the whole cluster, and cannot be taken back before it expires. So what
is approved is exactly what a reporter needs, and everything else that claims to be one is denied. What only an operator can
know (whether a node is to be enrolled) is left for them, with the reason.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Literal

from attrs import evolve, frozen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import NameOID
from lightkube.models.certificates_v1 import CertificateSigningRequestCondition
from lightkube.resources.certificates_v1 import CertificateSigningRequest

from agent.report import names
from fleet.objects import name_of

SIGNER = "kubernetes.io/kube-apiserver-client"
USAGES = frozenset({"client auth"})
OPTIONAL_USAGES = frozenset({"digital signature"})
YEAR = 365 * 86400
"""Seconds for which a certificate may hold at most."""

# A Node's name: a DNS subdomain (RFC 1123).
_NODE_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

# What cryptography raises of a request that somebody has made up; no base class has them all.
_UNREADABLE = (
    *(ValueError, TypeError, binascii.Error, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)

Action = Literal["approve", "deny", "leave"]


@frozen
class Verdict:
    """What becomes of one request, and why. ``request`` is its name, ``node`` the Node that it claims to be."""

    request: str
    requester: str
    node: str
    action: Action
    reason: str


@frozen
class Known:
    """What is known of nodes. ``expected``: may be enrolled; ``enrolled``: have been; ``joined``: have a Node.

    ``again``: may be enrolled though they have been, because they were installed anew.
    """

    expected: Collection[str] = ()
    enrolled: Collection[str] = ()
    joined: Collection[str] = ()
    again: Collection[str] = ()


@frozen
class _Asked:
    """What the PKCS #10 request in a CSR says; ``faults`` are what a reporter would not ask for."""

    common_name: str
    key: str
    faults: tuple[str, ...]


def verdicts(requests: Iterable[CertificateSigningRequest], known: Known) -> list[Verdict]:
    """The verdict on each pending request that comes from a reporter, or claims to."""
    found = []
    keys: dict[str, set[str]] = defaultdict(set)
    for request in requests:
        if _is_pending(request) and _is_ours(request):
            asked = _read(request)
            found.append(_judge(request, asked, known))
            if found[-1].action == "approve" and found[-1].requester != asked.common_name:
                keys[found[-1].node].add(asked.key)
    return [_unless_ambiguous(verdict, keys) for verdict in found]


def _unless_ambiguous(verdict: Verdict, keys: dict[str, set[str]]) -> Verdict:
    """Two who claim to be one new node cannot be told apart from here."""
    if verdict.action != "approve" or len(keys.get(verdict.node, ())) < 2:
        return verdict
    reason = f"several requests with different keys claim to be {verdict.node}; delete the wrong ones: kubectl delete csr NAME"
    return evolve(verdict, action="leave", reason=reason)


def _is_pending(request: CertificateSigningRequest) -> bool:
    return not any(condition.type in ("Approved", "Denied", "Failed") for condition in _conditions(request))


def _conditions(request: CertificateSigningRequest) -> list[CertificateSigningRequestCondition]:
    return list((request.status.conditions if request.status else None) or [])


def _is_ours(request: CertificateSigningRequest) -> bool:
    return (
        _is_reporter(request)
        or _is_enrolment(request)
        or (request.spec.signerName == SIGNER and _read(request).common_name.startswith("trackbed:"))
    )


def _is_reporter(request: CertificateSigningRequest) -> bool:
    return (request.spec.username or "").startswith(names.NODE_USER)


def _is_enrolment(request: CertificateSigningRequest) -> bool:
    return request.spec.username == names.ENROLMENT


def _judge(request: CertificateSigningRequest, asked: _Asked, known: Known) -> Verdict:
    requester = request.spec.username or ""
    node = asked.common_name.removeprefix(names.NODE_USER)
    faults = [*_faults(request), *asked.faults]
    if requester not in (asked.common_name, names.ENROLMENT):
        faults.append(f"{requester or 'nobody'} may not ask for {asked.common_name or 'no name'}")
    if faults:
        return Verdict(name_of(request), requester, node, "deny", "; ".join(faults))
    action, reason = _renewal(node, known) if requester == asked.common_name else _enrolment(node, known)
    return Verdict(name_of(request), requester, node, action, reason)


def _renewal(node: str, known: Known) -> tuple[Action, str]:
    if node in known.joined or node in known.expected:
        return "approve", "renewal"
    return "leave", f"there is no Node {node} (any more); if it is yours, name it: trackbed fleet approve {node}"


def _enrolment(node: str, known: Known) -> tuple[Action, str]:
    if node in known.again:
        return "approve", "enrolment, again"
    if node in known.enrolled:
        again = f"trackbed fleet approve --again {node}"
        return "leave", f"{node} has been enrolled already; if it was installed anew: {again}"
    if node not in known.expected:
        return "leave", f"nobody has named {node} as a new node; if it is one: trackbed fleet approve {node}"
    return "approve", "enrolment"


def _faults(request: CertificateSigningRequest) -> list[str]:
    """What is wrong around the PKCS #10 request."""
    faults = []
    spec = request.spec
    if spec.signerName != SIGNER:
        faults.append(f"the signer is {spec.signerName}, not {SIGNER}")
    if set(spec.usages or ()) - OPTIONAL_USAGES != USAGES:
        faults.append(f"the usages are {', '.join(spec.usages or ()) or 'none'}, not {', '.join(USAGES)}")
    if spec.expirationSeconds is None:
        faults.append("it names no expiry")
    elif spec.expirationSeconds > YEAR:
        faults.append(f"it would hold for {spec.expirationSeconds} s, more than a year ({YEAR} s)")
    return faults


def _read(request: CertificateSigningRequest) -> _Asked:
    try:
        pem = base64.b64decode(request.spec.request, validate=True)
        asked = x509.load_pem_x509_csr(pem)
        key = asked.public_key()
        valid = asked.is_signature_valid
        subject = [(attribute.oid, str(attribute.value)) for attribute in asked.subject]
        extensions = [extension.oid._name for extension in asked.extensions]
    except _UNREADABLE as error:
        return _Asked("", "", (f"the request cannot be read: {error}",))
    given = [value for oid, value in subject if oid == NameOID.COMMON_NAME]
    name = given[0] if len(given) == 1 else ""
    faults = [] if valid else ["its signature is not by its own key"]
    if len(subject) != 1 or not name.startswith(names.NODE_USER):
        faults.append(f"the subject is {asked.subject.rfc4514_string() or 'empty'}, not CN={names.NODE_USER}NAME alone")
    elif not _NODE_NAME.fullmatch(name.removeprefix(names.NODE_USER)):
        faults.append(f"{name.removeprefix(names.NODE_USER)!r} is no Node's name")
    if extensions:
        faults.append(f"it asks for extensions ({', '.join(extensions)}); a reporter's has none")
    if not _is_strong(key):
        faults.append("its key is too weak; it takes RSA of 2048 bits, EC of 256 bits or Ed25519")
    return _Asked(name, _fingerprint(key), tuple(faults))


def _is_strong(key: object) -> bool:
    if isinstance(key, rsa.RSAPublicKey | ec.EllipticCurvePublicKey):
        return key.key_size >= (2048 if isinstance(key, rsa.RSAPublicKey) else 256)
    return isinstance(key, ed25519.Ed25519PublicKey)


def _fingerprint(key: CertificatePublicKeyTypes) -> str:
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()
