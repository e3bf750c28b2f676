"""Converts plain data to frozen records and back. Unknown keys and values of another type are refused, each with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

import cattrs
from attrs import fields_dict, has
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

Record = TypeVar("Record")


MOST_FAULTS = 32
"""The most faults that are reported. A wrong document of a few megabytes may have a million."""

MOST_ITEMS = 4096
"""The most entries of one list or mapping. No PF has more VFs."""

LONGEST_TEXT = 4096
"""The most characters of a text or a key. A sysfs attribute takes no more."""

OF_TEXT = "of_text"
"""The class method that makes a record from a text. A record that has it may be written as a text."""

# Characters that are refused: control characters (C0, C1), line and bidirectional controls of Unicode, and lone surrogates.
NOT_PLAIN = r"\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
PLAIN = re.compile(rf"[^{NOT_PLAIN}]*")

_SHOWN = 80


class Faults(ValueError):
    """Data that is refused. Each line of the message is one fault: its place, what is wrong, and the remedy."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults[:MOST_FAULTS]
        if len(faults) > MOST_FAULTS:
            self.faults.append("there are more faults; fix these first")
        super().__init__("\n".join(self.faults))


def structure(document: object, record: type[Record], where: str) -> Record:
    """Make a record from plain data.

    :raises Faults: with every fault and its place.
    """
    try:
        return _converter.structure(document, record)
    except (cattrs.BaseValidationError, ValueError) as error:
        faults = cattrs.transform_error(error, path=where, format_exception=_describe)
        # cattrs appends "@ path"; the place belongs in front.
        split = (fault.rpartition(" @ ") for fault in faults)
        raise Faults([f"{place}: {what}" for whats, _, place in split for what in whats.split("\n")]) from None


def plain(record: object) -> Any:
    """The record as plain data, defaults left out."""
    return _converter.unstructure(record)


def _list_only(cls: Any) -> Any:
    inner = get_args(cls)[0]

    def hook(value: object, _: object) -> Any:
        if not isinstance(value, (list, tuple)):  # an inventory is Python, and may have tuples
            raise ValueError(f"{_json(value)} is not a list; put it in [ ]")
        _refuse_many(value)
        return tuple(_each(enumerate(value), inner, "index").values())

    return hook


def _mapping(cls: Any) -> Any:
    inner = get_args(cls)[1]

    def hook(value: object, _: object) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{_json(value)} is not a mapping; write it as {{name: value}}")
        _refuse_many(value)
        for key in value:
            _text(key, str)
        return _each(sorted(value.items()), inner, "key")

    return hook


def _each(items: Any, inner: Any, what: str) -> dict[Any, Any]:
    made, wrong = {}, []
    for place, item in items:
        try:
            made[place] = _converter.structure(item, inner)
        except Exception as error:
            note = cattrs.IterableValidationNote(f"at {what} {place!r}", place, inner)
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
            wrong.append(error)
            if len(wrong) > MOST_FAULTS:
                break
    if wrong:
        raise cattrs.IterableValidationError("several values", wrong, inner)
    return made


def _json(value: object) -> str:
    # An inventory is Python: a value that only resembles JSON (a date, a member of an enum) is shown as Python writes it.
    is_json = type(value) in (str, int, float, bool, list, tuple, dict, type(None))
    return _short(json.dumps(value, default=repr) if is_json else repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} and so on"


def _refuse_many(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> None:
    if len(value) > MOST_ITEMS:
        raise ValueError(f"it has {len(value)} entries; give at most {MOST_ITEMS}")


def _text(value: object, _: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{_json(value)} is not a string; put it in quotes")
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"{_json(value)} has {len(value)} characters; give at most {LONGEST_TEXT}")
    if not PLAIN.fullmatch(value):
        raise ValueError(
            f"{_json(value)} has a control character, a line break or half of a character (a surrogate); take it out"
        )
    return value


def _exactly(kind: type) -> Any:
    article = {"int": "a whole number; write digits", "bool": "true or false; write True or False"}[kind.__name__]

    def hook(value: object, _: object) -> object:
        # Neither a bool (which is an int in Python) nor a number in quotes is accepted as a number.
        if type(value) is not kind:
            raise ValueError(f"{_json(value)} is not {article}, without quotes")
        return value

    return hook


def _one_of(value: object, literal: Any) -> object:
    choices = get_args(literal)
    # Compare the types, too: True == 1 in Python.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{_json(value)} is not one of {', '.join(map(str, choices))}")
    return value


def _record(kind: Any) -> Any:
    # cattrs compiles a function for each record: a millisecond, and most specs have few kinds of records.
    made = cache(lambda: make_dict_structure_fn(kind, _converter, _cattrs_forbid_extra_keys=True))

    def hook(value: object, _: object) -> Any:
        if isinstance(value, str) and hasattr(kind, OF_TEXT):
            return kind.of_text(_text(value, str))
        if not isinstance(value, dict):
            raise ValueError(f"{_json(value)} is not a mapping; known keys: {', '.join(fields_dict(kind)) or 'none'}")
        return made()(value, kind)

    return hook


def _plain(kind: Any) -> Any:
    # Defaults are left out, so that a new key with a default does not change the hash of an old spec.
    made = cache(lambda: make_dict_unstructure_fn(kind, _converter, _cattrs_omit_if_default=True))
    return lambda record: made()(record)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown name: the known one that looks like it, capitals or not; without one, ``otherwise``."""
    import difflib  # a worker with a good spec does without its memory

    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def _of(origin: Any) -> Callable[[Any], bool]:
    return lambda hint: get_origin(hint) is origin


def _describe(error: BaseException, kind: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = fields_dict(error.cl)
        lines = []
        # An inventory is Python: a key may also be a number or None.
        for key in sorted(error.extra_fields, key=str)[: MOST_FAULTS + 1]:
            hint = did_you_mean(str(key)[:_SHOWN], known, f"known keys: {', '.join(known) or 'none'}")
            lines.append(f"unknown key {_short(repr(key))}; {hint}")
        return "\n".join(lines)
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing; add it"
    return str(error)


_converter = cattrs.Converter(detailed_validation=True)
_converter.register_structure_hook(str, _text)
for _kind in (int, bool):
    _converter.register_structure_hook(_kind, _exactly(_kind))
_converter.register_structure_hook_func(_of(Literal), _one_of)
_converter.register_structure_hook_factory(_of(tuple), _list_only)
_converter.register_structure_hook_factory(_of(Mapping), _mapping)
_converter.register_structure_hook_factory(has, _record)
_converter.register_unstructure_hook_factory(has, _plain)
