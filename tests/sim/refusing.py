"""Faults of the simulated kernel that refuse some writes."""

from collections.abc import Callable

from tests.sim.tree import error

Fault = Callable[[str, str, str], OSError | None]
"""Called before each write with its operation, its place and its value. What it returns is raised instead of the write."""


def refusing(number: int, *words: str, when: Callable[[], bool] = lambda: True) -> Fault:
    """Refuses each write that has all ``words`` in the line of its operation, place and value, as long as ``when`` is true."""

    def fault(operation: str, where: str, value: str) -> OSError | None:
        written = f"{operation} {where} {value}"
        return error(number, where) if all(word in written for word in words) and when() else None

    return fault
