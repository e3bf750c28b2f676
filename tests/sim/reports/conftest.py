"""What the reports about VFs share."""

from pathlib import Path

import pytest

from tests.sim.engine.one_nic import Node
from tests.sim.two_nics import two_nics


@pytest.fixture
def node(tmp_path: Path) -> Node:
    kernel = two_nics()
    kernel.load_vfio()
    return Node(kernel, tmp_path / "originals.json")
