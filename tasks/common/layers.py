"""A host's data, layer by layer: all hosts, its groups in pyinfra's order, the host itself, `--data`.

A key replaces the value of the layers before, as in pyinfra and Ansible. KEY_overrides changes a part of it: docs/inventory.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import field, fields_dict, frozen
from pyinfra.api.host import Host

from agent.spec.node import NodeSpec
from tasks.common.data import SPEC_KEYS, overrides_of, task_keys

Path = tuple[str, ...]


@frozen
class Layer:
    """A part of a host's data. ``group``: whose it is; None: it is the host's own, or of the command line."""

    name: str
    data: Mapping[str, Any]
    group: str | None = None


@frozen
class Value:
    """A key's value for a host. ``given``: for each part of it, by its path, the layer and the key that gave it."""

    value: Any
    given: Mapping[Path, tuple[Layer, str]] = field(factory=dict)


def layers(host: Host) -> list[Layer]:
    """The layers of a host's data; each overrides those before."""
    inventory = host.inventory
    groups = [Layer(f"group {each}", inventory.get_group_data(each), each) for each in host.groups]  # type: ignore[no-untyped-call]
    return [
        Layer("group all", inventory.get_data(), "all"),  # type: ignore[no-untyped-call]
        *groups,
        Layer("host", inventory.get_host_data(host.name)),
        Layer("--data", inventory.get_override_data()),  # type: ignore[no-untyped-call]
    ]


def value_of(key: str, of_host: Iterable[Layer]) -> Value:
    """The value of a key in these layers.

    :raises ValueError: an override is of what does not exist, or is no mapping.
    """
    value: Any = None
    given: dict[Path, tuple[Layer, str]] = {}
    name = overrides_of(key)
    # Beside a key of the site's own, KEY_overrides is just another one.
    overridable = key in _overridable()
    for layer in of_host:
        if key in layer.data:
            value = layer.data[key]
            given = dict.fromkeys((path for path, _ in parts(value)), (layer, key))
        over = layer.data.get(name) if overridable else None
        if over is None:
            continue
        try:
            if not isinstance(over, Mapping):
                raise ValueError("it is not a mapping; give what it changes, as {'a': ...}")
            value = _merged(_without_parts(key) if value is None else value, over, key)
        except ValueError as error:
            raise ValueError(f"{name} ({layer.name}): {error}") from None
        # An empty mapping changes nothing, unless it is new.
        changed = {path for path, part in parts(over) if part != {} or not any(_begins(each, path) for each in given)}
        kept = {path: by for path, by in given.items() if not any(_begins(path, each) for each in changed)}
        present = {path for path, _ in parts(value)}
        added = {path for path in present if any(_begins(path, each) for each in changed)}
        given = {**{path: by for path, by in kept.items() if path in present}, **dict.fromkeys(added, (layer, name))}
    return Value(value, given)


def _begins(path: Path, start: Path) -> bool:
    return path[: len(start)] == start


def _without_parts(key: str) -> Any:
    """The default of a key whose value is a list or has no parts; None: it is a mapping."""
    spec = fields_dict(NodeSpec)
    default = (
        spec[key].default if key in spec else next((each.default for each in task_keys() if each.name == key), None)
    )
    return default if isinstance(default, tuple | str | int) else None


def _overridable() -> tuple[str, ...]:
    return *SPEC_KEYS, *(each.name for each in task_keys())


def merge(host: Host) -> list[str]:
    """Merge the host's overrides into the values of their keys. Returns a message for each override that is wrong."""
    faults = []
    of_host = layers(host)
    given = {name for layer in of_host for name, over in layer.data.items() if over is not None}
    for key in _overridable():
        if overrides_of(key) in given:
            try:
                setattr(host.data, key, value_of(key, of_host).value)
            except ValueError as error:
                faults.append(f"{host.name}.{error}")
    return faults


def parts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The parts of a value that have no parts, with their paths: keys of mappings, and names of a list's entries."""
    entries = _by_name(value) if isinstance(value, list | tuple) else value
    if not isinstance(entries, Mapping) or not entries:
        yield path, value
        return
    for key, entry in entries.items():
        yield from parts(entry, (*path, str(key)))


def _by_name(entries: Any) -> dict[str, Any] | None:
    """The entries of a list by their names; None: not every entry has one."""
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in entries):
        return None
    return {entry["name"]: entry for entry in entries}


def _merged(value: Any, over: Any, where: str) -> Any:
    """A value with the parts that an override gives; None removes a part."""
    if not isinstance(over, Mapping):
        return over
    if isinstance(value, list | tuple):
        entries = _by_name(value)
        if entries is None:
            raise ValueError(f"{where} is a list of entries without names, which is replaced as a whole: give {where}")
        if len(entries) < len(value):
            raise ValueError(f"{where} has entries of one name; give each another")
        if unknown := [name for name in over if name not in entries]:
            raise ValueError(f"{unknown[0]!r} is not a name in {where}; known names: {', '.join(entries) or 'none'}")
        return list(_with(entries, over, where).values())
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}, which has no parts: give {where}")
    return _with(value or {}, over, where)


def _with(entries: Mapping[Any, Any], over: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    changed = {key: _merged(entries.get(key), part, f"{where}.{key}") for key, part in over.items()}
    return {key: part for key, part in {**entries, **changed}.items() if part is not None or key not in over}
