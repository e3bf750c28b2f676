"""The inventory's keys: which there are, and how a value is checked before any node is touched."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Generic, TypeVar

from attrs import fields, frozen
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.exceptions import DeployError
from pyinfra.context import host

import tasks
from agent.spec.node import NodeSpec
from agent.spec.strict import Faults, Strict

T = TypeVar("T")

SITE = "site_"
"""Keys that begin so are the operator's own."""

SPEC_KEYS = tuple(field.name for field in fields(NodeSpec))


@frozen
class Key(Generic[T]):
    """One key of the inventory. ``parse`` checks a given value; its ValueError says what is wrong, and the remedy."""

    name: str
    default: T
    parse: Callable[[object], T]

    def read(self, data: Mapping[str, object], host_name: str) -> T:
        """The host's value, or the default if there is none (or it is None).

        :raises DeployError: naming host, key and remedy.
        """
        value = data.get(self.name)
        if value is None:
            return self.default
        try:
            return self.parse(value)
        except ValueError as error:
            raise DeployError(f"{host_name}.{self.name}: {error}") from None

    def here(self) -> T:
        """:meth:`read` for the host at hand."""
        return self.read(host_data(), host.name)


def host_data() -> dict[str, object]:
    """All data of the host at hand."""
    return dict(host.data.dict())  # type: ignore[no-untyped-call]


def whole_number(low: int, high: int, unit: str) -> Callable[[object], int]:
    """A check for a whole number of ``unit``."""

    def parse(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{value!r} is not valid; give a whole number, {low} to {high} {unit}")
        return value

    return parse


def record(kind: type[T]) -> Callable[[object], T]:
    """A check for a mapping that is a frozen record of ``kind``: no unknown key, every fault with its place."""

    @cache
    def strict() -> Strict:
        # Made when the key is given: each takes milliseconds, and most keys are not.
        return Strict(kind)

    def parse(value: object) -> T:
        try:
            return strict().structure(value, kind, "")
        except Faults as error:
            raise ValueError("; ".join(fault.lstrip(".: ") for fault in error.faults)) from None

    return parse


@cache
def known_keys() -> frozenset[str]:
    """Every key that means something: the spec's, the tasks' (what a task lists in KEYS), the connectors'."""
    modules = (importlib.import_module(f"tasks.{module.name}") for module in pkgutil.iter_modules(tasks.__path__))
    ours = {key.name for module in modules for key in getattr(module, "KEYS", ())}
    found = get_all_connectors()  # type: ignore[no-untyped-call]
    connectors = {name for connector in found.values() for name in connector.data_meta}
    return frozenset({*SPEC_KEYS, *ours, *connectors})


def unknown_keys(data: Mapping[str, object], host_name: str) -> list[str]:
    """A line for each key that nothing reads, with the nearest known one: left alone, a mistyped key would do nothing.

    Keys with a leading underscore are pyinfra's global arguments, or private to a group_data file.
    """
    faults = []
    for key in sorted(data):
        if key in known_keys() or key.startswith(("_", SITE)):
            continue
        near = difflib.get_close_matches(key, known_keys(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see docs/inventory.md"
        faults.append(f"{host_name}: unknown key {key!r}; {hint} (keys of your own begin with {SITE!r})")
    return faults
