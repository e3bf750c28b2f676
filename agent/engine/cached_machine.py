"""Caches reads of links, directories, symlinks and namespaces until forget() is called: several kinds read the same ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attrs import evolve

from agent.machine import Files, Link, Machine, Namespace, Namespaces, Netlink


class CachedMachine:
    """Wraps a machine: ``machine`` reads each link, folder and symlink once, and searches once for the same netdevs."""

    def __init__(self, machine: Machine) -> None:
        self._netlink, self._files = _Netlink(machine.netlink), _Files(machine.files)
        self._namespaces = _Namespaces(machine.namespaces)
        self.machine = evolve(machine, netlink=self._netlink, files=self._files, namespaces=self._namespaces)

    def forget(self) -> None:
        """Read everything again: something was written, or may have changed."""
        self._netlink.by_name.clear()
        self._files.folders.clear()
        self._files.targets.clear()
        self._namespaces.found.clear()


class _Netlink:
    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self.by_name: dict[str, Link | None] = {}

    def link(self, name: str) -> Link | None:
        if name not in self.by_name:
            self.by_name[name] = self._netlink.link(name)
        return self.by_name[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._netlink, name)


class _Files:
    def __init__(self, files: Files) -> None:
        self._files = files
        # Called thousands of times a pass, and __getattr__ is slow.
        self.read = files.read
        self.folders: dict[str, list[str]] = {}
        self.targets: dict[str, str] = {}

    def names(self, path: str) -> list[str]:
        names = self.folders.get(path)
        if names is None:
            names = self.folders[path] = self._files.names(path)
        return names.copy()

    def target(self, path: str) -> str:
        target = self.targets.get(path)
        if target is None:
            target = self.targets[path] = self._files.target(path)
        return target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


class _Namespaces:
    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self.found: dict[tuple[str, ...], dict[str, Namespace]] = {}

    def holding(self, functions: Collection[str]) -> dict[str, Namespace]:
        asked = tuple(functions)
        if asked not in self.found:
            self.found[asked] = self._namespaces.holding(asked)
        return self.found[asked].copy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespaces, name)
