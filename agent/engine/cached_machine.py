"""A machine of which is kept what several kinds ask of the same device, until it is forgotten."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from agent.machine import Files, Link, Machine, Netlink


class CachedMachine:
    """``machine`` answers about single links, the names in folders and where links lead as it did when first asked."""

    def __init__(self, machine: Machine) -> None:
        self._netlink, self._files = _Netlink(machine.netlink), _Files(machine.files)
        self.machine = evolve(machine, netlink=self._netlink, files=self._files)

    def forget(self) -> None:
        """Something was changed, or may have changed: ask again."""
        self._netlink.found.clear()
        self._files.listed.clear()
        self._files.led.clear()


class _Netlink:
    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self.found: dict[str, Link | None] = {}

    def link(self, name: str) -> Link | None:
        if name not in self.found:
            self.found[name] = self._netlink.link(name)
        return self.found[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._netlink, name)


class _Files:
    def __init__(self, files: Files) -> None:
        self._files = files
        # Thousands of times a pass: not by way of __getattr__.
        self.read = files.read
        self.listed: dict[str, list[str]] = {}
        self.led: dict[str, str] = {}

    def names(self, path: str) -> list[str]:
        found = self.listed.get(path)
        if found is None:
            found = self.listed[path] = self._files.names(path)
        return found.copy()

    def target(self, path: str) -> str:
        found = self.led.get(path)
        if found is None:
            found = self.led[path] = self._files.target(path)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)
