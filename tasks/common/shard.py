"""Limits a deploy to one part of the inventory, so that several jobs share a fleet: TRACKBED_SHARD=3/16 is part 3 of 16.

It applies to the hosts that --limit and --exclude have left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TypeVar

from pyinfra.api.exceptions import PyinfraError

VARIABLE = "TRACKBED_SHARD"

T = TypeVar("T")


def limit(hosts: Iterable[T], limited: list[T] | None) -> list[T] | None:
    """Limit the deploy further, to the shard that the environment names; None: all hosts.

    :raises PyinfraError: the variable is not a shard.
    """
    text = os.environ.get(VARIABLE)
    return part(text, list(hosts) if limited is None else limited) if text else limited


def part(shard: str, everything: list[T]) -> list[T]:
    """Every n-th item by name, so that neighbours, such as the nodes of a rack, are in different parts.

    :raises PyinfraError: it is not a shard; with the remedy.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", shard)
    if found is None or int(found[1]) > int(found[2]):
        raise PyinfraError(
            f"{VARIABLE}={shard!r} is not a shard; give it as 3/16: the third of sixteen, counted from 1"
        )
    return sorted(everything, key=str)[int(found[1]) - 1 :: int(found[2])]
