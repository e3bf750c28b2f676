"""Files by their real paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.runtime import write_atomically


@contextmanager
def opened(path: str, flags: int = os.O_RDONLY, folder: int | None = None) -> Iterator[int]:
    """The descriptor of a file for a `with` block; ``folder``: what the path is relative to."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_all(path: str, folder: int | None = None) -> str:
    """The text of a file of unknown size, without the white space at its end; ``folder``: what the path is relative to."""
    # Without opened(), which takes longer: a reading of everything calls this for thousands of files.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        chunks = []
        while chunk := os.read(descriptor, 1 << 16):
            chunks.append(chunk)
    finally:
        os.close(descriptor)
    return b"".join(chunks).decode(errors="replace").rstrip()


def write_all(path: str, text: str, folder: int | None = None) -> None:
    """Write in one call, to a file that is there."""
    with opened(path, os.O_WRONLY, folder) as descriptor:
        os.write(descriptor, text.encode())


class LinuxFiles:
    """Files by their real paths."""

    def read(self, path: str) -> str:
        return read_all(path)

    def write(self, path: str, text: str) -> None:
        write_all(path, text)

    def replace(self, path: str, text: str) -> None:
        write_atomically(Path(path), text, 0o644)

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(path))  # noqa: PTH208  Path objects cost three times as much, thousands of times a pass

    def target(self, path: str) -> str:
        return os.readlink(path).rpartition("/")[2]  # noqa: PTH115  as above

    def writable(self, path: str) -> bool:
        """Look at the mode, not at what this process may do."""
        return bool(os.stat(path).st_mode & 0o222)  # noqa: PTH116  as above

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        with opened(path) as descriptor:
            return os.pread(descriptor, size, offset)

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        with opened(path, os.O_WRONLY) as descriptor:
            os.pwrite(descriptor, data, offset)
