"""The spec as JSON Schema (draft 2020-12), made from the records that parse it: types, choices, bounds, patterns.

A schema cannot express most checks of several values together (unique names, an index below the count); `trackbed plan` makes
them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from attrs import NOTHING, Attribute, fields, has

from agent.spec.addresses import Address
from agent.spec.nic import Channels, Nic
from agent.spec.node import NodeSpec
from agent.spec.selector import INDEX, KEYS, UNIQUE_KEYS, WITH_EACH, Selector
from agent.spec.strict import LONGEST_TEXT, MOST_ITEMS, OF_TEXT, PLAIN, plain
from agent.spec.sysctl_names import SYSCTL
from agent.spec.validators import DATE, Each, Matches, OneOf, Within, is_date

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCALARS = {str: "string", int: "integer", bool: "boolean", float: "number", type(None): "null"}

Schema = dict[str, Any]


def _whole(pattern: str) -> str:
    # In Python, unlike in ECMA-262, $ is also before a line break at the end.
    return f"^(?:{pattern})(?![\\s\\S])"


_ONE_LINE = {"maxLength": LONGEST_TEXT, "pattern": _whole(PLAIN.pattern)}


def _both(*names: str) -> Schema:
    return {"required": list(names), "properties": {name: {"type": "integer"} for name in names}}


def _text_given(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"type": "string"}}}


_EACH: Schema = {"required": ["each"], "properties": {"each": {"const": True}}}
_WITH_INDEX: Schema = {"pattern": re.escape(INDEX)}

# The checks of several values together that a schema can express.
WHOLE: Mapping[type, Schema] = {
    Channels: {"not": {"anyOf": [_both("combined", "rx"), _both("combined", "tx")]}},
    Selector: {
        "anyOf": [_text_given(name) for name in KEYS],
        "if": _EACH,
        "then": {"not": {"anyOf": [_text_given(name) for name in UNIQUE_KEYS]}},
        "else": {"properties": {name: {"enum": [None, []]} for name in WITH_EACH}},
    },
    Nic: {
        "if": {"required": ["select"], "properties": {"select": _EACH}},
        "then": {"properties": {"name": _WITH_INDEX, "altnames": {"items": _WITH_INDEX}}},
        "else": {"properties": {"name": {"not": _WITH_INDEX}}},
    },
    Address: {"oneOf": [_text_given("address"), _text_given("network")]},
}


def schema() -> Schema:
    """The schema of the spec; the records in its fields are in ``$defs``."""
    definitions: dict[str, Schema] = {}
    root = _record(NodeSpec, definitions)
    return {"$schema": DIALECT, "title": NodeSpec.__name__, **root, "$defs": dict(sorted(definitions.items()))}


def _record(record: type, definitions: dict[str, Schema]) -> Schema:
    hints = get_type_hints(record)
    properties = {f.name: _field(f, hints[f.name], definitions) for f in fields(record)}
    required = [f.name for f in fields(record) if f.default is NOTHING]
    return {
        "type": "object",
        "description": inspect.cleandoc(record.__doc__ or ""),
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
        **WHOLE.get(record, {}),
    }


def _field(attribute: Attribute[Any], hint: Any, definitions: dict[str, Schema]) -> Schema:
    made = _type(hint, definitions)
    for validator in _validators(attribute.validator):
        for part in made.get("anyOf", [made]):
            if isinstance(validator, Matches) and part.get("type") == "string":
                part |= _matching(validator)
            elif isinstance(validator, Each):
                part |= {"items": {**part["items"], **_matching(validator.item)}, "uniqueItems": True}
            elif validator is is_date:
                part |= {"pattern": _whole(DATE.pattern), "description": "write it as 2026-12-31"}
            elif isinstance(validator, OneOf) and part.get("type") == "integer":
                part |= {"enum": list(validator.numbers), "description": validator.unit}
            elif isinstance(validator, Within) and part.get("type") == "integer":
                part |= {"minimum": validator.low, "maximum": validator.high, "description": validator.unit}
    if attribute.name == "sysctls":
        made["propertyNames"] = {"pattern": _whole(SYSCTL.pattern)}
    factory = getattr(attribute.default, "factory", None)
    default = factory() if factory else attribute.default
    if default is not NOTHING and default is not None:
        made["default"] = plain(default)
    return made


def _matching(validator: Matches) -> Schema:
    return {"pattern": _whole(validator.pattern.pattern), "description": validator.remedy}


def _validators(validator: Any) -> Iterator[Any]:
    """A validator, and the validators inside attrs' `and_` and `optional`."""
    if validator is not None:
        yield validator
        for inner in (*getattr(validator, "_validators", ()), getattr(validator, "validator", None)):
            yield from _validators(inner)


def _type(hint: Any, definitions: dict[str, Schema]) -> Schema:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return {"type": SCALARS[hint], **(_ONE_LINE if hint is str else {})}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_type(each, definitions) for each in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0], definitions), "maxItems": MOST_ITEMS}
    if origin is Mapping:
        names = {"propertyNames": _ONE_LINE, "maxProperties": MOST_ITEMS}
        return {"type": "object", "additionalProperties": _type(arguments[1], definitions), **names}
    if has(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}
            definitions[hint.__name__] = _record(hint, definitions)
        written: Schema = {"$ref": f"#/$defs/{hint.__name__}"}
        return {"anyOf": [_type(str, definitions), written]} if hasattr(hint, OF_TEXT) else written
    raise TypeError(f"no schema for {hint!r}; teach cli/schema.py this type")
