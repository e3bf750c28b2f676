"""The cluster's certificates and kubeconfig files, signed by an authority of its own. Only their owner can read the keys."""

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent.runtime import write_atomically

LIFE = datetime.timedelta(days=365)
# After a restored snapshot a node's clock may be behind.
LEEWAY = datetime.timedelta(days=1)


@attrs.frozen
class Pair:
    """A certificate and its private key, as files in PEM."""

    certificate: Path
    key: Path


@attrs.frozen
class Authority:
    """Signs the cluster's certificates; its files are in ``folder``."""

    folder: Path

    @property
    def pair(self) -> Pair:
        """The authority's own certificate, signed by itself."""
        return self._pair("ca")

    @property
    def service_accounts(self) -> Pair:
        """The key that signs tokens of service accounts; ``certificate`` is only its public key."""
        return Pair(self.folder / "service-accounts.pub", self.folder / "service-accounts.key")

    def create(self) -> None:
        """Make both keys if they are missing."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.pair.certificate.exists():
            key = _new_key(self.pair.key)
            name = _name("trackbed-lab", ())
            builder = _certificate(name, name, key).add_extension(x509.BasicConstraints(True, None), critical=True)
            builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            usage = _usage(sign_certificates=True)
            self.pair.certificate.write_bytes(
                _pem(builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()))
            )
        if not self.service_accounts.certificate.exists():
            public = _new_key(self.service_accounts.key).public_key()
            self.service_accounts.certificate.write_bytes(
                public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            )

    def client(self, user: str, groups: Sequence[str] = (), life: datetime.timedelta = LIFE) -> Pair:
        """A client's certificate. Kubernetes takes its common name as the user and its organisations as the groups."""
        pair = self._pair("client-" + user.replace(":", "-").replace("/", "-"))
        self._issue(pair, _name(user, groups), ExtendedKeyUsageOID.CLIENT_AUTH, (), life)
        return pair

    def server(self, name: str, alternatives: Sequence[str]) -> Pair:
        """A server's certificate for these names and addresses."""
        pair = self._pair(f"server-{name}")
        self._issue(pair, _name(name, ()), ExtendedKeyUsageOID.SERVER_AUTH, alternatives, LIFE)
        return pair

    def _issue(
        self,
        pair: Pair,
        name: x509.Name,
        use: x509.ObjectIdentifier,
        alternatives: Sequence[str],
        life: datetime.timedelta,
    ) -> None:
        issuer = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        issuer_key = serialization.load_pem_private_key(self.pair.key.read_bytes(), None)
        assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)  # noqa: S101 - what create() made
        key = _new_key(pair.key)
        builder = (
            _certificate(name, issuer.subject, key, life)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(_usage(), critical=True)
            # Python 3.13 asks for it.
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        if alternatives:
            names = x509.SubjectAlternativeName([_general(alternative) for alternative in alternatives])
            builder = builder.add_extension(names, critical=False)
        pair.certificate.write_bytes(_pem(builder.sign(issuer_key, hashes.SHA256())))

    def _pair(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")


def write_kubeconfig(file: Path, server: str, authority: Path, user: dict[str, str]) -> Path:
    """Write a kubeconfig that contains its certificates and key. Only its owner can read it."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "lab", "cluster": {"server": server, "certificate-authority-data": inline(authority)}},
        ],
        "users": [{"name": "lab", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
        "current-context": "lab",
    }
    write_atomically(file, json.dumps(document, indent=2) + "\n")
    return file


def inline(file: Path) -> str:
    """A file's content in base64, as kubeconfig files contain it."""
    return base64.b64encode(file.read_bytes()).decode()


def _new_key(file: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    # SEC1: the API server reads keys of service accounts in this form only.
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    write_atomically(file, pem.decode())
    return key


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: datetime.timedelta = LIFE
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LEEWAY)
        .not_valid_after(now + life)
    )


def _name(common: str, organisations: Sequence[str]) -> x509.Name:
    return x509.Name(
        [
            *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation) for organisation in organisations),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, sign_certificates: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
