"""The inventory's keys: which exist, and how their values are checked before any node is changed."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from attrs import Attribute, fields, fields_dict, frozen
from pyinfra.api import arguments
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.exceptions import ArgumentTypeError, DeployError
from pyinfra.api.host import Host
from pyinfra.api.util import raise_if_bad_type
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.context import host

import tasks
from agent.spec.nic import Nic
from agent.spec.node import NodeSpec
from agent.spec.strict import Faults, did_you_mean, structure

T = TypeVar("T")

SITE = "site_"
"""The prefix of keys that the operator defines. No task reads them."""

SPEC_KEYS = tuple(field.name for field in fields(NodeSpec))


def overrides_of(key: str) -> str:
    """The key with changes of parts of this key's value (tasks/common/layers.py)."""
    # Each of them is about one NIC.
    return "nic_overrides" if key == "nics" else f"{key}_overrides"


@frozen(eq=False)
class Key(Generic[T]):
    """A key of the inventory. ``parse`` checks a value; its ValueError names the fault and the remedy."""

    name: str
    default: T
    parse: Callable[[object], T]

    def read(self, data: Mapping[str, object], host_name: str) -> T:
        """The host's value, or the default if the host has none or None.

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
        """The value for the current host (pyinfra's ``host``)."""
        return self.read(host_data(), host.name)


def this_host() -> Host:
    """The current host itself. pyinfra's ``host`` is a proxy for it, of which no weak reference can be kept."""
    return host.state.inventory.get_host(host.name)


def host_data() -> dict[str, object]:
    """All data of the current host."""
    return dict(host.data.dict())  # type: ignore[no-untyped-call]


def whole_number(low: int, high: int, unit: str) -> Callable[[object], int]:
    """Make a parser for a whole number of ``unit``."""

    def parse(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{value!r} is not valid; give a whole number, {low} to {high} {unit}")
        return value

    return parse


def record(kind: type[T]) -> Callable[[object], T]:
    """Make a parser from a mapping to a record of ``kind``. It refuses unknown keys, and names the place of each fault."""

    def parse(value: object) -> T:
        try:
            return structure(value, kind, "")
        except Faults as error:
            raise ValueError("; ".join(fault.lstrip(".: ") for fault in error.faults)) from None

    return parse


@cache
def task_modules() -> tuple[ModuleType, ...]:
    """The modules of all tasks, in whichever folder of tasks/ they are; those of tasks/common are not tasks."""
    names = (module.name for module in pkgutil.walk_packages(tasks.__path__, "tasks."))
    return tuple(importlib.import_module(name) for name in names if not name.startswith("tasks.common."))


@cache
def task_keys() -> tuple[Key[Any], ...]:
    """The keys that tasks define, by their names."""
    found = {each.name: each for module in task_modules() for each in vars(module).values() if isinstance(each, Key)}
    return tuple(found[name] for name in sorted(found))


def leftovers() -> tuple[str, ...]:
    """The files that tasks list in LEFTOVERS: they stay when a task's key leaves the inventory, until Trackbed is removed."""
    return tuple(path for module in task_modules() for path in getattr(module, "LEFTOVERS", ()))


@cache
def _own_keys() -> frozenset[str]:
    read = {*SPEC_KEYS, *(key.name for key in task_keys())}
    return frozenset({*read, *map(overrides_of, read)})


@cache
def known_keys() -> frozenset[str]:
    """All keys that have a meaning: the spec's, the tasks', and the connectors'."""
    connectors = get_all_connectors()  # type: ignore[no-untyped-call]
    return _own_keys().union(*(connector.data_meta for connector in connectors.values()))


def unknown_keys(data: Mapping[str, object], host_name: str) -> list[str]:
    """A message for each key that nothing reads, with the nearest known key. Without this a mistyped key would be ignored."""
    faults = []
    for key in sorted(data, key=str):
        if type(key) is not str:
            faults.append(f"{host_name}: the key {key!r} is not a string")
            continue
        if key in known_keys() or key.startswith(("_", SITE)):
            continue
        own = f"keys of your own begin with {SITE!r}, a file's own names with '_'"
        faults.append(f"{host_name}: unknown key {key!r}; {_meant(key)} ({own})")
    return faults


@cache
def _meant(key: str) -> str:
    """The remedy for an unknown key. Of the keys of connectors it suggests only those of ssh."""
    if key.lower() in fields_dict(Nic):
        return "it is a key of an entry of nics; give it there"
    known = {*_own_keys(), *SSHConnector.data_meta, *({f"_{key}"} & {*pyinfra_arguments()})}
    return did_you_mean(key, known, "see docs/inventory.md")


# pyinfra gives an argument in data to every operation, and to every question to the node.
_HARMFUL = {
    "_get_pty": "a terminal changes what commands read and print",
    "_if": "operations would be left out, and the deploy would succeed",
    "_retry_until": "commands that have succeeded would run again",
    "_run_once": "one host would be deployed, and the deploy of all would succeed",
    "_stdin": "each command would read it",
    "_success_exit_codes": "commands that have failed would count as done",
}


@cache
def pyinfra_arguments() -> dict[str, type]:
    """The names of pyinfra's global arguments with their types."""
    return {name: kind for name, kind in arguments.all_global_arguments() if name.startswith("_")}


@cache
def _nearest_argument(key: str) -> str | None:
    """The argument that a key resembles. Comparing takes a millisecond, and all hosts of a group have the same keys.

    Both begin with the same two letters: `_password`, `_dir` and `_shell` are a file's own names, and not `_su_password`,
    `_chdir` and `_su_shell` mistyped.
    """
    alike = [name for name in pyinfra_arguments() if name[:3] == key[:3]]
    return next(iter(difflib.get_close_matches(key, alike, n=1, cutoff=0.8)), None)


def wrong_arguments(data: Mapping[str, object], host_name: str) -> list[str]:
    """A message for each global argument of pyinfra (`_sudo`) that is mistyped, has another type, or breaks a deploy.

    pyinfra checks neither in data: `"no"` would count as true. Other keys with a leading underscore are private to a file of
    group_data, so only those that resemble an argument are refused. No message has a value, which may be a password.
    """
    known = pyinfra_arguments()
    faults = []
    for key in sorted(key for key in data if type(key) is str and key.startswith("_")):
        if key not in known:
            if near := _nearest_argument(key):
                faults.append(
                    f"{host_name}: {key!r} is not one of pyinfra's arguments; did you mean {near!r}? (if it is a name of your "
                    "own, give it another)"
                )
        elif data[key] is not None:
            try:
                raise_if_bad_type(data[key], known[key], ArgumentTypeError, f"{host_name}.{key}")
            except ArgumentTypeError as error:
                # Of a type with alternatives, the other lines have one each.
                what = str(error).splitlines()[0].rstrip(":")
                faults.append(f"{what}; see pyinfra's arguments")
            else:
                if data[key] and key in _HARMFUL:
                    faults.append(f"{host_name}.{key}: with it {_HARMFUL[key]}; remove it")
                elif key == "_retries" and data[key] < 0:  # type: ignore[operator]
                    faults.append(f"{host_name}.{key}: with less than 0 no command would run; give 0 or more")
    return faults


def wrong_values(data: Mapping[str, object], host_name: str) -> list[str]:
    """A message for each value that the task of its key refuses: all at once, and before anything is asked of the node."""
    faults = []
    for key in task_keys():
        try:
            key.read(data, host_name)
        except DeployError as error:
            faults.append(str(error))
    return faults


def without_password(_: object, attribute: Attribute[Any], url: str) -> None:
    """Validate a field: a URL has no user and no password, since everybody on the node could read them in arguments and files.

    It comes before each validator whose message shows the URL.
    """
    try:
        user = urlsplit(url).netloc.rpartition("@")[1]
    except ValueError:  # a message of urllib may show the password
        raise ValueError(
            f"{attribute.name}: the host of the URL is not valid; give a name, an IPv4 address, or an IPv6 address in brackets"
        ) from None
    if user:
        raise ValueError(
            f"{attribute.name}: the URL has a user or a password, which every user of the node could read; give it "
            "without a user or password, and let the server admit the nodes by their addresses, or apt by /etc/apt/auth.conf.d"
        )
