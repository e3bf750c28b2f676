"""The Makefile's virtual environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_environment_that_was_interrupted_before_it_had_pip_is_made_again(tmp_path: Path) -> None:
    """`python -m venv` makes bin/python first, and pip last."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/control.txt").write_text("")
    environment = tmp_path / ".venv/bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(os.path.realpath(sys.executable))
    # The packages themselves are of no interest: PIP is a command that does nothing.
    words = ["make", "-C", str(tmp_path), f"PYTHON={sys.executable}", "PIP=true", ".venv/.installed"]
    subprocess.run(words, check=True, capture_output=True)
    subprocess.run([environment / "pip", "--version"], check=True, capture_output=True)
