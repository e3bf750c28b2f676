"""A reporter that publishes to an API server of one Node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.reporter.publication import Running, publishing


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with publishing(tmp_path) as parts:
        yield parts
