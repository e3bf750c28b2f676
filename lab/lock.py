"""A lock on a file, so that one command runs at a time. A command that has to wait says so."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.progress import say


@contextmanager
def exclusive(path: Path, holder: str) -> Iterator[None]:
    """Hold a file's lock until the block or the process ends. While another process holds it, the message names ``holder``."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{holder}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
