"""How many hosts may fail before the deploy of all hosts stops."""

from __future__ import annotations

from math import ceil
from typing import Any

from pyinfra.api.state import State

PERCENT = 10
"""If more hosts have failed, the fault is not a single node's. `--fail-percent` overrides it."""


def tolerate_one(state: State) -> None:
    """For config.py: let the deploy go on after one host has failed, also if there are so few that one is more than PERCENT."""
    init = state.init

    def init_tolerant(inventory: Any, config: Any, initial_limit: Any = None) -> None:
        hosts = len(inventory if initial_limit is None else initial_limit)
        if hosts and config.FAIL_PERCENT == PERCENT:
            config.FAIL_PERCENT = max(PERCENT, ceil(100 / hosts))
        init(inventory, config, initial_limit=initial_limit)

    state.init = init_tolerant  # type: ignore[method-assign]
