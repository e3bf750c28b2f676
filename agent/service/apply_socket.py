"""The unix socket by which `trackbed apply` asks the running service to allow a more disruptive change once.

The client sends one line of JSON, ``{"allow": "link-flap"}`` (null: only what the spec allows), with ``"only": "rail0"`` if
that is for one NIC. While it is connected, the worker sends it the result of each pass, and the allowance holds. Only root can
connect: the socket's mode is 0600.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from agent.documents import LARGEST_REPORT, load
from agent.report.records import Condition, Disruption, NicVerdict, Outcome, from_plain, to_plain
from agent.runtime import journal

NAME = "apply.sock"

TIMEOUT = 2.0
"""Seconds that a client may take to send its request: the worker waits for it."""

LONGEST_REQUEST = 4096
"""Bytes of a request."""

SO_SNDBUFFORCE = 32
LONGEST = 16 << 20
"""Bytes that may wait for a client that does not read; a client with more is disconnected. The result of a pass that has
created a thousand VFs has four million."""


@frozen
class Progress:
    """The result of a pass that `apply` shows. ``waiting``: a probe has not answered yet."""

    ready: bool
    outcomes: tuple[Outcome, ...] = ()
    conditions: tuple[Condition, ...] = ()
    waiting: bool = False
    nics: tuple[NicVerdict, ...] = ()


class Requests:
    """The worker's end of the socket. It serves one client at a time, and refuses a second one."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            # Without this socket only `trackbed apply` fails.
            journal(f"{path} cannot be made: {error.strerror}; make room, then: systemctl restart trackbed")
            self._socket.close()
            self._socket, self._never_used = socket.socketpair()  # a descriptor that never becomes readable
        else:
            self._socket.listen(4)
        self._socket.setblocking(False)
        self._client: socket.socket | None = None
        self._allow: tuple[Disruption | None, str] = (None, "")

    def fileno(self) -> int:
        """A descriptor that becomes readable when a client connects."""
        return self._socket.fileno()

    def accept(self) -> bool:
        """Take a client's request. :returns: whether a pass should run for it; False: there was none, or it was refused."""
        try:
            client, _ = self._socket.accept()
        except OSError:
            return False
        client.settimeout(TIMEOUT)
        try:
            request = load(client.recv(LONGEST_REQUEST), LONGEST_REQUEST)
            level = request["allow"]
            allow = None if level is None else Disruption.parse(level), str(request.get("only", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return self._refuse(client, f"the request is not understood: {error}")
        if self.has_client():
            return self._refuse(client, "another `trackbed apply` is at work; wait for it")
        self._client, self._allow = client, allow
        try:
            client.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, LONGEST)
        except PermissionError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)  # at most net.core.wmem_max
        client.setblocking(False)
        return True

    def has_client(self) -> bool:
        """Whether a client is connected now."""
        if self._client is None:
            return False
        try:
            gone = self._client.recv(1) == b""
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        if gone:
            self._forget()
        return not gone

    def allowed(self) -> tuple[Disruption | None, str]:
        """The level that the client allows, and the only NIC for which; empty: all. None: only what the spec allows."""
        return self._allow if self.has_client() else (None, "")

    def send(self, progress: Progress) -> None:
        """Send the result of a pass to the client, if there is one."""
        if self._client is None:
            return
        line = json.dumps(to_plain(progress)) + "\n"
        try:
            sent = self._client.send(line.encode()) == len(line.encode())
        except OSError:
            sent = False
        if not sent:
            self._forget()

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._allow = None, (None, "")

    @staticmethod
    def _refuse(client: socket.socket, reason: str) -> bool:
        with client, suppress(OSError):  # it has disconnected
            client.sendall(json.dumps({"refused": reason}).encode() + b"\n")
        return False


class ApplyRefused(Exception):
    """The worker refuses the request or does not answer. The message says why."""


def ask(path: Path, allow: Disruption | None, timeout: float, only: str = "") -> Iterator[Progress]:
    """The client's end of the socket: the result of each pass, until the caller stops or ``timeout`` seconds are over.

    :param only: the NIC for which alone the level is allowed; empty: for all devices.
    :raises ApplyRefused: there is no worker, it refused, or it went away.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(max(0.001, timeout))
            connection.connect(str(path))
            request = {"allow": None if allow is None else str(allow), "only": only}
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                while line := lines.readline(LARGEST_REPORT + 1):
                    document = load(line, LARGEST_REPORT)
                    if isinstance(document, dict) and "refused" in document:
                        raise ApplyRefused(str(document["refused"]))
                    yield from_plain(document, Progress)
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            return
        except (OSError, ValueError) as error:
            raise ApplyRefused(str(error)) from None
    raise ApplyRefused("the worker ended")
