"""Limits a deploy to one part of the inventory, so that several jobs share a fleet: TRACKBED_SHARD=3/16 is part 3 of 16.

It applies to the hosts that --limit and --exclude have left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TypeVar

from attrs import frozen
from pyinfra.api.exceptions import PyinfraError

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


def limit(hosts: Iterable[T], limited: list[T] | None) -> list[T] | None:
    """The hosts of the shard that the environment names, of those to which the deploy is limited already; None: all hosts.

    :raises PyinfraError: the variable is not a shard.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return limited
    try:
        shard = Shard.parse(text)
    except ValueError as error:
        raise PyinfraError(str(error)) from None
    return shard.take(list(hosts) if limited is None else limited)
