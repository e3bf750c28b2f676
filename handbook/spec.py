"""The spec's reference: types, bounds and defaults come from the records, the meaning of each key from docs/inventory.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from agent.spec.schema import Schema, schema
from handbook.markdown import cell, code, prose, table

INVENTORY = Path(__file__).parents[1] / "docs/inventory.md"

NODE, NIC, VFS = "The node", "One of `nics`", "Attributes of VFs"
NETDEV = "Channels, rings, coalescing, offloads"
STEERING = "`irqs`, `rps`, `rfs`, `xps`, `disruption`"
MEMORY = "`sysctls`, `module_parameters`, `hugepages`, `gpus`"
READINESS = "`readiness`"
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
    "Rdma": ("`rdma`", ""),
    "Irqs": (STEERING, "irqs."),
    "Rps": (STEERING, "rps."),
    "SteeredNetdevs": (STEERING, "rps.netdevs[]."),
    "Rfs": (STEERING, "rfs."),
    "Xps": (STEERING, "xps."),
    "DisruptionPolicy": (STEERING, "disruption."),
    "Window": (STEERING, "disruption.windows[]."),
    "HugepagePool": (MEMORY, "hugepages[]."),
    "Gpus": (MEMORY, "gpus."),
    "Readiness": (READINESS, "readiness."),
    "ProbePolicy": (READINESS, "readiness.probes.NAME."),
    "Silence": (READINESS, "readiness.silenced.NAME."),
}
"""Where docs/inventory.md describes the keys of a record: the section, and what stands before the key there."""

MAPPINGS = {
    ("VfGroup", "index"): "the VFs that it is for, such as `0-3,6`",
    ("Readiness", "probes"): "how a check counts, by the check's name",
    ("Readiness", "silenced"): "checks that only warn for a time, by the check's name",
}
"""Keys that docs/inventory.md only names as part of others."""


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
            "required" if key in required else _default(value),
            meaning(name, key),
        )
        for key, value in record["properties"].items()
    ]
    head = ("Key", "Type", "Unit", "Default", "Meaning")
    return f"## {name}\n\n{prose(record['description'])}\n\n{table(head, rows)}"


def meaning(record: str, key: str) -> str:
    """The meaning of a key, from docs/inventory.md.

    :raises KeyError: it says nothing.
    """
    if (record, key) in MAPPINGS:
        return MAPPINGS[record, key]
    section, before = SECTIONS[record]
    try:
        text = _rows()[section][before + key]
    except KeyError:
        raise KeyError(f"docs/inventory.md, section {section!r}, has no row for {before}{key}") from None
    # The links of docs/inventory.md, seen from docs/reference/.
    text = re.sub(r"\]\(#", "](inventory.md#", text)
    return re.sub(r"\]\((?!https?:)", "](../", text)


@cache
def _rows() -> Mapping[str, Mapping[str, str]]:
    """The second cell of each row in docs/inventory.md, by the section and the key."""
    sections: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    for line in INVENTORY.read_text().splitlines():
        if heading := re.match(r"#+ (.+)", line):
            keys = sections.setdefault(heading[1], {})
        elif row := re.match(r"\| (`[^|]+`) \| (.*?) (?<!\\)\|", line):
            keys |= dict.fromkeys(_keys(row[1]), row[2])
    return sections


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
        return ", ".join(code(json.dumps(choice)) for choice in value["enum"])
    if value["type"] == "array":
        return f"list of {_type(value['items'])}"
    if value["type"] == "object":
        return f"{_type(value['additionalProperties'])} by name"
    if "minimum" in value:
        return f"{value['minimum']} to {value['maximum']}"
    said = f": {cell(value['description'])}" if "description" in value else ""
    return f"{value['type']}{said}"


def _unit(value: Schema) -> str:
    return next((str(part["description"]) for part in value.get("anyOf", [value]) if "minimum" in part), "")


def _default(value: Schema) -> str:
    default: Any = value.get("default")
    return "none" if default is None else code(json.dumps(default))
