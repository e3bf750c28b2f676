"""Limits a deploy to one part of the inventory, so that several jobs share a fleet: TRACKBED_SHARD=3/16 is part 3 of 16.

pyinfra has no such option, and no hook between reading an inventory and connecting to its hosts. So config.py calls
:func:`limit`, which applies to the hosts that --limit and --exclude have left.
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

from attrs import frozen
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.state import State

VARIABLE = "TRACKBED_SHARD"

T = TypeVar("T")


@frozen
class Shard:
    """Part ``number`` of ``of`` parts, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse the variable's value.

        :raises ValueError: it is not a shard; with the remedy.
        """
        parts = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
        if parts is None or int(parts[1]) > int(parts[2]):
            raise ValueError(
                f"{VARIABLE}={text!r} is not a shard; give it as 3/16: the third of sixteen, counted from 1"
            )
        return cls(int(parts[1]), int(parts[2]))

    def take(self, everything: list[T]) -> list[T]:
        """Every ``of``-th item by name, so that neighbours, such as the nodes of a rack, are in different parts."""
        return sorted(everything, key=str)[self.number - 1 :: self.of]


def limit(state: State) -> None:
    """Make pyinfra connect only to the hosts of the shard, if the environment names one.

    :raises PyinfraError: the variable is not a shard.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        shard = Shard.parse(text)
    except ValueError as error:
        raise PyinfraError(str(error)) from None
    init = state.init

    def init_limited(inventory: Any, config: Any, initial_limit: Any = None) -> None:
        hosts = list(inventory) if initial_limit is None else initial_limit
        init(inventory, config, initial_limit=shard.take(hosts))

    state.init = init_limited  # type: ignore[method-assign]
