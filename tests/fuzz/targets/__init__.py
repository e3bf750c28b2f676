"""One file for each group of parsers of foreign input.

Each has ``seeds()``: inputs that the parsers accept, and ``check(data)``: gives an input to them. What a parser documents that
it raises is not a fault; anything else is.
"""

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module

from attrs import frozen


@frozen
class Target:
    """A group of parsers."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    check: Callable[[bytes], None]


def names() -> list[str]:
    """The names of all targets."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Target:
    """Import a target."""
    module = import_module(f"{__name__}.{name}")
    return Target(name, module.seeds, module.check)


def choose(data: bytes, choices: Sequence[Callable[[bytes], object]]) -> None:
    """Give an input to the parser that its first byte names."""
    if data:
        choices[data[0] % len(choices)](data[1:])


def chosen(number: int, data: bytes) -> bytes:
    """A seed for the parser of this number."""
    return bytes([number]) + data
