"""systemd's socket for messages of units (sd_notify(3)), as a process finds it on a busy machine."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def full_socket(path: Path) -> Iterator[socket.socket]:
    """A socket at ``path`` that is full until the test reads from it. Reading waits for at most a minute."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        full.bind(str(path))
        full.settimeout(60)
        other.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                other.sendto(b"x", str(path))
        yield full


def wait_for(message: bytes, heard: socket.socket) -> None:
    """Read what comes before a message, and the message."""
    end = time.monotonic() + 60.0
    while (read := heard.recv(200)) != message:
        assert time.monotonic() < end, read
