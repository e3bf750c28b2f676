"""Connects to a socket of QEMU's on which each command and each answer is a line."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def connection(path: Path, timeout_s: float) -> Iterator[TextIO]:
    """The connection's lines. QEMU serves one connection at a time; the next one waits."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(timeout_s)
        connected.connect(str(path))
        with connected.makefile("rw") as lines:
            yield lines
