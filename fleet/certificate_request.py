"""Pure functions: the only form of a certificate request that is approved, and the certificate that must result from it.

Trackbed judges a request with Python's parser, and the cluster signs it with Go's. They may read the same bytes
differently: Go's PEM decoder skips blocks that Python's accepts, and the other way round. So a parsed request is not
trusted. It is encoded again from its name, key and signature, in the only form that a reporter writes, and both must be
equal byte for byte.
"""

from __future__ import annotations

import base64
import binascii
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LONGEST = 4096
"""Characters of a request in base64; a reporter's has fewer than 1,300. Longer ones are not parsed."""

BACKDATED = 3600
"""Seconds that a certificate may be valid beyond the requested lifetime: a signer dates it back, since clocks differ
(kube-controller-manager: by 5 minutes)."""

# What cryptography raises for made-up input. Its errors have no common base class.
_UNREADABLE = (
    *(ValueError, TypeError, binascii.Error, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)

_SEQUENCE, _BIT_STRING, _INTEGER, _ATTRIBUTES = 0x30, 0x03, 0x02, 0xA0
"""Tags of ASN.1; the attributes of a request are tagged [0]."""

_ECDSA_WITH_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")
"""The signature's AlgorithmIdentifier, in DER (RFC 5758)."""


@frozen
class Asked:
    """The content of a request. ``key``: its public key, in DER. ``faults``: how it differs from a reporter's request.

    ``common_name``: empty if the subject has anything else. ``claims``: every common name in the subject.
    """

    common_name: str = ""
    claims: tuple[str, ...] = ()
    key: bytes = b""
    faults: tuple[str, ...] = ()


def read(text: str) -> Asked:
    """Parse a request in the API's form: PEM in base64."""
    if len(text) > LONGEST:
        return Asked(faults=(f"the request is too large: {len(text)} characters, and at most {LONGEST} are read",))
    try:
        with _without_warnings():
            return _asked(text)
    except _UNREADABLE as error:
        return Asked(faults=(f"the request cannot be read: {error}",))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the library's warnings, which it would print. The faults of the input are reported in any case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _asked(text: str) -> Asked:
    asked = x509.load_pem_x509_csr(base64.b64decode(text, validate=True))
    faults = _faults(asked)
    name = _common_name(asked.subject)
    if not faults and text != base64.b64encode(written(name, asked)).decode():
        faults = ["it does not have a reporter's form: one PEM block in DER, and nothing else"]
    return Asked(name, _common_names(asked.subject), _public(asked), tuple(faults))


def _faults(asked: x509.CertificateSigningRequest) -> list[str]:
    """The known ways in which a request differs from a reporter's."""
    key = asked.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        return ["its key is too weak, or of another kind than a reporter's: EC on the curve P-256"]
    faults = [] if asked.is_signature_valid else ["its signature is not by its own key"]
    if not _common_name(asked.subject):
        faults.append(f"the subject is {asked.subject.rfc4514_string() or 'empty'}, not one common name alone")
    if extensions := [extension.oid._name for extension in asked.extensions]:
        faults.append(f"it asks for extensions ({', '.join(extensions)}); a reporter's has none")
    return faults


def _common_name(subject: x509.Name) -> str:
    """The subject's common name; empty if the subject has anything else."""
    common_names = _common_names(subject)
    return common_names[0] if len(common_names) == 1 and len(list(subject)) == 1 else ""


def _common_names(subject: x509.Name) -> tuple[str, ...]:
    given = (attribute.value for attribute in subject if attribute.oid == NameOID.COMMON_NAME)
    return tuple(value for value in given if isinstance(value, str))


def _public(asked: x509.CertificateSigningRequest | x509.Certificate) -> bytes:
    return asked.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def written(name: str, asked: x509.CertificateSigningRequest) -> bytes:
    """The request that a reporter would write for this common name, with the key and the signature of ``asked``."""
    signature = utils.encode_dss_signature(*utils.decode_dss_signature(asked.signature))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name, _validate=False)]).public_bytes()
    content = _der(_SEQUENCE, _der(_INTEGER, b"\0"), subject, _public(asked), _der(_ATTRIBUTES))
    der = _der(_SEQUENCE, content, _ECDSA_WITH_SHA256, _der(_BIT_STRING, b"\0", signature))
    text = base64.b64encode(der).decode()
    body = "".join(f"{text[start : start + 64]}\n" for start in range(0, len(text), 64))
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n".encode()


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    if len(content) < 0x80:
        return bytes([tag, len(content)]) + content
    length = len(content).to_bytes((len(content).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def differences(certificate: str, request: str, seconds: float) -> list[str]:
    """How a certificate differs from its request; both are PEM in base64, as in the API.

    Certificates of intermediate authorities may follow the certificate.

    :param seconds: the requested lifetime.
    """
    try:
        with _without_warnings():
            given, *_ = x509.load_pem_x509_certificates(base64.b64decode(certificate, validate=True))
            return _differences(given, read(request), seconds)
    except _UNREADABLE as error:
        return [f"it cannot be read: {error}"]


def _differences(given: x509.Certificate, asked: Asked, seconds: float) -> list[str]:
    reasons = []
    if _public(given) != asked.key:
        reasons.append("it has another key")
    if _common_name(given.subject) != asked.common_name or not asked.common_name:
        reasons.append(f"the subject is {given.subject.rfc4514_string() or 'empty'}, not CN={asked.common_name}")
    extensions = {each.oid: each.value for each in given.extensions}
    if x509.SubjectAlternativeName.oid in extensions:
        reasons.append("it has alternative names")
    usage = extensions.get(x509.ExtendedKeyUsage.oid)
    if not isinstance(usage, x509.ExtendedKeyUsage) or list(usage) != [ExtendedKeyUsageOID.CLIENT_AUTH]:
        reasons.append("its usage is not that of a client alone")
    constraints = extensions.get(x509.BasicConstraints.oid)
    if isinstance(constraints, x509.BasicConstraints) and constraints.ca:
        reasons.append("it is an authority's")
    life = (given.not_valid_after_utc - given.not_valid_before_utc).total_seconds()
    if life > seconds + BACKDATED:
        reasons.append(f"it is valid for {life:.0f} s, and {seconds:.0f} s were requested")
    return reasons
