"""One command at a time: a lock on a file, and word of it while another holds it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.progress import say


@contextmanager
def exclusive(path: Path, holder: str) -> Iterator[None]:
    """Hold the lock of a file until the block, or the process, ends; ``holder`` is what people are told that is waited for."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{holder}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
