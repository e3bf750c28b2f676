"""Refuses an inventory without hosts, to which a deploy would do nothing, and succeed."""

from __future__ import annotations

from typing import Any

from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.state import State


def require_hosts(state: State) -> None:
    """For config.py: when pyinfra has read an inventory that has no hosts, raise PyinfraError.

    pyinfra takes only lists and tuples for groups. It ignores a mapping, and a list with anything else than hosts in it.
    """
    init = state.init

    def init_with_hosts(inventory: Any, *arguments: Any, **named: Any) -> None:
        if not len(inventory):
            raise PyinfraError(
                "the inventory has no hosts; a group of hosts is a list of names, or of tuples ('name', {'key': value}), "
                "not a mapping"
            )
        init(inventory, *arguments, **named)

    state.init = init_with_hosts  # type: ignore[method-assign]
