"""What the tests on the simulated machine share. A test with another machine has a fixture of its own."""

import os
from pathlib import Path

import pytest

from agent.engine.originals import ORIGINALS, Originals
from tests.sim.kernel import Kernel
from tests.sim.two_nics import two_nics


@pytest.fixture
def kernel() -> Kernel:
    return two_nics()


@pytest.fixture
def originals(tmp_path: Path) -> Originals:
    return Originals.load(tmp_path / ORIGINALS)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A named pipe without a writer: reading it hangs."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path
