"""Wraps a Machine and records each call in shared memory, so that the supervisor can see which one hung."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, fields

from agent.hardware.functions import PCI
from agent.machine import Machine
from agent.service.activity import Activity
from agent.spec.selector import PCI_ADDRESS

_DEVICES = f"{PCI}/"
# Paths that name no PCI address: of netdevs, RDMA devices and interrupts. The call before them looked their device up.
_FOUND_BY_ADDRESS = ("/sys/class/", "/sys/kernel/irq/", "/proc/irq/")


def traced(machine: Machine, activity: Activity) -> Machine:
    """``machine``, with each call recorded in ``activity`` before it is made."""
    tracer = _Tracer(activity)
    parts: dict[str, Any] = {
        f.name: _Part(getattr(machine, f.name), tracer.record) for f in fields(Machine) if f.name != "hung"
    }
    return evolve(machine, **parts)


class _Tracer:
    """Finds the device of a call: the one that its arguments name, else the device of the call before."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._device = ""

    def record(self, name: str, arguments: tuple[Any, ...]) -> None:
        text = str(arguments[0]) if len(arguments) == 1 else " ".join(map(str, arguments))
        if text.startswith(_DEVICES):
            self._device = text[len(_DEVICES) :].partition("/")[0]
        elif (not text or text.startswith("/")) and not text.startswith(_FOUND_BY_ADDRESS):
            match = PCI_ADDRESS.search(text)
            self._device = match[0] if match else ""
        self._activity.call(self._device, f"{name} {text}")


class _Part:
    """One protocol of the machine: each of its methods is recorded, then called."""

    def __init__(self, inner: object, record: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._inner = inner
        self._record = record

    def __getattr__(self, name: str) -> Any:
        method, record = getattr(self._inner, name), self._record

        def recorded(*arguments: Any, **named: Any) -> Any:
            record(name, arguments)
            return method(*arguments, **named)

        # The next look-up finds it there, and does not call __getattr__.
        self.__dict__[name] = recorded
        return recorded
