"""Requests to the sockets that other users can reach: HTTP, and `trackbed apply`'s."""

import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.reporter.http.server import _Handler
from agent.service.apply_socket import Progress, Requests
from tests.fuzz.targets import choose, chosen

FOLDER = Path(tempfile.mkdtemp(prefix="trackbed-fuzz-requests-"))
LONGEST = 1 << 16
TIMEOUT = 15.0


class _Server:
    """The attributes of the server that the handler reads."""

    report = FOLDER / "report.json"


def _http(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(TIMEOUT)
        theirs.sendall(data[:LONGEST])
        theirs.shutdown(socket.SHUT_WR)
        server: Any = _Server()
        _Handler(ours, ("", 0), server)
        ours.close()
        with suppress(ConnectionError):  # the handler does not read all that was sent
            while theirs.recv(1 << 16):
                pass


def _apply(data: bytes) -> None:
    path = FOLDER / f"apply-{os.getpid()}.sock"
    requests = Requests(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.settimeout(TIMEOUT)
        client.sendall(data[:LONGEST] or b"\n")
        requests.accept()
        requests.allowed()
        requests.send(Progress(True))
    requests.allowed()
    requests._socket.close()
    path.unlink()


def check(data: bytes) -> None:
    """Send one request."""
    choose(data, (_http, _apply))


def seeds() -> Sequence[bytes]:
    """Requests that are answered."""
    lines = (
        b"GET /readyz HTTP/1.1\r\nHost: a\r\n",
        b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text\r\n",
    )
    return [
        *(chosen(0, line + b"\r\n") for line in lines),
        chosen(1, b'{"allow": "link-flap"}\n'),
        chosen(1, b'{"allow": null}\n'),
    ]
