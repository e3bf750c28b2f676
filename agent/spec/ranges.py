"""Lists of numbers as the kernel and people write them: ``0-3,8``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

LARGEST = 1 << 16


@lru_cache(maxsize=4096)
def parse_ranges(text: str, below: int = LARGEST) -> tuple[int, ...]:
    """Parse ``"0-3,8"`` as ``(0, 1, 2, 3, 8)``: sorted, without duplicates. An empty text gives no numbers.

    :raises ValueError: a part is not a number or a rising range; the message names that part.
    """
    numbers: set[int] = set()
    named = 0
    for part in text.strip().split(","):
        if not (part := part.strip()):
            continue
        low, dash, high = part.partition("-")
        if not (low.isascii() and low.isdigit()) or (dash and not (high.isascii() and high.isdigit())):
            raise ValueError(f"{part!r} is neither a number nor a range")
        first, last = int(low), int(high or low)
        if last < first or last >= below:
            raise ValueError(f"{part!r} is not a rising range below {below}")
        named += last + 1 - first
        if named > below:
            raise ValueError(f"its ranges overlap, and name more than {below} numbers together")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """The inverse of :func:`parse_ranges`, in the kernel's form."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
