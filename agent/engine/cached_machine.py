"""Caches links, directories, symlinks, names of ports and namespaces until forget() is called: several kinds read them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from attrs import evolve

from agent.hardware.functions import PORT_NAME
from agent.hardware.sysfs import read_or, target_of
from agent.machine import Machine


class CachedMachine:
    """Wraps a machine: ``machine`` reads each link, folder and symlink once, and searches once for the same netdevs."""

    def __init__(self, machine: Machine) -> None:
        link, names = cache(machine.netlink.link), cache(machine.files.names)
        holding = cache(machine.namespaces.holding)
        # Most PFs have neither physfn nor phys_port_name. functools.cache keeps no error, so absence is a value here.
        present, port_name = (
            cache(partial(target_of, machine.files)),
            cache(partial(read_or, machine.files, default="")),
        )
        self._caches = (link, names, holding, present, port_name)

        def target(path: str) -> str:
            if (there := present(path)) is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such link", path)
            return there

        def read(path: str) -> str:
            return port_name(path) if path.endswith(PORT_NAME) else machine.files.read(path)

        # read() is called thousands of times a pass, and __getattr__ is slow.
        files = _With(machine.files, read=read, target=target, names=lambda path: names(path).copy())
        namespaces = _With(machine.namespaces, holding=lambda functions: holding(tuple(functions)).copy())
        self.machine = evolve(machine, netlink=_With(machine.netlink, link=link), files=files, namespaces=namespaces)

    def forget(self) -> None:
        """Read everything again: something was written, or may have changed."""
        for each in self._caches:
            each.cache_clear()


class _With:
    """A part of the machine, with some of its methods replaced."""

    def __init__(self, part: object, **methods: Callable[..., Any]) -> None:
        self._part = part
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)
