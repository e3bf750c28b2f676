"""The report over HTTP: on a loopback address and on a unix socket."""

from __future__ import annotations

import errno
import http.client
import io
import json
import math
import os
import selectors
import socket
import socketserver
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, field

from agent.report.drift import NAME, read_drift
from agent.report.printable import printable
from agent.report.records import Report, to_plain
from agent.report.verdict import Verdict, judge
from agent.reporter.http.address import Address, CannotServe
from agent.reporter.http.metrics import render

AT_ONCE = 16
"""How many requests are answered at the same time. Further ones wait until they are accepted."""

TIMEOUT = 10.0
"""Seconds that a client may take to send its request and to take the answer."""

LONGEST_REQUEST = 16 << 10
"""Bytes of a request's first line and headers. The library would allow 6 MB a request, and the unit has 128 MB in all."""

AGAIN = 5.0
"""Seconds between two tries to listen on a port that another process has."""

TEXT = "text/plain; charset=utf-8"


@define
class _Head:
    """Reads the lines of a request, up to the allowed length."""

    file: io.BufferedIOBase
    left: int = LONGEST_REQUEST

    def readline(self, size: int) -> bytes:
        """Read the next line.

        :raises http.client.LineTooLong: there is more than may be read; it is answered with 431.
        """
        if not self.left:
            raise http.client.LineTooLong("request")
        line = self.file.readline(min(size, self.left))
        self.left -= len(line)
        return line

    def close(self) -> None:
        """Close the file."""
        self.file.close()


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
    timeout = TIMEOUT

    def setup(self) -> None:
        """Prepare to read the request."""
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]  # nothing else of a file is used

    def do_GET(self) -> None:
        """Answer."""
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


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
    timeout = 0.0
    documents = _Documents()

    def __init__(self, family: int, address: Any, report: Path, freed: Callable[[], None]) -> None:
        self.address_family = family
        self.report = report
        self._freed = freed
        # When the connection of each request is closed. The handler's own timeout is for one read: a client that sends one byte
        # after the other would never reach it.
        self._ends: dict[socket.socket, float] = {}
        super().__init__(address, _Handler)
        # A client may close its connection before it is accepted: accept() must not wait for the next one then.
        self.socket.setblocking(False)

    def has_room(self) -> bool:
        """Whether another request may be accepted."""
        return len(self._ends) < AT_ONCE

    def cut_off(self, now: float) -> float:
        """Close the connections of requests whose time is up. :returns: when the time of the next request is up."""
        ends = list(self._ends.items())
        for request, end in ends:
            if end <= now:
                with suppress(OSError):  # the request has just ended
                    request.shutdown(socket.SHUT_RDWR)
        return min((end for _, end in ends if end > now), default=math.inf)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a request. If that is impossible, the request fails, and does not count any more."""
        self._ends[request] = time.monotonic() + TIMEOUT
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            del self._ends[request]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then let the next request be accepted."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ends.pop(request, None)
            self._freed()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line for a client that closed the connection."""
        _say(f"a request failed: {sys.exc_info()[1]!r}")


def serve(
    report: Path,
    address: Address,
    unix: Path | None,
    started: Callable[[int], None],
    keep_trying: bool = False,
) -> None:
    """Answer requests until the process ends.

    :param report: the report's file. The file with the counts of drift is beside it.
    :param unix: the path of a socket, which whoever can reach it may use. A socket that a killed reporter has left is replaced.
    :param started: called once, with the port, or with 0 if another process has the port.
    :param keep_trying: log an address that cannot be opened and try it again, so that the process goes on with its other work.
    :raises CannotServe: an address cannot be opened, and ``keep_trying`` is False.
    """
    port_at, open_servers = f"{address.host}:{address.port}", _Open()
    closed: dict[str, Callable[[], _Server]] = {
        port_at: lambda: _Server(address.family, (address.host, address.port), report, open_servers.freed)
    }
    if unix is not None:
        closed[str(unix)] = lambda: _unix_server(unix, report, open_servers.freed)
    opened, faults = _listen(closed, open_servers)
    if faults and not keep_trying:
        raise CannotServe("; ".join(faults))
    for fault in faults:
        _say(f"{fault}; it is tried again every {AGAIN:.0f} s")
    started(opened[port_at].server_address[1] if port_at in opened else 0)
    while closed:
        open_servers.answer(AGAIN)
        for where in _listen(closed, open_servers)[0]:
            _say(f"listening on {where} now")
    while True:
        open_servers.answer(math.inf)


@define
class _Open:
    """The servers that listen. A server with too many requests accepts none for a while, and does not delay the others."""

    _servers: list[_Server] = field(factory=list)
    _selector: selectors.BaseSelector = field(factory=selectors.DefaultSelector)
    _room: int = field(factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def __attrs_post_init__(self) -> None:
        self._selector.register(self._room, selectors.EVENT_READ)

    def add(self, server: _Server) -> None:
        """Answer the requests of this server, too."""
        self._servers.append(server)

    def freed(self) -> None:
        """Note that a request has ended. Any thread may call this."""
        os.eventfd_write(self._room, 1)

    def answer(self, timeout: float) -> None:
        """Answer the requests that come within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (now := time.monotonic()) < end:
            wake = min([end, *(server.cut_off(now) for server in self._servers)])
            for server in self._servers:
                listens = server in self._selector.get_map()
                if server.has_room() and not listens:
                    self._selector.register(server, selectors.EVENT_READ)
                elif listens and not server.has_room():
                    self._selector.unregister(server)
            for key, _ in self._selector.select(None if wake == math.inf else wake - now):
                if key.fd == self._room:
                    os.eventfd_read(self._room)
                else:
                    key.fileobj.handle_request()  # type: ignore[union-attr]  # a _Server


def _listen(closed: dict[str, Callable[[], _Server]], open_servers: _Open) -> tuple[dict[str, _Server], list[str]]:
    """Listen on the addresses that are not open yet. :returns: the new servers, and why other addresses cannot be opened."""
    opened, faults = {}, []
    for where, make in list(closed.items()):
        try:
            opened[where] = server = make()
        except OSError as error:
            faults.append(f"cannot listen on {where}: {error.strerror or error}")
        else:
            open_servers.add(server)
            del closed[where]
    return opened, faults


def _unix_server(path: Path, report: Path, freed: Callable[[], None]) -> _Server:
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
    server = _Server(socket.AF_UNIX, str(path), report, freed)
    path.chmod(0o666)
    return server


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)  # noqa: T201  the journal
