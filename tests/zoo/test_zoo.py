"""What Trackbed makes of each machine of the zoo is what stands beside its file, which somebody has read and found right."""

from pathlib import Path

import pytest

from tests.zoo.walk import machines, result


@pytest.mark.parametrize("file", machines(), ids=lambda file: file.stem)
def test_the_whole_way(file: Path, tmp_path: Path) -> None:
    """To write the results anew: `.venv/bin/python -m tests.zoo`."""
    assert result(file, tmp_path) == file.with_suffix(".txt").read_text()
