"""`trackbed apply` beside the running service: it asks the worker, over a unix socket, to allow more for once.

The client says one line of JSON, ``{"allow": "link-flap"}`` (or null, for what the spec itself allows), and hears of each
pass as long as it stays connected; when it goes, what it allowed ends. Only root can connect: the socket's mode is 0600.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from agent.documents import LARGEST_REPORT, load
from agent.report.records import Condition, Disruption, Outcome, from_plain
from agent.runtime import journal

NAME = "apply.sock"

TIMEOUT = 2.0
"""Seconds that a client may take to say what it wants: the worker waits for it."""

LONGEST_REQUEST = 4096
"""Bytes of what a client may say."""

SO_SNDBUFFORCE = 32
LONGEST = 16 << 20
"""Bytes of what waits unsent for a client that does not read; more, and it is given up. A thousand VFs that were just made are
told in four million.
"""


@frozen
class Progress:
    """What a pass came to, as `apply` shows it. ``waiting``: a probe's answer may still come."""

    ready: bool
    outcomes: tuple[Outcome, ...] = ()
    conditions: tuple[Condition, ...] = ()
    waiting: bool = False


class Requests:
    """The worker's end. One client at a time; a second one is told so."""

    def __init__(self, path: Path) -> None:
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            self._door.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            # Without it everything but `trackbed apply` works.
            journal(f"{path} cannot be made: {error.strerror}; make room, then: systemctl restart trackbed")
            self._door.close()
            self._door, self._nobody = socket.socketpair()  # nobody ever knocks
        else:
            self._door.listen(4)
        self._door.setblocking(False)
        self._client: socket.socket | None = None
        self._allow: Disruption | None = None

    def fileno(self) -> int:
        """What becomes readable when somebody knocks."""
        return self._door.fileno()

    def accept(self) -> bool:
        """Hear what a client wants; True if there is something to do for it."""
        try:
            client, _ = self._door.accept()
        except OSError:
            return False
        client.settimeout(TIMEOUT)
        try:
            wanted = load(client.recv(LONGEST_REQUEST), LONGEST_REQUEST)["allow"]
            allow = None if wanted is None else Disruption.parse(wanted)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return self._refuse(client, f"not understood: {error}")
        if self.asked():
            return self._refuse(client, "another `trackbed apply` is at work; wait for it")
        self._client, self._allow = client, allow
        try:
            client.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, LONGEST)
        except PermissionError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)  # at most net.core.wmem_max
        client.setblocking(False)
        return True

    def asked(self) -> bool:
        """Whether a client still waits for what it asked for."""
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

    def allowed(self) -> Disruption | None:
        """The level that a client allows now; None: nobody does, so the spec's own holds."""
        return self._allow if self.asked() else None

    def tell(self, body: Mapping[str, Any]) -> None:
        """Say what a pass came to: a report's ``ready``, ``outcomes`` and ``conditions``."""
        if self._client is None:
            return
        line = json.dumps({name: body[name] for name in ("ready", "outcomes", "conditions")}) + "\n"
        try:
            whole = self._client.send(line.encode()) == len(line.encode())
        except OSError:
            whole = False
        if not whole:
            self._forget()

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._allow = None, None

    @staticmethod
    def _refuse(client: socket.socket, reason: str) -> bool:
        try:
            client.sendall(json.dumps({"refused": reason}).encode() + b"\n")
        except OSError:
            pass  # it is gone: nobody to tell
        finally:
            client.close()
        return False


class Refused(Exception):
    """The worker does not take the request, or does not answer; says why."""


def ask(path: Path, allow: Disruption | None, timeout: float) -> Iterator[Progress]:
    """The client's end: each pass, until the caller stops or ``timeout`` seconds are over.

    :raises Refused: there is no worker, it refused, or it went away.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(max(0.001, timeout))
            connection.connect(str(path))
            connection.sendall(json.dumps({"allow": None if allow is None else str(allow)}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                while line := lines.readline(LARGEST_REPORT + 1):
                    document = load(line, LARGEST_REPORT)
                    if isinstance(document, dict) and "refused" in document:
                        raise Refused(str(document["refused"]))
                    yield from_plain(document, Progress)
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            return
        except (OSError, ValueError) as error:
            raise Refused(str(error)) from None
    raise Refused("the worker ended")
