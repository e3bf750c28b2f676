"""Has pyinfra call an object's methods during a deploy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyinfra.api.state import BaseStateCallback, State


def add(state: State, make: Callable[[], BaseStateCallback]) -> None:
    """For config.py: make the object once pyinfra has read the inventory. Before that pyinfra has no list of callbacks."""
    init = state.init

    def init_with_callback(*arguments: Any, **named: Any) -> None:
        init(*arguments, **named)
        state.add_callback_handler(make())  # type: ignore[no-untyped-call]

    state.init = init_with_callback  # type: ignore[method-assign]
