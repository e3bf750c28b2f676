"""The keys of an inventory, from docs/inventory/keys.yaml: the tables of the pages, and the reference of the spec.

In the reference types, bounds and defaults come from the records. If the default is no value, keys.yaml says what happens then,
such as "left alone".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

from agent.spec.vf_attributes import ordered
from cli.schema import Schema, schema
from handbook.markdown import cell, code, prose, table

KEYS = Path(__file__).parents[1] / "docs/inventory/keys.yaml"

SECTIONS: Mapping[str, tuple[str, str]] = {
    "NodeSpec": ("node", ""),
    "Nic": ("nic", ""),
    "Selector": ("nic", "select."),
    "Vfs": ("nic", "vfs."),
    "Address": ("addresses", ""),
    "VfAttributes": ("vfs", ""),
    "VfGroup": ("vfs", ""),
    "Channels": ("netdev", "channels."),
    "Rings": ("netdev", "rings."),
    "Coalescing": ("netdev", "coalescing."),
    "Napi": ("netdev", "napi."),
    "RdmaDevices": ("nic_rdma", ""),
    "Roce": ("roce", ""),
    "Rdma": ("rdma", ""),
    "Irqs": ("steering", "irqs."),
    "Rps": ("steering", "rps."),
    "SteeredNetdevs": ("steering", "rps.netdevs[]."),
    "Rfs": ("steering", "rfs."),
    "Xps": ("steering", "xps."),
    "DisruptionPolicy": ("disruption", "disruption."),
    "Window": ("disruption", "disruption.windows[]."),
    "HugepagePool": ("memory", "hugepages[]."),
    "Gpus": ("memory", "gpus."),
    "Readiness": ("readiness", "readiness."),
    "Flaps": ("readiness", "readiness.flaps."),
    "ProbePolicy": ("readiness", "readiness.probes.NAME."),
    "Silence": ("readiness", "readiness.silenced.NAME."),
}
"""Where keys.yaml describes the keys of a record: the section, and what stands before the key there."""

MAPPINGS = {
    ("VfGroup", "index"): "the VFs that it is for, such as `0-3,6`",
    ("Readiness", "probes"): "how a check counts, by the check's name",
    ("Readiness", "flaps"): "when losses of carrier quarantine a NIC",
    ("Readiness", "silenced"): "checks that only warn for a time, by the check's name",
}
"""Keys that keys.yaml only names as part of others."""

MOST_CHOICES = 10
"""The most choices that are shown. Of more, a few show which they are."""


@frozen
class Described:
    """What keys.yaml says about the keys of a row."""

    meaning: str = ""
    unit: str = ""
    default: str = ""


def page() -> str:
    """All records, the node's first."""
    made = schema()
    records = {"NodeSpec": made, **made["$defs"]}
    return "\n".join(_record(name, record) for name, record in records.items())


def _record(name: str, record: Schema) -> str:
    required = record.get("required", ())
    rows = [
        (
            code(key),
            _type(value),
            _unit(value),
            "required" if key in required else default(name, key, value),
            meaning(name, key),
        )
        for key, value in record["properties"].items()
    ]
    head = ("Key", "Type", "Unit", "Default", "Meaning")
    return f"## {name}\n\n{prose(record['description'])}\n\n{table(head, rows)}"


def meaning(record: str, key: str) -> str:
    """The meaning of a key, from keys.yaml.

    :raises KeyError: it is not there.
    """
    if (record, key) in MAPPINGS:
        return MAPPINGS[record, key]
    return _described(record, key).meaning


def default(record: str, key: str, value: Schema) -> str:
    """The default of a key that is not required.

    :raises ValueError: keys.yaml names another default than the record has.
    """
    stated = "" if (record, key) in MAPPINGS else _described(record, key).default
    given: Any = value.get("default")
    if given is None:
        return stated or "none"
    # keys.yaml has Python's words, the spec has JSON's.
    literal = str(given) if isinstance(given, bool) else json.dumps(given)
    if stated and not stated.startswith(code(literal)):
        raise ValueError(f"the default of {record}.{key} is {literal}; keys.yaml says {stated}")
    return code(json.dumps(given))


def _described(record: str, key: str) -> Described:
    section, before = SECTIONS[record]
    for names, row in _rows(section).items():
        if before + key in _keys(names):
            return row
    raise KeyError(f"docs/inventory/keys.yaml: {section} has no {before}{key}")


def section(name: str) -> str:
    """The table of the keys in a section."""
    rows = _rows(name)
    head = ["Key", "Meaning", *(column for column in ("Unit", "Default") if any(map(_column(column), rows.values())))]
    return table(
        head,
        (
            [", ".join(map(code, names.split(", "))), *(_column(column)(row) for column in head[1:])]
            for names, row in rows.items()
        ),
    )


def _column(name: str) -> Callable[[Described], str]:
    return attrgetter(name.lower())


@cache
def _rows(section: str) -> Mapping[str, Described]:
    """The rows of a section, by their keys. The attributes of VFs have rows from the code."""
    read = {names: Described(**row) for names, row in yaml.safe_load(KEYS.read_text())[section].items()}
    made = ordered() if section == "vfs" else ()
    return {**{each.name: Described(each.meaning, each.unit, each.default) for each in made}, **read}


def _keys(names: str) -> Iterator[str]:
    """The keys of a row; one that begins with a dot has the same parent as the one before."""
    parent = ""
    for key in names.split(", "):
        whole = parent + key if key.startswith(".") else key
        parent = whole.rpartition(".")[0]
        yield whole


def _type(value: Schema) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(_type(part) for part in value["anyOf"] if part.get("type") != "null")
    if "enum" in value:
        choices = [code(json.dumps(choice)) for choice in value["enum"]]
        return ", ".join(choices if len(choices) <= MOST_CHOICES else [*choices[:3], "…", choices[-1]])
    if value["type"] == "array":
        return f"list of {_type(value['items'])}"
    if value["type"] == "object":
        return f"{_type(value['additionalProperties'])} by name"
    if "minimum" in value:
        return f"{value['minimum']} to {value['maximum']}"
    said = f": {cell(value['description'])}" if "description" in value else ""
    return f"{value['type']}{said}"


def _unit(value: Schema) -> str:
    parts = value.get("anyOf", [value])
    return next(
        (str(part["description"]) for part in parts if part.get("type") == "integer" and "description" in part), ""
    )
