"""Removes faults from a list that the failure does not need (Zeller's ddmin, by halves and then one by one)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(steps: Sequence[T], fails: Callable[[Sequence[T]], bool], tries: int) -> list[T]:
    """A list without steps that are not needed, in their order. The last step is kept: the failure was seen after it.

    :param fails: whether these steps fail, from the same beginning. It is known of all of them.
    :param tries: how many calls of it there may be; what is left after them is returned.
    """
    kept = list(steps)
    left = tries
    size = len(kept) - 1
    while size >= 1 and left > 0:
        start, dropped = 0, False
        while start < len(kept) - 1 and left > 0:
            fewer = kept[:start] + kept[min(start + size, len(kept) - 1) :]
            left -= 1
            if fails(fewer):
                kept, dropped = fewer, True
            else:
                start += size
        if not dropped or size > 1:
            size = min(size // 2, len(kept) - 1)
    return kept
