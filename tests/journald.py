"""A socket that receives the entries for journald in a test, and reads them as journald does."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Entry = dict[str, list[str]]
"""The values of each field; a field may be given several times."""


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """The socket, in the file ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(path))
        made.settimeout(120)
        yield made


def heard(journald: socket.socket) -> Entry:
    """The next entry."""
    left, entry = journald.recv(1 << 20), Entry()
    while left:
        name, _, left = left.partition(b"\n")
        (length,) = struct.unpack("<Q", left[:8])
        assert left[8 + length : 9 + length] == b"\n"
        entry.setdefault(name.decode(), []).append(left[8 : 8 + length].decode())
        left = left[9 + length :]
    return entry
