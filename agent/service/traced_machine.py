"""A machine of whose every call the parent knows, should it never return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, fields

from agent.hardware.functions import PCI
from agent.machine import Machine
from agent.report.activity import Activity
from agent.spec.nic import PCI_ADDRESS

_DEVICES = f"{PCI}/"
# Netdevs, RDMA devices and interrupts: found by PCI address just before they are touched, since their names do not last.
_FOUND_BY_ADDRESS = ("/sys/class/", "/sys/kernel/irq/", "/proc/irq/")


def traced(machine: Machine, activity: Activity) -> Machine:
    """``machine``, each of whose calls is noted in ``activity`` before it is made."""
    tracer = _Tracer(activity)
    parts: dict[str, Any] = {
        f.name: _Part(getattr(machine, f.name), tracer.note) for f in fields(Machine) if f.name != "hung"
    }
    return evolve(machine, **parts)


class _Tracer:
    """Knows which device a call is about: the one that it names or, if it can be found only so, the one named last."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._device = ""

    def note(self, name: str, arguments: tuple[Any, ...]) -> None:
        said = " ".join(map(str, arguments)) if arguments else ""
        if said.startswith(_DEVICES):
            self._device = said[len(_DEVICES) :].partition("/")[0]
        elif (not said or said.startswith("/")) and not said.startswith(_FOUND_BY_ADDRESS):
            named = PCI_ADDRESS.search(said)
            self._device = named[0] if named else ""
        self._activity.call(self._device, f"{name} {said}")


class _Part:
    """One protocol of the machine: its methods, each noted and then called."""

    def __init__(self, inner: object, note: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._inner = inner
        self._note = note

    def __getattr__(self, name: str) -> Any:
        method, note = getattr(self._inner, name), self._note

        def noted(*arguments: Any, **named: Any) -> Any:
            note(name, arguments)
            return method(*arguments, **named)

        # The next look-up finds it without coming here.
        self.__dict__[name] = noted
        return noted
