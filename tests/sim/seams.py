"""Wraps a machine and calls a function before each read. The function may let time pass, change the machine, or fail."""

from collections.abc import Callable
from typing import Any

from attrs import evolve, fields

from agent.machine import Machine

Seen = Callable[[str, str], None]
"""Called before each read with the method (``files.read``) and its arguments as text. If it raises, so does the read."""

# What changes something; the simulated kernel's ``fault`` is for these.
WRITES = ("write", "replace", "set_", "add_", "remove_", "rename", "hang_up")


def seen(machine: Machine, see: Seen) -> Machine:
    """Wraps ``machine``: ``see`` is called before each read."""
    parts: dict[str, Any] = {
        f.name: _Part(f.name, getattr(machine, f.name), see) for f in fields(Machine) if f.name != "hung"
    }
    return evolve(machine, **parts)


class _Part:
    def __init__(self, name: str, inner: object, see: Seen) -> None:
        self._name, self._inner, self._see = name, inner, see

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "writable" or name.startswith(WRITES):
            return method

        def read(*arguments: Any, **named: Any) -> Any:
            self._see(f"{self._name}.{name}", " ".join(map(str, arguments)))
            return method(*arguments, **named)

        return read
