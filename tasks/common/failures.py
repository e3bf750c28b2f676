"""How many hosts may fail before the deploy of all hosts stops."""

from __future__ import annotations

from math import ceil
from typing import Any

from pyinfra.api.state import State

PERCENT = 10
"""If more hosts have failed, the fault is not a single node's."""


def limit(state: State) -> None:
    """For config.py: stop the deploy of all hosts if more than PERCENT of them, and more than one, have failed.

    `--fail-percent` overrides it. Without -y, pyinfra sets 0, and asks after each failure whether to go on.
    """
    init = state.init

    def init_limited(inventory: Any, config: Any, initial_limit: Any = None) -> None:
        hosts = len(inventory if initial_limit is None else initial_limit)
        if hosts and config.FAIL_PERCENT is None:
            config.FAIL_PERCENT = max(PERCENT, ceil(100 / hosts))
        init(inventory, config, initial_limit=initial_limit)

    state.init = init_limited  # type: ignore[method-assign]
