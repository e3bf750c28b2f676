"""Removes faults from a list that the failure does not need (Zeller's ddmin, by halves and then one by one)."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(steps: Sequence[T], fails: Callable[[Sequence[T]], bool], tries: int) -> list[T]:
    """The steps that are needed for the failure, in their order. The last step is kept, since the failure was seen after it.

    :param fails: whether these steps fail, from the same start. All steps together are known to fail.
    :param tries: the largest number of calls of ``fails``. After them the smallest list so far is returned.
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
