"""When a netdev's NAPI instances poll (Documentation/networking/napi.rst), each of them alike.

A file of the netdev sets all instances and those that come later, since Linux 6.13 also those that were set one by one
(netdev_set_gro_flush_timeout, net/core/dev.h). What has no file, and an instance that differs, is set by netlink.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Any

from agent.hardware.functions import NET, ifindex_of, netdev, pci_of
from agent.hardware.sysfs import parsed, read_or
from agent.kinds import links
from agent.kinds.ethtool import given
from agent.kinds.settings import Read, Settings, is_ready, of_netdev
from agent.machine import Machine, Setting

FILES = {"defer_hard_irqs": "napi_defer_hard_irqs", "gro_flush_timeout": "gro_flush_timeout", "threaded": "threaded"}
# Linux 5.12 has all files.
SINCE = "irq_suspend_timeout is there since Linux 6.13, if the netdev has NAPI instances; the others since 5.12"
SWITCH = "threaded"
BUSY_POLL = 2
"""Threads that never sleep: a value of ``threaded`` that the agent does not set."""


def _is_up(status: links.LinkStatus | None) -> bool:
    """A netdev that is down has no instances."""
    return is_ready(status) and status is not None and status.link is not None and status.link.up


def _read(machine: Machine, pci: str, names: Collection[str]) -> Read | None:
    if (found := instances_of(machine, pci)) is None:
        return None
    name, instances = found
    return {each: Setting(_value(each, _of_file(machine, name, each), instances)) for each in names}


def instances_of(machine: Machine, pci: str) -> tuple[str, Mapping[int, Mapping[str, int]]] | None:
    """The name of a function's netdev, and its instances; None if it is not in the host's network namespace."""
    return of_netdev(machine, pci, machine.netlink.napis)


def _of_file(machine: Machine, name: str, setting: str) -> list[int]:
    """The netdev's own value, if the setting has a file."""
    path = f"{NET}/{name}/{FILES[setting]}" if setting in FILES else ""
    text = read_or(machine.files, path, "") if path else ""
    return [parsed(int, text, path)] if text else []


def _value(setting: str, of_file: list[int], instances: Mapping[int, Mapping[str, int]]) -> int | bool | str | None:
    """The value of the netdev and of all instances; where they differ, these up to the one that all further ones have."""
    values = of_file + [has[setting] for _, has in sorted(instances.items()) if setting in has]
    while len(values) > 1 and values[-1] == values[-2]:
        values.pop()
    if len(values) > 1:
        return ",".join(map(str, values))
    if not values or setting != SWITCH or values[0] == BUSY_POLL:
        return values[0] if values else None
    return bool(values[0])


def _write(machine: Machine, target: str, wanted: Mapping[str, Any]) -> None:
    """Set each setting; one that is restored may have several values (:func:`_value`)."""
    index = ifindex_of(machine.files, target)
    name = netdev(machine.files, pci_of(machine.files, target))
    for setting, value in wanted.items():
        values = [int(each) for each in str(int(value) if isinstance(value, bool) else value).split(",")]
        there = _of_file(machine, name or "", setting)
        if there and there[0] != values[0]:
            machine.files.write(f"{NET}/{name}/{FILES[setting]}", str(values[0]))
        instances = machine.netlink.napis(index)
        if not there and not any(setting in has for has in instances.values()):
            raise OSError(errno.EOPNOTSUPP, f"the kernel has no {setting} for it: {SINCE}")
        of_instances = values[len(there) :] or values
        for position, (napi, has) in enumerate(sorted(instances.items())):
            after = of_instances[min(position, len(of_instances) - 1)]
            if has.get(setting, after) != after:
                machine.netlink.set_napi(napi, {setting: after})


_PARTS: dict[str, Any] = {"read": _read, "write": _write}
# A driver makes its instances anew with its queues.
NAPI = Settings(
    name="napi",
    after=("offloads",),
    given=given("napi", ("defer_hard_irqs", "gro_flush_timeout")),
    usable=is_ready,
    **_PARTS,
)
# The kernel sets these only of instances that are there.
INSTANCES = Settings(
    name="napi_instances",
    after=("napi",),
    given=given("napi", ("irq_suspend_timeout", SWITCH)),
    usable=_is_up,
    **_PARTS,
)
KINDS = (NAPI.kind(UNKNOWN_UNTIL=("vfs", "bindings")), INSTANCES.kind(UNKNOWN_UNTIL=("vfs", "bindings")))
