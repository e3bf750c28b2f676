"""The spec's reference: types, bounds and defaults come from the records, the meanings from the inventory's pages.

If the default is no value, the page's words say what happens then, such as "left alone".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from agent.spec.schema import Schema, schema
from handbook.markdown import cell, code, prose, table

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = "reference"
"""The folder of the page that shows the meanings, below DOCS."""


def inventory_pages() -> tuple[Path, ...]:
    """The pages that describe the inventory's keys."""
    return (DOCS / "inventory.md", *sorted((DOCS / "inventory").glob("*.md")))


NODE, NIC, VFS = "The node", "One of `nics`", "Attributes of VFs"
NETDEV = "Channels, rings, coalescing, offloads"
STEERING, DISRUPTION = "Interrupts and packet steering", "Disruption"
MEMORY = "Kernel parameters, huge pages, GPUs"
READINESS = "Readiness checks"
ROCE = "RoCE quality of service of a NIC: `nics[].roce`"

SECTIONS: Mapping[str, tuple[str, str]] = {
    "NodeSpec": (NODE, ""),
    "Nic": (NIC, ""),
    "Selector": (NIC, "select."),
    "Vfs": (NIC, "vfs."),
    "Address": ("Addresses of a NIC: `nics[].addresses`", ""),
    "VfAttributes": (VFS, ""),
    "VfGroup": (VFS, ""),
    "Channels": (NETDEV, "channels."),
    "Rings": (NETDEV, "rings."),
    "Coalescing": (NETDEV, "coalescing."),
    "RdmaDevices": ("RDMA devices of a NIC: `nics[].rdma`", ""),
    "Roce": (ROCE, ""),
    "Dcqcn": (ROCE, ""),
    "Rdma": ("The RDMA subsystem", ""),
    "Irqs": (STEERING, "irqs."),
    "Rps": (STEERING, "rps."),
    "SteeredNetdevs": (STEERING, "rps.netdevs[]."),
    "Rfs": (STEERING, "rfs."),
    "Xps": (STEERING, "xps."),
    "DisruptionPolicy": (DISRUPTION, "disruption."),
    "Window": (DISRUPTION, "disruption.windows[]."),
    "HugepagePool": (MEMORY, "hugepages[]."),
    "Gpus": (MEMORY, "gpus."),
    "Readiness": (READINESS, "readiness."),
    "ProbePolicy": (READINESS, "readiness.probes.NAME."),
    "Silence": (READINESS, "readiness.silenced.NAME."),
}
"""Where the inventory's pages describe the keys of a record: the section, and what stands before the key there."""

MAPPINGS = {
    ("VfGroup", "index"): "the VFs that it is for, such as `0-3,6`",
    ("Readiness", "probes"): "how a check counts, by the check's name",
    ("Readiness", "silenced"): "checks that only warn for a time, by the check's name",
}
"""Keys that the inventory's pages only name as part of others."""

MOST_CHOICES = 10
"""The most choices that are shown. Of more, a few show which they are."""

ELSEWHERE = {"Dcqcn": 'as NVIDIA\'s page "DCQCN CC Parameters" describes it'}
"""What all keys of a record mean, if the inventory's pages list them without a meaning for each."""


@frozen
class Described:
    """What a row of the inventory's pages says about a key; each is empty if the table has no such column."""

    meaning: str
    default: str


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
    """The meaning of a key, from the inventory's pages.

    :raises KeyError: no page describes it.
    """
    if (record, key) in MAPPINGS:
        return MAPPINGS[record, key]
    return _described(record, key).meaning or ELSEWHERE[record]


def default(record: str, key: str, value: Schema) -> str:
    """The default of a key that is not required.

    :raises ValueError: the inventory's pages name another default than the record has.
    """
    stated = "" if (record, key) in MAPPINGS else _described(record, key).default
    given: Any = value.get("default")
    if given is None:
        return stated or "none"
    # The pages have Python's words, the spec has JSON's.
    literal = str(given) if isinstance(given, bool) else json.dumps(given)
    if stated and not stated.startswith(code(literal)):
        raise ValueError(f"the default of {record}.{key} is {literal}; the inventory's pages say {stated}")
    return code(json.dumps(given))


def _described(record: str, key: str) -> Described:
    section, before = SECTIONS[record]
    try:
        return _rows()[section][before + key]
    except KeyError:
        raise KeyError(
            f"no section {section!r} of docs/inventory.md or docs/inventory/ has a row for {before}{key}"
        ) from None


@cache
def _rows() -> Mapping[str, Mapping[str, Described]]:
    """The rows of the inventory's pages, by the section and the key. The first table of a section with a key describes it."""
    sections: dict[str, dict[str, Described]] = {}
    for page in inventory_pages():
        keys: dict[str, Described] = {}
        head: list[str] = []
        for line in page.read_text().splitlines():
            if heading := re.match(r"#+ (.+)", line):
                keys = sections.setdefault(heading[1], {})
            cells = [text.strip() for text in re.split(r"(?<!\\)\|", line)[1:-1]]
            # The first line of a table names its columns, and any line outside one has no cells.
            head = (head or cells) if cells else []
            if head and head[0].startswith("Key") and cells[0].startswith("`"):
                row = dict(zip(head, (_with_links_from_the_reference(text, page) for text in cells), strict=True))
                described = Described(row.get("Meaning", ""), row.get("Default", ""))
                for key in _keys(cells[0]):
                    keys.setdefault(key, described)
    return sections


def _with_links_from_the_reference(text: str, page: Path) -> str:
    """A text of ``page`` whose links lead to the same places from the folder of the reference."""

    def link(match: re.Match[str]) -> str:
        target = page.parent / match[1] if match[1] else page
        return f"]({os.path.relpath(target, DOCS / REFERENCE)}{match[2] or ''})"

    return re.sub(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", link, text)


def _keys(cell: str) -> Iterator[str]:
    """The keys of a cell; one that begins with a dot has the same parent as the one before."""
    parent = ""
    for key in re.findall(r"`([^`]+)`", cell):
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
