"""A small client of the API server: one connection, JSON both ways, and errors that say what to do."""

from __future__ import annotations

import json
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from math import inf
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.parse import urlencode, urlsplit

from attrs import define, field, frozen

from agent.documents import load

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

TIMEOUT = 10.0
"""Seconds within which the API server must take a request and answer it."""

KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""TCP keepalive for the watch, which sends nothing: after a minute it notices that the server has vanished."""

SILENCE = 180.0
"""Seconds without data after which a watch is begun again. The API server sends a bookmark about once a minute
(k8s.io/apiserver, cacher.go), even if the Node is unchanged. So silence means that the server hangs, or the path to it."""

LONGEST = 32 << 20
"""Bytes of an answer, or of one line of a watch; no Node is larger."""

FIRST_WAIT = 1.0
LAST_WAIT = 60.0


class NoCredentials(Exception):
    """The reporter has no usable credentials yet. The message says why, and the remedy."""


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"the API server answers {status}: {message}{_REMEDIES.get(status, '')}")
        self.status = status
        self.retry_after = retry_after


class Abandoned(Exception):
    """A request was given up for a more urgent one."""

    def __init__(self) -> None:
        super().__init__("it is put off: that the node is not ready is written first")


_REMEDIES = {
    401: "; the credentials have expired, or are of another cluster: run the deploy again",
    403: "; is the node admitted, and are RBAC and policies as in fleet/cluster?",
}

TROUBLE = (Refused, NoCredentials, Abandoned, OSError, HTTPException)
"""The exceptions that a request to the API server may raise."""


def explain(error: Exception) -> str:
    """An error of :data:`TROUBLE` in one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the API server's certificate is not trusted: {error.verify_message}; see ca_file in the settings"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason}; has this node's certificate expired?"
    if isinstance(error, TimeoutError):
        return "the API server does not answer in time"
    if isinstance(error, OSError):
        return f"the API server cannot be reached: {error.strerror or error}"
    if isinstance(error, HTTPException):
        return f"the API server's answer ended early: {type(error).__name__}"
    return str(error)


@frozen
class Session:
    """How the reporter authenticates: by a client certificate in ``tls``, or by a token."""

    tls: ssl.SSLContext
    token: str | None = None


def trust(ca_file: Path) -> ssl.SSLContext:
    """A TLS context that trusts this certificate authority.

    :raises NoCredentials: the file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise NoCredentials(f"{ca_file}: {error}; give the cluster's certificate authority (PEM)") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 checks authorities strictly by default (RFC 5280: key identifiers). Those of managed and of older clusters
    # fail that check, and no other client of Kubernetes makes it.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


@define
class Backoff:
    """How long to wait after a failure: a random time, from a range that doubles with each failure up to a limit.

    At the limit every wait is the whole limit, so that each node keeps its random offset. With new random times, twice as many
    nodes would come in the first second after an outage.
    """

    failures: int = 0

    def failed(self, at_least: float = 0.0) -> float:
        """Seconds until the next try."""
        longest = FIRST_WAIT * 2**self.failures
        self.failures = min(self.failures + 1, 16)
        drawn = random.uniform(0.1, min(longest, LAST_WAIT))  # noqa: S311  no secret
        return at_least + (LAST_WAIT if longest >= 2 * LAST_WAIT else drawn)

    def succeeded(self) -> None:
        """Start again with the shortest wait."""
        self.failures = 0


@define
class Api:
    """The API server at a URL. Not for several threads at once.

    A new connection resumes the TLS session of the one before. When a Lease is renewed, the handshake costs the API server more
    than anything but the write, and after an outage all nodes connect at once.
    """

    server: str
    session: Callable[[], Session]
    _connection: HTTPSConnection | None = field(default=None, init=False)
    _session: Session | None = field(default=None, init=False)
    _tls: ssl.SSLSocket | None = field(default=None, init=False)
    _resumed: ssl.SSLSession | None = field(default=None, init=False)
    _abandoned: bool = field(default=False, init=False)

    def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        """Send a request, and read the answer.

        :raises Refused: the answer is an error.
        :raises NoCredentials: there are no usable credentials.
        :raises Abandoned: :meth:`abandon` was called.
        :raises OSError: the server cannot be reached, or does not answer in time.
        :raises HTTPException: its answer is not HTTP.
        """
        self._stop_if_abandoned()
        end = time.monotonic() + TIMEOUT
        # A socket's own time limit begins again with each byte. With a server that sends a byte now and then it never ends.
        timer = Timer(TIMEOUT, self.interrupt)
        timer.daemon = True
        timer.start()
        try:
            response = self._send(method, path, query, body, content_type, end)
            text = response.read(LONGEST + 1)
        except (OSError, HTTPException):
            self.close()
            self._stop_if_abandoned()
            if time.monotonic() < end:
                raise
        finally:
            timer.cancel()
        if time.monotonic() >= end:
            # http.client takes an answer that was cut off for a short one.
            self.close()
            raise TimeoutError
        if response.will_close or len(text) > LONGEST:
            self.close()
        if response.status >= 300:
            raise self._refusal(response, text)
        return read_document(text)

    def watch(self, path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Each event of a watch, until the server ends it or falls silent. Raises as :meth:`ask` does."""
        try:
            response = self._send("GET", path, {**query, "watch": "1", "allowWatchBookmarks": "true"})
            if response.status >= 300:
                raise self._refusal(response, response.read(LONGEST))
            if self._connection is not None and self._connection.sock is not None:
                self._connection.sock.settimeout(SILENCE)
            with suppress(TimeoutError):  # the next request reports the fault
                while line := response.readline(LONGEST):
                    yield read_document(line)
        finally:
            self.close()

    def interrupt(self) -> None:
        """End the request or the watch of another thread."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # it has just ended by itself
                # Ending TLS properly would send a message, and wait for an answer.
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Give up the request of another thread, and each one after it until :meth:`resume`."""
        self._abandoned = True
        self.interrupt()

    def resume(self) -> None:
        """Take requests again."""
        self._abandoned = False

    def _stop_if_abandoned(self) -> None:
        if self._abandoned:
            raise Abandoned

    def close(self) -> None:
        """Close the connection. The next request opens another one, with the credentials that are valid then."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        end: float = inf,
    ) -> HTTPResponse:
        session = self.session()
        if self._session is not None and self._session.tls is not session.tls:
            # A connection keeps the certificate that it was made with, and so does a TLS session.
            self.close()
            self._resumed = None
        self._session = session
        headers = {"Accept": JSON, "User-Agent": "trackbed-reporter"}
        if session.token is not None:
            headers["Authorization"] = f"Bearer {session.token}"
        if body is not None:
            headers["Content-Type"] = content_type
        where = f"{path}?{urlencode(query)}" if query else path
        # The server may have closed a connection that was idle. Then try once more, with a new one.
        for connection in ([self._connection] if self._connection else []) + [None]:
            opened = connection or self._open(session)
            # While it is opened, no other thread can interrupt it.
            self._stop_if_abandoned()
            try:
                opened.request(method, where, None if body is None else json.dumps(body), headers)
                response = opened.getresponse()
            except (ConnectionError, HTTPException):
                self.close()
                if connection is None or time.monotonic() >= end or self._abandoned:
                    raise
            else:
                # In TLS 1.3 the session ticket comes with the first answer, not with the handshake.
                self._resumed = self._tls.session if self._tls is not None else None
                return response
        raise AssertionError  # the last try returns or raises

    def _refusal(self, response: HTTPResponse, text: bytes) -> Refused:
        if self._session is not None and self._session.token:
            # A proxy may quote the request with its token, and everybody on the node can read this message.
            text = text.replace(self._session.token.encode(), b"[removed]")
        try:
            message = str(load(text, LONGEST)["message"])
        except (ValueError, KeyError, TypeError):
            message = text[:200].decode(errors="replace").strip() or response.reason
        wait = response.headers.get("Retry-After", "")
        return Refused(response.status, message, min(float(wait), LAST_WAIT) if re.fullmatch("[0-9]+", wait) else 0.0)

    def _open(self, session: Session) -> HTTPSConnection:
        address = urlsplit(self.server)
        host, port = address.hostname or "", address.port or 443
        plain = _connect(host, port)
        with suppress(OSError):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in {socket.TCP_NODELAY: 1, **KEEPALIVE}.items():
                plain.setsockopt(socket.IPPROTO_TCP, option, value)
        # http.client would begin a new TLS session for each connection.
        self._tls = session.tls.wrap_socket(plain, server_hostname=host, session=self._resumed)
        self._connection = connection = HTTPSConnection(host, port, timeout=TIMEOUT, context=session.tls)
        connection.sock = self._tls
        return connection


def _connect(host: str, port: int) -> socket.socket:
    """A connection to the first address of the host that answers.

    If it has several, each gets a share of the time: an API server that has lost its power answers nothing, and must leave
    enough time for the next one and for the request.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    share = TIMEOUT / (len(addresses) + 1) if len(addresses) > 1 else TIMEOUT
    failed = OSError("its name has no address")
    for family, kind, protocol, _, address in addresses:
        try:
            plain = socket.socket(family, kind, protocol)
        except OSError as error:  # the kernel has no IPv6
            failed = error
            continue
        plain.settimeout(share)
        try:
            plain.connect(address)
        except OSError as error:
            plain.close()
            failed = error
        else:
            plain.settimeout(TIMEOUT)
            return plain
    raise failed


def read_document(text: bytes) -> dict[str, Any]:
    """The JSON object of an answer.

    :raises Refused: the answer is not a JSON object.
    """
    try:
        document = load(text, LONGEST)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Refused(200, f"something that is not a JSON object: {text[:80]!r}")
    return document
