"""Small files of our own: replaced as a whole, so that nobody reads half of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file so that a reader sees the old or the new text, and a power cut leaves one of them."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
