"""The report over HTTP: on a loopback address and on a unix socket."""

from __future__ import annotations

import errno
import json
import re
import socket
import socketserver
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from threading import BoundedSemaphore, Lock, Thread
from typing import Any

from attrs import define, field

from agent.report.drift import NAME, read_drift
from agent.report.printable import printable
from agent.report.records import Report, to_plain
from agent.report.verdict import Verdict, judge
from agent.reporter.http.address import Address, CannotServe
from agent.reporter.http.metrics import render

AT_ONCE = 16
"""How many requests of a socket are answered at the same time. Further ones wait until they are accepted."""

TIMEOUT = 10.0
"""Seconds that a client may take to send its request and to take the answer."""

LONGEST_REQUEST = 16 << 10
"""Bytes of a request's first line and headers. The library would allow 6 MB a request, and the unit has 128 MB in all."""

AGAIN = 5.0
"""Seconds between two tries to listen on a port that another process has."""

TEXT = "text/plain; charset=utf-8"
_END = re.compile(rb"\n\r?\n")


@define
class _Documents:
    """Writes reports for /status. Requests for one report share its text, which may have four million bytes."""

    _writing: Lock = field(factory=Lock)
    _report: Report | None = None
    _text: bytes = b""

    def of(self, report: Report) -> bytes:
        """The text of a report. Any thread may call this."""
        with self._writing:
            if report is not self._report:
                self._report, self._text = report, _json(to_plain(report))
            return self._text


def _json(document: Any) -> bytes:
    return json.dumps(document).encode() + b"\n"


class _Handler(BaseHTTPRequestHandler):
    """One request. Every answer ends its connection."""

    server: _Server
    server_version = "trackbed"
    sys_version = ""

    def setup(self) -> None:
        """Receive the first line and the headers, as far as they are not too long."""
        super().setup()
        end, head = time.monotonic() + TIMEOUT, b""
        # A socket's own time limit begins again with each byte that is received.
        while _still(self.connection, end) and len(head) < LONGEST_REQUEST and not _END.search(head):
            if not (received := self.connection.recv(LONGEST_REQUEST - len(head))):
                break
            head += received
        self.rfile = BytesIO(head)
        self.is_too_long = len(head) == LONGEST_REQUEST and not _END.search(head)

    def do_GET(self) -> None:
        if self.is_too_long:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        verdict = judge(self.server.report)
        match self.path.partition("?")[0]:
            case "/livez":
                self._send(HTTPStatus.OK, b"alive\n", TEXT)
            case "/readyz" if verdict.ready:
                self._send(HTTPStatus.OK, b"ready\n", TEXT)
            case "/readyz":
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, "".join(f"{r}\n" for r in verdict.reasons).encode(), TEXT)
            case "/status":
                self._status(verdict)
            case "/metrics":
                drift = read_drift(self.server.report.with_name(NAME))
                self._send(HTTPStatus.OK, *render(verdict, drift, self.headers.get("Accept", "")))
            case _:
                self._send(HTTPStatus.NOT_FOUND, b"there are /readyz, /livez, /status and /metrics\n", TEXT)

    do_HEAD = do_GET

    def _status(self, verdict: Verdict) -> None:
        if verdict.report is None:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, _json({"errors": list(verdict.reasons)}), "application/json")
        else:
            self._send(HTTPStatus.OK, self.server.documents.of(verdict.report), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: a probe sends a request every few seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request that could not be understood."""
        _say(format % args)


def _still(connection: socket.socket, end: float) -> bool:
    """Give a connection the time that is left; one call of sendall() takes no longer than that.

    :raises TimeoutError: none is left.
    """
    left = end - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    connection.settimeout(left)
    return True


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers each request in a thread of its own, :data:`AT_ONCE` at a time."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
    documents = _Documents()

    def __init__(self, family: int, address: Any, report: Path) -> None:
        self.address_family = family
        self.report = report
        self._room = BoundedSemaphore(AT_ONCE)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a request once there is room for it."""
        self._room.acquire()
        try:
            return super().get_request()
        except OSError:
            self._room.release()
            raise

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whether its request was answered or has failed."""
        super().shutdown_request(request)
        self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line for a client that is too slow, or has closed the connection."""
        _say(f"a request failed: {sys.exc_info()[1]!r}")


def serve(
    report: Path, address: Address, unix: Path | None, started: Callable[[int], None], keep_trying: bool = False
) -> None:
    """Answer requests until the process ends.

    :param report: the report's file. The file with the counts of drift is beside it.
    :param unix: the path of a socket, which whoever can reach it may use. A socket that a killed reporter has left is replaced.
    :param started: called once, with the port, or with 0 if another process has the port.
    :param keep_trying: log an address that cannot be opened and try it again, so that the process goes on with its other work.
    :raises CannotServe: an address cannot be opened, and ``keep_trying`` is False.
    """
    port_at = f"{address.host}:{address.port}"
    makes = {port_at: partial(_Server, address.family, (address.host, address.port), report)}
    if unix is not None:
        makes[str(unix)] = partial(_unix_server, unix, report)
    servers = {where: _opened(where, make) for where, make in makes.items()}
    faults = [server for server in servers.values() if isinstance(server, str)]
    if faults and not keep_trying:
        raise CannotServe("; ".join(faults))
    for fault in faults:
        _say(f"{fault}; it is tried again every {AGAIN:.0f} s")
    server = servers[port_at]
    started(server.server_address[1] if isinstance(server, _Server) else 0)
    ended = SimpleQueue[Exception]()
    # A thread for each socket: one with too many requests does not delay the other.
    for where, make in makes.items():
        Thread(target=_answer, args=(where, make, servers[where], ended), daemon=True).start()
    raise ended.get()


def _answer(where: str, make: Callable[[], _Server], server: _Server | str, ended: SimpleQueue[Exception]) -> None:
    try:
        while isinstance(server, str):
            time.sleep(AGAIN)
            if isinstance(server := _opened(where, make), _Server):
                _say(f"listening on {where} now")
        while True:
            server.handle_request()
    except Exception as error:  # serve() raises it, which ends the process
        ended.put(error)


def _opened(where: str, make: Callable[[], _Server]) -> _Server | str:
    """A server that listens, or why it cannot."""
    try:
        return make()
    except OSError as error:
        return f"cannot listen on {where}: {error.strerror or error}"


def _unix_server(path: Path, report: Path) -> _Server:
    """Listen on a unix socket. A socket on which nobody listens is replaced: a reporter that was killed has left it.

    :raises OSError: something else has this path, or the socket cannot be opened.
    """
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as client:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "it is there already and is not a socket; remove it, or give another path")
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, "another process listens there; stop it, or give another path")
    server = _Server(socket.AF_UNIX, str(path), report)
    path.chmod(0o666)
    return server


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)  # noqa: T201  the journal
