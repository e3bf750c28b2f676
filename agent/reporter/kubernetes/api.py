"""A small client of the API server: one connection, JSON both ways, and errors that say what to do."""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, Timer
from typing import Any
from urllib.parse import urlencode, urlsplit

from attrs import define, field, frozen

from agent.documents import load
from agent.reporter.kubernetes.backoff import LAST_WAIT

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

TIMEOUT = 10.0
"""Seconds within which the API server must take a request and answer it."""

KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""TCP keepalive for the watch, which sends nothing: after a minute it notices that the server has vanished."""

UNACKNOWLEDGED = 4.0
"""Seconds until the kernel ends a connection over which it sends without an acknowledgement (TCP_USER_TIMEOUT, tcp(7)). A path
that has vanished is noticed by that, with time left for another connection. A server that is only slow acknowledges."""

OPTIONS = {socket.TCP_NODELAY: 1, **KEEPALIVE, socket.TCP_USER_TIMEOUT: int(UNACKNOWLEDGED * 1000)}
"""Options of each connection (tcp(7))."""

SILENCE = 180.0
"""Seconds without data after which a watch is begun again. The API server sends a bookmark about once a minute
(k8s.io/apiserver, cacher.go), even if the Node is unchanged. So silence means that the server hangs, or the path to it."""

LONGEST = 32 << 20
"""Bytes of an answer, or of one line of a watch; no Node is larger."""


class NoCredentials(Exception):
    """The reporter has no usable credentials yet. The message says why, and the remedy."""


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"the API server answers {status}: {message}{_REMEDIES.get(status, '')}")
        self.status = status
        self.retry_after = retry_after


class Unreachable(Exception):
    """There is no connection to the API server, and none could be made. The message says why."""


class Abandoned(Exception):
    """A request was given up for a more urgent one."""

    def __init__(self) -> None:
        super().__init__("it is put off: that the node is not ready is written first")


_REMEDIES = {
    401: "; the token has expired, its Node was deleted, or it is of another cluster: pyinfra INVENTORY deploys/token.py",
    403: "; are RBAC and policies as in fleet/cluster?",
}

TROUBLE = (Refused, NoCredentials, Unreachable, Abandoned, OSError, HTTPException)
"""The exceptions that a request to the API server may raise."""

BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
"""The statuses with which an API server, or what is before it, refuses every request for now, whatever is in it."""


def takes_nothing(error: Exception) -> bool:
    """Whether, by this error, the API server would take no other request either."""
    return isinstance(error, Unreachable) or (isinstance(error, Refused) and error.status in BUSY)


def explain(error: Exception) -> str:
    """An error of :data:`TROUBLE` in one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the API server's certificate is not trusted: {error.verify_message}; see ca_file in the settings"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason}"
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
class Api:
    """The API server at a URL. Not for several threads at once.

    A new connection resumes the TLS session of the one before. When a Lease is renewed, the handshake costs the API server more
    than anything but the write, and after an outage all nodes connect at once.

    ``begins`` is called before each request. ``refused``: by its last answer the server does not know the credentials.
    ``_busy``: the socket of the request or the watch that is under way; None: there is none.
    """

    server: str
    session: Callable[[], Session]
    begins: Callable[[], None] = lambda: None
    refused: bool = field(default=False, init=False)
    _connection: HTTPSConnection | None = field(default=None, init=False)
    _session: Session | None = field(default=None, init=False)
    _busy: socket.socket | None = field(default=None, init=False)
    _resumed: ssl.SSLSession | None = field(default=None, init=False)
    _abandoned: bool = field(default=False, init=False)

    def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None, content_type: str = JSON
    ) -> dict[str, Any]:
        """Send a request, and read the answer.

        :raises Refused: the answer is an error.
        :raises NoCredentials: there are no usable credentials.
        :raises Abandoned: :meth:`abandon` was called.
        :raises Unreachable: the server cannot be reached.
        :raises OSError: it does not answer in time, or ends the connection instead.
        :raises HTTPException: its answer is not HTTP.
        """
        self._stop_if_abandoned()
        self.begins()
        end = time.monotonic() + TIMEOUT
        # A socket's own time limit begins again with each byte. With a server that sends a byte now and then it never ends.
        timer = Timer(TIMEOUT, self.interrupt)
        timer.daemon = True
        timer.start()
        try:
            response = self._send(method, path, query, body, content_type, end)
            text = response.read(LONGEST + 1)
        except (Abandoned, Unreachable):
            self.close()
            self._stop_if_abandoned()
            raise
        except (OSError, HTTPException):
            self.close()
            self._stop_if_abandoned()
            if time.monotonic() < end:
                raise
        finally:
            self._busy = None
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
            if self._busy is not None:
                self._busy.settimeout(SILENCE)
                with suppress(OSError):  # else one lost packet of the keepalive would end the watch
                    self._busy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            with suppress(TimeoutError):  # the next request reports the fault
                while line := response.readline(LONGEST):
                    yield read_document(line)
        finally:
            self._busy = None
            self.close()

    def interrupt(self) -> None:
        """End the request or the watch of another thread. A connection that is idle is left as it is."""
        if (busy := self._busy) is not None:
            with suppress(OSError):  # it has just ended by itself
                # Ending TLS properly would send a message, and wait for an answer.
                socket.socket.shutdown(busy, socket.SHUT_RDWR)

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
        self._session = session
        headers = {"Accept": JSON, "User-Agent": "trackbed-reporter"}
        if session.token is not None:
            headers["Authorization"] = f"Bearer {session.token}"
        if body is not None:
            headers["Content-Type"] = content_type
        where = f"{path}?{urlencode(query)}" if query else path
        # What is before the server may have ended a connection that was idle. However that shows (an end of file, with or
        # without TLS's own, a reset, a time-out of the kernel, an answer that says so), it is tried once more, with a new one.
        # What was written nevertheless does no harm when it is written again.
        for connection in ([self._connection] if self._connection else []) + [None]:
            opened = connection or self._open(session, end)
            self._busy = opened.sock
            self._go_on(end)
            try:
                opened.request(method, where, None if body is None else json.dumps(body), headers)
                response = opened.getresponse()
            except (OSError, HTTPException):
                self.close()
                self._go_on(end)
                if connection is None:
                    raise
            else:
                if connection is not None and response.status == HTTPStatus.REQUEST_TIMEOUT:
                    self.close()
                    continue
                if isinstance(self._busy, ssl.SSLSocket):
                    # In TLS 1.3 the session ticket comes with the first answer, not with the handshake.
                    self._resumed = self._busy.session
                self.refused = response.status == HTTPStatus.UNAUTHORIZED
                return response
        raise AssertionError  # the last try returns or raises

    def _go_on(self, end: float) -> None:
        """Check whether this request may go on. Whoever interrupts it may have done so before its socket was known.

        :raises Abandoned: :meth:`abandon` was called.
        :raises TimeoutError: the time is up.
        """
        self._stop_if_abandoned()
        if time.monotonic() >= end:
            raise TimeoutError

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

    def _open(self, session: Session, end: float) -> HTTPSConnection:
        address = urlsplit(self.server)
        host, port = address.hostname or "", address.port or 443
        try:
            plain = self._connect(host, port, end)
            # http.client would begin a new TLS session for each connection.
            tls = session.tls.wrap_socket(
                plain, server_hostname=host, session=self._resumed, do_handshake_on_connect=False
            )
            connection = HTTPSConnection(host, port, timeout=TIMEOUT, context=session.tls)
            self._connection, connection.sock, self._busy = connection, tls, tls
            self._go_on(end)
            tls.do_handshake()
        except OSError as error:
            # At the end of its time it is interrupted, and looks as if the server had ended it.
            raise Unreachable(explain(TimeoutError() if time.monotonic() >= end else error)) from None
        return connection

    def _connect(self, host: str, port: int, end: float) -> socket.socket:
        """A connection to the first address of the host that answers.

        If it has several, each gets a share of the time: an API server that has lost its power answers nothing, and must leave
        enough time for the next one and for the request.
        """
        found = _addresses(host, port, TIMEOUT / 2)
        share = TIMEOUT / (len(found) + 1) if len(found) > 1 else TIMEOUT
        failed = OSError("its name has no address")
        for family, kind, protocol, _, address in found:
            try:
                with ExitStack() as opened:
                    self._busy = plain = opened.enter_context(socket.socket(family, kind, protocol))
                    plain.settimeout(share)
                    self._go_on(end)
                    plain.connect(address)
                    opened.pop_all()
            except OSError as error:  # also if the kernel has no IPv6
                failed = error
                continue
            plain.settimeout(TIMEOUT)
            with suppress(OSError):
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in OPTIONS.items():
                    plain.setsockopt(socket.IPPROTO_TCP, option, value)
            return plain
        raise failed


def _addresses(host: str, port: int, within: float) -> list[Any]:
    """The addresses of a host, as getaddrinfo(3) gives them.

    That function has no time limit: while no name server answers, it may take minutes. So a thread calls it, and is left alone
    if it takes longer than ``within`` seconds.

    :raises OSError: there is none, or none in time.
    """
    answers: SimpleQueue[list[Any] | OSError] = SimpleQueue()

    def look() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            answers.put(error)

    Thread(target=look, name=f"resolve {host}", daemon=True).start()
    try:
        answer = answers.get(timeout=within)
    except Empty:
        raise OSError(f"no name server answers for {host} in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


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
