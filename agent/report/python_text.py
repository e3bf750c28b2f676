"""Writes plain data as Python, as a person would lay it out."""

from __future__ import annotations

import json
from typing import Any

WIDTH = 100


def literal(value: Any, indent: str = "") -> str:
    """Plain data as a Python literal, on one line where it fits."""
    flat = _flat(value)
    if len(indent) + len(flat) <= WIDTH or not isinstance(value, dict | list):
        return flat
    inner = f"{indent}    "
    if isinstance(value, dict):
        lines = [f"{inner}{_flat(key)}: {literal(each, inner)}," for key, each in value.items()]
        return "\n".join(["{", *lines, f"{indent}}}"])
    return "\n".join(["[", *(f"{inner}{literal(each, inner)}," for each in value), f"{indent}]"])


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flat(key)}: {_flat(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flat, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_flat, value))})"
    # Python reads JSON's strings as they are; those in JSON have double quotes, as code has.
    return json.dumps(value, ensure_ascii=not value.isprintable()) if isinstance(value, str) else repr(value)
