"""pyinfra's own reading of an inventory file.

A module by itself: importing `pyinfra_cli` puts gevent's threads and subprocesses in the place of Python's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyinfra.api.state import State
from pyinfra.context import ctx_state
from pyinfra_cli.inventory import make_inventory  # type: ignore[import-untyped]

from tasks.common import archive


def inventory_of(path: Path) -> Any:
    """pyinfra's inventory of a file, with the project's group data."""
    state = State()
    state.cwd = str(archive.ROOT)
    with ctx_state.use(state):
        return make_inventory(str(path), cwd=state.cwd)
