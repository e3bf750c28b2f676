"""The reporter's credentials for the API server: a client certificate that it requests itself, or a token from the deploy.

The command openssl makes the key and the request: Python's standard library cannot, and the library cryptography needs another
wheel for each version of Python. The key never leaves the node.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import ssl
import subprocess
import time
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from attrs import define, field, frozen

from agent.documents import read
from agent.report.names import NODE_USER
from agent.reporter.kubernetes.api import Api, NoCredentials, Refused, Session, trust
from agent.reporter.settings import Settings
from agent.runtime import write_atomically

SIGNER = "kubernetes.io/kube-apiserver-client"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

DAY = 86400
RENEW_AT = 2 / 3
"""The share of its life after which a certificate is renewed."""

FIRST_CHECK = 5.0
LAST_CHECK = 600.0
"""Seconds between two checks whether a request was approved: the first wait, and the longest."""

AFTER_DENIAL = 3600.0
"""Seconds after which another request follows one that was denied."""

# Certificates as a cluster's signer writes them, and nothing else. In other data, two programs may find different certificates.
_CERTIFICATES = re.compile(rb"(-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+-----END CERTIFICATE-----\n)+")

BACKDATED = 3600
"""Seconds by which a certificate may be valid for longer than requested: a signer dates it back, since clocks differ."""

LONGEST_TOKEN = 64 << 10
"""Bytes of a token's file."""

LONGEST_CERTIFICATE = 64 << 10
"""Bytes of a certificate with those of the intermediate authorities."""


class Identity(Protocol):
    """The reporter's credentials."""

    def session(self) -> Session:
        """The credentials to use now.

        :raises NoCredentials: there are none yet.
        """

    def keep(self, now: float) -> float:
        """Renew the credentials if they are due. :returns: the seconds until they may be due again.

        Raises as :meth:`Api.ask` does.

        :param now: seconds since the epoch.
        """

    def abandon(self) -> None:
        """Give up the renewal under way in another thread, if there is one."""


@define
class Token:
    """A token in a file. The deploy renews it."""

    ca_file: Path
    file: Path
    _context: ssl.SSLContext | None = field(default=None, init=False)

    def session(self) -> Session:
        """The token that the file has now."""
        self._context = self._context or trust(self.ca_file)
        return Session(self._context, _token(self.file))

    def keep(self, now: float) -> float:
        """Do nothing: a node cannot renew its token."""
        return float("inf")

    def abandon(self) -> None:
        """Do nothing: there is no renewal."""


def _token(file: Path) -> str:
    try:
        token = read(file, LONGEST_TOKEN).strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise NoCredentials(f"{file.name}: {why}; the deploy delivers it") from None
    if not token:
        raise NoCredentials("the deploy has brought no token yet; once the node has joined, run it again")
    return token


@frozen
class Life:
    """The validity of a certificate, in seconds since the epoch."""

    start: float
    end: float

    def renewal(self) -> float:
        """When to request the next certificate."""
        return self.start + (self.end - self.start) * RENEW_AT


@define
class Certificate:
    """A certificate in ``folder``, to which only the reporter has access. The ``enrolment`` token requests the first one."""

    settings: Settings
    folder: Path
    enrolment: Path | None
    _wait: float = field(default=FIRST_CHECK, init=False)
    _loaded: tuple[Life, ssl.SSLContext] | None = field(default=None, init=False)
    _denied: str = field(default="", init=False)
    _api: Api | None = field(default=None, init=False)

    @property
    def _current(self) -> Path:
        return self.folder / "reporter.pem"

    @property
    def _key(self) -> Path:
        return self.folder / "requested.key"

    @property
    def _request(self) -> Path:
        return self.folder / "requested.csr"

    @property
    def _name(self) -> Path:
        return self.folder / "requested.name"

    def session(self) -> Session:
        """The present certificate."""
        loaded = self._read()
        if loaded is None or time.time() >= loaded[0].end:
            raise NoCredentials(self._why_none(loaded is not None))
        return Session(loaded[1])

    def _why_none(self, expired: bool) -> str:
        what = "this node's certificate has expired" if expired else "this node has no certificate yet"
        if name := self._requested():
            return f"{what}; its request {name} waits to be approved: trackbed fleet approve"
        if self._denied:
            return f"{what}; its request {self._denied}; it makes another one within the hour"
        return f"{what}; to request one it needs an enrolment token: run the deploy again"

    def _read(self) -> tuple[Life, ssl.SSLContext] | None:
        """The certificate and its life, read once; None: there is none."""
        if self._loaded is None and self._current.exists():
            context = trust(Path(self.settings.ca_file))
            try:
                context.load_cert_chain(self._current)
            except (OSError, ssl.SSLError) as error:
                raise NoCredentials(f"{self._current}: {error}; remove it, and another one is requested") from None
            self._loaded = _dates(self._current), context
        return self._loaded

    def _life(self) -> Life | None:
        loaded = self._read()
        return loaded[0] if loaded else None

    def keep(self, now: float) -> float:
        """Request a certificate if one is due, and install it when it is issued."""
        life = self._life()
        if life is not None and now < life.renewal():
            return life.renewal() - now
        self._api = api = self._client(life, now)
        try:
            new = not self._requested()
            if new:
                self._ask(api)
            return self._fetch(api, now, new)
        finally:
            self._api = None
            api.close()

    def abandon(self) -> None:
        """Give up the request under way in another thread, if there is one."""
        if (api := self._api) is not None:
            api.abandon()

    def _client(self, life: Life | None, now: float) -> Api:
        """A client that may request a certificate: by the node's certificate if that is valid, else by the enrolment token."""
        if life is not None and now < life.end:
            return Api(self.settings.server, self.session)
        if self.enrolment is None:
            raise NoCredentials(self._why_none(life is not None))
        session = Session(trust(Path(self.settings.ca_file)), _token(self.enrolment))
        return Api(self.settings.server, lambda: session)

    def _ask(self, api: Api) -> None:
        node = self.settings.node_name
        if not (self._key.exists() and self._request.exists()):
            make_request(node, self._key, self._request)
        request = self._request.read_bytes()
        # The name is a hash of the content: if the answer is lost, the retry creates the same request. Two requests with
        # different keys would both claim to be this node, and an operator could not tell which is genuine.
        name = f"trackbed-{node}-{hashlib.sha256(request).hexdigest()[:16]}"
        body = {
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {"name": name},
            "spec": {
                "request": base64.b64encode(request).decode(),
                "signerName": SIGNER,
                "usages": ["client auth"],
                "expirationSeconds": self.settings.certificate_days * DAY,
            },
        }
        try:
            api.ask("POST", REQUESTS, body=body)
        except Refused as error:
            if error.status in (400, 422):
                # The content is invalid: make another key and request.
                self._forget()
            if error.status != 409:
                raise
        write_atomically(self._name, name + "\n")

    def _requested(self) -> str:
        """The name of the request that waits to be approved; empty if there is none."""
        return self._name.read_text().strip() if self._name.exists() else ""

    def _forget(self) -> None:
        """Remove key and request, so that the next request is a new one."""
        for used in (self._name, self._request, self._key):
            used.unlink(missing_ok=True)

    def _fetch(self, api: Api, now: float, new: bool) -> float:
        """Look for the answer to the request. :returns: the seconds until the next look, or until the next request.

        :param new: it was made just before.
        """
        try:
            request = api.ask("GET", f"{REQUESTS}/{self._requested()}")
        except Refused as error:
            if error.status != 404:
                raise
            if new:
                self._denied = f"{self._requested()} was deleted at once (does something delete certificate requests?)"
            self._forget()
            # After a day Kubernetes removes a request that nobody has approved. Then the node makes another one at once. If
            # something deletes each request, the waits grow from one request to the next.
            return self._next_wait() if new else 0.0
        try:
            status, seconds = request.get("status", {}), float(request["spec"]["expirationSeconds"])
            given = base64.b64decode(status.get("certificate") or "", validate=True)
            ended = [one for one in status.get("conditions", []) if one["type"] in ("Denied", "Failed")]
            why = [f"{one['type']}: {one.get('message', '')}" for one in ended]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Refused(HTTPStatus.OK, f"something that is not a certificate request: {error!r}") from None
        if given or why:
            self._wait = FIRST_CHECK
        if given:
            if faults := self._take(given, seconds):
                answered = "was answered with a certificate that is not what it asked for"
                self._denied = f"{self._requested()} {answered}: {'; '.join(faults)}"
                self._forget()
                return AFTER_DENIAL
            life = self._life()
            return max(0.0, life.renewal() - now) if life else FIRST_CHECK
        if why:
            self._denied = f"{self._requested()} was {why[0]}"
            self._forget()
            return AFTER_DENIAL
        return self._next_wait()

    def _next_wait(self) -> float:
        """Seconds to wait now; the next wait is twice as long."""
        wait, self._wait = self._wait, min(self._wait * 2, LAST_CHECK)
        return wait

    def _take(self, certificate: bytes, seconds: float) -> list[str]:
        """Install the certificate and its key in one step, unless it has faults.

        :param seconds: the requested lifetime.
        :returns: the faults for which it is refused.
        """
        if len(certificate) > LONGEST_CERTIFICATE or not _CERTIFICATES.fullmatch(certificate):
            return ["it is not a certificate in PEM, or has something beside it"]
        beside = self.folder / ".reporter.pem.new"
        beside.touch(0o600)
        beside.write_bytes(self._key.read_bytes() + certificate)
        try:
            faults = _differences(beside, self._key, f"{NODE_USER}{self.settings.node_name}")
            life = _dates(beside)
            if life.end - life.start > seconds + BACKDATED:
                faults.append(f"it is valid for {life.end - life.start:.0f} s, and {seconds:.0f} s were requested")
        except NoCredentials as error:
            faults = [str(error)]
        if faults:
            beside.unlink()
            return faults
        # Flushed to disk before the rename: else a power cut may leave an empty file.
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(self._current)
        self._forget()
        self._loaded = None
        return []


def make_request(node: str, key: Path, request: Path) -> None:
    """Write a key and a certificate request, in the only form that is approved (fleet/certificate_request.py)."""
    _openssl(
        "req", "-new", "-config", os.devnull, "-utf8", "-sha256", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-subj", f"/CN={NODE_USER}{node}", "-keyout", str(key), "-out", str(request),
    )  # fmt: skip


def _differences(certificate: Path, key: Path, name: str) -> list[str]:
    """How a certificate differs from a client's for this key and name, in the words of fleet/certificate_request.py."""
    faults = []
    if _openssl("x509", "-noout", "-pubkey", "-in", str(certificate)) != _openssl("pkey", "-pubout", "-in", str(key)):
        faults.append("it has another key")
    printed = _openssl("x509", "-noout", "-subject", "-nameopt", "RFC2253", "-in", str(certificate))
    subject = printed.strip().removeprefix("subject=").strip()
    if subject != f"CN={name}":
        faults.append(f"the subject is {subject or 'empty'}, not CN={name}")
    wanted = "subjectAltName,extendedKeyUsage,basicConstraints"
    lines = _openssl("x509", "-noout", "-ext", wanted, "-in", str(certificate)).splitlines()
    headings = [line.partition(":")[0] for line in lines if line.startswith("X509v3 ")]
    if "X509v3 Subject Alternative Name" in headings:
        # The names may contain line breaks, so no other line can be trusted.
        return [*faults, "it has alternative names"]
    values = [line.strip() for line in lines if line.startswith(" ")]
    if headings.count("X509v3 Extended Key Usage") != 1 or "TLS Web Client Authentication" not in values:
        faults.append("its usage is not that of a client alone")
    return [*faults, "it is an authority's"] if any("CA:TRUE" in value for value in values) else faults


def _dates(certificate: Path) -> Life:
    printed = _openssl("x509", "-noout", "-startdate", "-enddate", "-in", str(certificate))
    dates = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
    try:
        return Life(*(float(ssl.cert_time_to_seconds(dates[name])) for name in ("notBefore", "notAfter")))
    except (KeyError, ValueError):
        raise NoCredentials(f"{certificate.name}: its dates cannot be read: {printed.strip()!r}") from None


def _openssl(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["openssl", *arguments], capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise NoCredentials("there is no openssl command; install the package openssl") from None
    except subprocess.SubprocessError as error:
        message = getattr(error, "stderr", "") or str(error)
        raise NoCredentials(f"openssl {arguments[0]}: {message.strip().splitlines()[-1]}") from None
    return done.stdout


def identity(settings: Settings, folder: Path, secret: Path | None) -> Identity:
    """The identity that the settings ask for.

    :param folder: the reporter's own, where a certificate is kept.
    :param secret: the file of the token; with a certificate, of the enrolment token.
    :raises NoCredentials: a token is asked for, and none given.
    """
    if settings.identity == "certificate":
        return Certificate(settings, folder, secret)
    if secret is None:
        raise NoCredentials("identity is token, and no --kubernetes-secret is given; run the deploy again")
    return Token(Path(settings.ca_file), secret)
