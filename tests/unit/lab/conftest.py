"""What the tests of a lab's companions share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def qemu() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a node's QEMU."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()
