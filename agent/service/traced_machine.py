"""Wraps a Machine and records each call in shared memory, so that the supervisor can see which one hung."""

from __future__ import annotations

from typing import Any

from attrs import evolve, fields

from agent.hardware.functions import PCI
from agent.machine import Machine
from agent.service.activity import Activity
from agent.spec.selector import PCI_ADDRESS

_DEVICES = f"{PCI}/"
# Paths with the name of a netdev or an RDMA device, or the number of an interrupt, and without a PCI address.
_BY_NAME = ("/sys/class/", "/sys/kernel/irq/", "/proc/irq/")
# The folders in which a PCI function lists its netdevs, RDMA devices and interrupts.
_FOLDERS = frozenset({"net", "infiniband", "msi_irqs"})
# Calls whose numbers are not the indexes of netdevs.
_OTHER_NUMBERS = frozenset({"set_napi", "affinity", "set_affinity"})


def traced(machine: Machine, activity: Activity) -> Machine:
    """``machine``, with each call recorded in ``activity`` before it is made."""
    tracer = _Tracer(activity)
    parts: dict[str, Any] = {
        f.name: _Part(getattr(machine, f.name), tracer) for f in fields(Machine) if f.name != "hung"
    }
    return evolve(machine, **parts)


class _Tracer:
    """Finds the device that a call concerns. If its arguments name no device, that is the device of the last call.

    ``_owners``: the device of each netdev, RDMA device and interrupt by its name, and of each netdev by its index. The pass's
    cache may have answered the question for the device, so the last call may concern another one.
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._device = ""
        self._owners: dict[str | int, str] = {}

    def record(self, name: str, arguments: tuple[Any, ...]) -> None:
        text = str(arguments[0]) if len(arguments) == 1 else " ".join(map(str, arguments))
        if text.startswith(_DEVICES):
            self._device = text[len(_DEVICES) :].partition("/")[0]
        elif text.startswith(_BY_NAME):
            self._device = self._owners.get(_name_in(text), self._device)
        elif not text or text.startswith("/"):
            match = PCI_ADDRESS.search(text)
            self._device = match[0] if match else ""
        elif name not in _OTHER_NUMBERS:
            owners = (self._owners.get(each) for each in arguments if isinstance(each, (str, int)))
            self._device = next(filter(None, owners), self._device)
        self._activity.call(self._device, f"{name} {text}")

    def learn(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Note the device of the netdevs, RDMA devices or interrupts that a call has listed, or of a link's index."""
        if name == "link":
            if result is not None and arguments[0] in self._owners:
                self._owners[result.ifindex] = self._device
        elif arguments[0] == PCI:
            self._owners.clear()  # a reading of everything begins; what it does not find again is gone
        elif arguments[0].startswith(_DEVICES) and arguments[0].rpartition("/")[2] in _FOLDERS:
            self._owners.update(dict.fromkeys(result, self._device))


def _name_in(path: str) -> str:
    """The name in a path: /sys/class/net/NAME/FILE, /sys/kernel/irq/NUMBER/FILE, /proc/irq/NUMBER/FILE."""
    words = path.split("/", 5)
    return words[3] if words[1] == "proc" else "".join(words[4:5])


class _Part:
    """One protocol of the machine: each of its methods is recorded, then called."""

    def __init__(self, inner: object, tracer: _Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        method, tracer = getattr(self._inner, name), self._tracer

        def recorded(*arguments: Any, **named: Any) -> Any:
            tracer.record(name, arguments)
            return method(*arguments, **named)

        def learned(*arguments: Any, **named: Any) -> Any:
            result = recorded(*arguments, **named)
            tracer.learn(name, arguments, result)
            return result

        # The next look-up finds it there, and does not call __getattr__.
        self.__dict__[name] = learned if name in ("link", "names") else recorded
        return self.__dict__[name]
