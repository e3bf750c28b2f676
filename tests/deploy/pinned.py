"""Texts that a file beside the tests has in full.

`TRACKBED_REWRITE=1 .venv/bin/pytest FILE` writes the texts of a file of tests anew: `git diff` then shows what has changed.
"""

import os
from pathlib import Path


def assert_pinned(file: Path, made: str) -> None:
    present = file.read_text() if file.exists() else ""
    if os.environ.get("TRACKBED_REWRITE"):
        file.write_text(made)
    assert made == present
