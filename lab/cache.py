"""The folder where built things are kept: images, programs, package repositories."""

import os
from pathlib import Path


def home() -> Path:
    """The folder. It is outside the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trackbed"
