"""A share of the inventory, so that the jobs of an array deploy a fleet between them: TRACKBED_SHARD=3/16 is the third of 16.

pyinfra has no such option, and no place for one between reading an inventory and connecting to its hosts: config.py calls
:func:`limit`, which narrows what the command line's --limit and --exclude have left.
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
    """The ``number``-th of so many shares, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read what the variable says.

        :raises ValueError: with the remedy.
        """
        found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
        if found is None or int(found[1]) > int(found[2]):
            raise ValueError(f"{VARIABLE}={text!r} is no shard; give it as 3/16: the third of sixteen, counted from 1")
        return cls(int(found[1]), int(found[2]))

    def take(self, everything: list[T]) -> list[T]:
        """This share: every so-manieth by name, so that neighbours, such as the nodes of a rack, go to different shares."""
        return sorted(everything, key=str)[self.number - 1 :: self.of]


def limit(state: State) -> None:
    """Let pyinfra connect to this share of its hosts alone, if the environment asks for one.

    :raises PyinfraError: the variable is no shard.
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
