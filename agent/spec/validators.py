"""Validators for the fields of a spec. Each error names the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

from attrs import Attribute, frozen

from agent.spec.ranges import LARGEST, parse_ranges

MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
SOME_NUMBERS = re.compile(r"[0-9, -]*[0-9][0-9, -]*")
NUMBERS = re.compile(rf"({SOME_NUMBERS.pattern})?")
MOST_VFS = 4096


@frozen
class Matches:
    """A text that matches ``pattern`` in full; ``check`` may refuse it for another reason."""

    pattern: re.Pattern[str]
    remedy: str
    check: Callable[[str], None] | None = None

    def __call__(self, _: object, attribute: Attribute[Any], value: str | None) -> None:
        """Validate a field."""
        if value is None:
            return
        if not self.pattern.fullmatch(value):
            shown = value if len(value) <= 256 else f"{value[:256]} and so on"
            raise ValueError(f"{attribute.name}: {shown!r} is not valid; {self.remedy}")
        if self.check is not None:
            try:
                self.check(value)
            except ValueError as error:
                raise ValueError(f"{attribute.name}: {error}") from None


@frozen
class Each:
    """A list of different items, each valid by ``item``; ``what`` is an item's name in errors."""

    item: Matches
    what: str = "a name"

    def __call__(self, instance: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
        """Validate a field."""
        for name in value:
            self.item(instance, attribute, name)
        if len(set(value)) != len(value):
            raise ValueError(f"{attribute.name}: {self.what} is given twice; keep one")


@frozen
class Within:
    """A number from ``low`` to ``high``."""

    low: int
    high: int
    unit: str

    def __call__(self, _: object, attribute: Attribute[Any], value: int | None) -> None:
        """Validate a field."""
        if value is not None and not self.low <= value <= self.high:
            raise ValueError(f"{attribute.name}: {value} is out of range; give {self.low} to {self.high} {self.unit}")


@frozen
class OneOf:
    """One of some numbers of ``unit``. ``fault`` is what an error says about another one."""

    numbers: tuple[int, ...]
    unit: str
    fault: str

    def __call__(self, _: object, attribute: Attribute[Any], value: int | None) -> None:
        """Validate a field."""
        if value is not None and value not in self.numbers:
            raise ValueError(f"{attribute.name}: {value} {self.fault}")


def _is_unicast(mac: str) -> None:
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise ValueError(f"{mac} is not a unicast address; give one whose first octet is even, and not all zeros")


def _is_list(text: str, below: int = LARGEST) -> None:
    try:
        parse_ranges(text, below)
    except ValueError as error:
        raise ValueError(f"{error}; write it as 0-3,8") from None


unicast_mac = Matches(MAC, "write it as 02:00:5e:10:00:01, in lower case", _is_unicast)
vf_list = Matches(SOME_NUMBERS, "name at least one VF: 0-3,6", partial(_is_list, below=MOST_VFS))
some_cpus = Matches(SOME_NUMBERS, "name at least one CPU: 0-3,8", _is_list)
cpu_list = Matches(NUMBERS, "give numbers and ranges: 0-3,8", _is_list)


def is_date(_: object, attribute: Attribute[Any], value: str) -> None:
    """Validate a date in the form of ISO 8601."""
    try:
        written = date.fromisoformat(value).isoformat()
    except ValueError:
        written = ""
    if written != value:
        raise ValueError(f"{attribute.name}: {value!r} is not a date; write it as 2026-12-31")
