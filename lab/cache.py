"""The folder where built things are kept: images, programs, package repositories. It is outside the repository."""

import shutil
from collections.abc import Callable
from pathlib import Path

from fleet.paths import cache as home
from lab.lock import exclusive

__all__ = ["home", "made"]


def made(folder: Path, make: Callable[[Path], object], what: str, lock: str = "lock") -> Path:
    """A folder of the cache. ``make`` fills it first if it is not there; a half-made one is deleted."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / lock, f"another command is making {what}"):
        # The command that held the lock may have made it.
        if not folder.exists():
            work = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            make(work)
            work.rename(folder)
    return folder
