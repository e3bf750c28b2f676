"""Supervisors that a test starts, and a file whose readers hang. Files with another agent have fixtures of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.service.supervised import Start, hanging_file, starting


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture
def end_hang(tmp_path: Path) -> Iterator[Callable[[], None]]:
    with hanging_file(tmp_path) as end:
        yield end
