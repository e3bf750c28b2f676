"""Refuses an inventory that pyinfra would misread: one without hosts, or with an entry or a setting that means nothing.

It also refuses a limit that leaves no host: a deploy to no host would do nothing, and succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import GeneratorType
from typing import Any

from pyinfra import logger
from pyinfra.api.exceptions import InventoryError, PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.connectors.ssh import SSHConnector

from agent.spec.strict import did_you_mean

GROUP = "a group of hosts is a list of names, or of tuples ('name', {'key': value})"


def check(hosts: Inventory, limited: list[Host] | None) -> None:
    """Check all hosts of the inventory, and those to which the deploy is limited, if it is.

    :raises PyinfraError: there is none, or one has a key that is misspelt.
    """
    if not len(hosts):
        if file() is None:  # pyinfra has printed what was given
            raise PyinfraError(
                "the inventory is no file, and no host that ssh finds; give the path of an inventory's file"
            )
        raise PyinfraError(f"the inventory has no hosts; {GROUP}")
    if limited is not None and not limited:
        # pyinfra only warns of a pattern that matches no host.
        raise PyinfraError(
            "--limit and --exclude leave no host of the inventory; give the name of a host or a group, each by its own --limit"
        )
    # The deploy checks all keys, but only of the hosts to which it could connect.
    if faults := _unknown_settings(hosts if limited is None else limited):
        raise PyinfraError("\n".join(faults))


_file: list[Path] = []


def file() -> Path | None:
    """The file of this run's inventory; None: it was given as names of hosts."""
    return _file[-1] if _file else None


def groups_of_file(filename: str) -> dict[str, Any]:
    """The groups of an inventory's file.

    pyinfra takes only lists and tuples for groups. It would leave out, without a word, the hosts of a mapping, a set or a
    generator, and with a warning those of a list that also has something else.

    :raises InventoryError: an entry is none.
    """
    # Not above: the import replaces Python's threads by gevent's. pyinfra's command line, which calls this, has done so.
    from pyinfra_cli import inventory as files  # type: ignore[import-untyped]

    _file.append(Path(filename).resolve())
    values = files.exec_file(filename, return_locals=True)
    groups = {
        name: value for name, value in values.items() if not name.startswith("_") and _resembles_group(name, value)
    }
    if fault := fault_of(groups):
        raise InventoryError(f"{filename}: {fault}; a value that is no group begins with _")
    _warn_of_two_values(groups)
    return groups


def _warn_of_two_values(groups: Mapping[str, Any]) -> None:
    """Name a key that a host's entries in two groups give in two ways. pyinfra takes the later group's; `all` is the last."""
    first: dict[tuple[str, str], tuple[str, Any]] = {}
    for group in sorted(groups, key="all".__eq__):
        for name, data in (entry for entry in _entries(groups[group]) if isinstance(entry, tuple)):
            for key, value in data.items():
                other, its = first.setdefault((name, key), (group, value))
                if its != value:
                    logger.warning(f"{name} has a {key} in {other} and another in {group}, which counts; give it once")


def fault_of(groups: Mapping[str, Any]) -> str:
    """What is wrong with the groups of an inventory's file; empty: nothing."""
    for name, value in groups.items():
        if fault := _fault(value):
            return f"{name}: {fault}; {GROUP}"
    for name in groups if "all" in groups else ():
        # pyinfra would leave them out without a word.
        if lost := _names(groups[name]) - _names(groups["all"]):
            return f"all: it lacks {min(lost)!r}, which is in {name}; add it, or remove 'all'"
    return ""


def _entries(group: Any) -> Iterable[Any]:
    return group[0] if isinstance(group, tuple) else group  # type: ignore[no-any-return]


def _names(group: Any) -> set[str]:
    return {entry[0] if isinstance(entry, tuple) else entry for entry in _entries(group)}


def _resembles_group(name: str, value: Any) -> bool:
    """Whether somebody may mean a group of hosts by this value.

    pyinfra takes each list and tuple for a group. Another value is no group if its name is in capitals, as a constant's. A
    mapping of texts, such as the settings of a cluster, is no group either.
    """
    if isinstance(value, list | tuple):
        return True
    if name.isupper():
        return False
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(data, Mapping) for data in value.values())
    return isinstance(value, set | frozenset | GeneratorType)


def _fault(group: Any) -> str:
    """What is wrong with a group of an inventory's file; empty: nothing."""
    if not isinstance(group, list | tuple):
        return f"it is a {type(group).__name__}"
    if isinstance(group, tuple) and (
        len(group) != 2 or not isinstance(group[0], list | tuple) or not isinstance(group[1], Mapping)
    ):
        return "a tuple is a list of hosts and the group's data, as ([...], {...})"
    with_data = set[str]()
    for entry in _entries(group):
        name, *data = entry if isinstance(entry, tuple) and entry else (entry, {})
        if not isinstance(name, str) or not name:
            # Without what is in a list or a mapping, which may be a password.
            shown = f"a {type(name).__name__}" if isinstance(name, list | Mapping) else repr(name)
            return f"{shown} is not the name of a host"
        if "@" in name and not name.startswith("@"):  # in front, it is that of a connector
            return f"{name!r} has a user; give the name of the host alone, and ssh_user in its data"
        if len(data) != 1 or not isinstance(data[0], Mapping):
            # Without the data, which may have a password.
            return f"the entry of {name!r} is not a name and a mapping"
        if name in with_data and data[0]:
            return f"it has two entries of {name!r} with data, of which pyinfra would use one"
        if data[0]:
            with_data.add(name)
    return ""


def _unknown_settings(hosts: Iterable[Any]) -> list[str]:
    """A message for each key that begins as the connection's settings do, and is none."""
    faults = []
    for host in hosts:
        for key in sorted(key for key in map(str, host.data.dict()) if key.startswith("ssh_")):
            if key not in SSHConnector.data_meta:
                hint = did_you_mean(key, SSHConnector.data_meta, "see docs/inventory.md")
                faults.append(f"{host.name}: unknown key {key!r}; {hint}")
    return faults
