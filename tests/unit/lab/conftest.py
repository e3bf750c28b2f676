"""What the tests of a lab's companions share."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def state() -> Iterator[Path]:
    """A lab's folder, with a short path: that of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="lab-") as made:
        yield Path(made)


@pytest.fixture
def qemu() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a node's QEMU."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()
