"""Paths on the control host, as the inventory, the environment and the command line give them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with ~ as a home folder. If there is no such user, or no home, the path as it is given."""
    # Path.expanduser raises RuntimeError then.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def cache() -> Path:
    """The folder where built things and answers are kept. It may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trackbed"


def state() -> Path:
    """The folder in which commands and deploys keep what later ones read."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "trackbed"
