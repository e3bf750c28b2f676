"""Files that are replaced together, before a program reads them: the script, as a shell runs it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tasks.common import texts
from tasks.common.commands import script


@pytest.mark.parametrize(
    ("after", "code", "left"),
    [
        ("", 0, {"changed": "new", "added": "new"}),
        ('[ "$(cat "$1/changed")" = new ]\n', 0, {"changed": "new", "added": "new"}),
        ("(exit 3)\n", 3, {"changed": "old", "removed": "old"}),
        ("kill -HUP $$; exec sleep 60\n", 129, {"changed": "old", "removed": "old"}),
    ],
)
def test_files_that_a_program_did_not_read_are_as_before(
    tmp_path: Path, after: str, code: int, left: dict[str, str]
) -> None:
    """Otherwise the next deploy would see no difference, and succeed."""
    for name, text in {"changed": "old", "removed": "old", ".changed.new": "new", ".added.new": "new"}.items():
        (tmp_path / name).write_text(text)
    words = ["put", "changed", "put", "added", "remove", "removed"]
    paths = [word if word in ("put", "remove") else str(tmp_path / word) for word in words]
    command = shlex.split(str(script(texts._REPLACE + after, *paths, "--", str(tmp_path))))
    assert subprocess.run(command, check=False, timeout=60).returncode == code
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == left
