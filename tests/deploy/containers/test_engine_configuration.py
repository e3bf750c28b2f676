"""Parts of templates/engine-configuration.sh, run by a shell.

tests/lab/containers/test_container_runtime.py runs all of it on a node.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasks.common import archive

SCRIPT = (archive.ROOT / "templates" / "engine-configuration.sh").read_text()
FIND_LOST = SCRIPT[SCRIPT.index("ours=") : SCRIPT.index("has() ")]


@pytest.mark.parametrize(
    ("entry", "lost"),
    [
        ("runtimes.nvidia.runtimeArgs = []", []),
        ('runtimes.nvidia.runtimeArgs = ["--debug"]', ["runtimes.nvidia.runtimeArgs"]),
        ("runtimes.other.runtimeArgs = []", ["runtimes.other.runtimeArgs"]),
        ("runtimes.nvidia.args = []", []),
        ('default-runtime = "runc"', []),
    ],
)
def test_the_keys_that_nvidia_ctk_would_lose_from_dockers_file_are_found(
    tmp_path: Path, entry: str, lost: list[str]
) -> None:
    (tmp_path / "operator").write_text(f"{entry}\n")
    (tmp_path / "result").write_text('runtimes.nvidia.path = "nvidia-container-runtime"\n')
    subprocess.run(["sh", "-ec", f"{FIND_LOST}find_lost"], cwd=tmp_path, check=True)
    assert [line.partition(" = ")[0] for line in (tmp_path / "lost").read_text().splitlines()] == lost
