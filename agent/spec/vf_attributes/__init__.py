"""The attributes that a PF sets for its VFs: most are in ``table.py``; each file of this folder has a tuple ``ATTRIBUTES``.

The keys of the spec, the plan, the write, what a PF reports, what ``inspect`` prints and the documentation of its key
follow from these records.
"""

from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from attrs import Attribute, field, frozen, make_class
from attrs import fields as fields_of

Value: TypeAlias = str | int | bool | None
Values: TypeAlias = Mapping[str, Any]

NOT_REPORTED = 0xFFFFFFFF
"""The value that rtnl_fill_vfinfo() sets before it calls the driver, which may leave it."""


@frozen(kw_only=True)
class Refusal:
    """A write that the kernel refused. ``present``: the present values of its ``Together``; ``netdev``: the PF's."""

    errno: int
    value: Any
    present: Values
    netdev: str


@frozen
class Together:
    """Attributes of the spec that one netlink attribute sets together. ``defaults``: the values of those that are not given.

    ``message`` gets a VF's index and all of the values. It returns the netlink attribute's name in pyroute2, and its content.
    """

    defaults: Values
    message: Callable[[int, Values], tuple[str, Values]]


def word(position: int) -> Callable[[bytes], int]:
    """A function that reads one number of a struct of 32-bit numbers; number 0 is the VF's index."""
    # Each pass reads every VF: no arithmetic, no repeated look-ups.
    unpack: Callable[[bytes], tuple[int]] = struct.Struct(f"={4 * position}xI").unpack_from
    return lambda content: unpack(content)[0]


_second_word = word(1)


def switch(content: bytes) -> bool | None:
    """The switch in a struct of the VF's index and a switch; None: the driver does not report it."""
    value = _second_word(content)
    return None if value == NOT_REPORTED else bool(value)


@frozen(kw_only=True)
class VfAttribute:
    """One attribute of a VF that its PF sets.

    The spec: ``name`` is the key; ``type`` and ``validator`` say what the value may be. ``of_one_vf``: it is an address, which
    no two VFs share. ``check`` gets all attributes of a VF, and returns why this one contradicts another; empty if none does.

    Reading: ``netlink`` is pyroute2's name of the attribute below IFLA_VF_INFO that reports the value. ``read`` makes the value
    from its content. ``unreported`` is the value while the kernel does not report it.

    Writing: the value goes into ``key`` of the same netlink attribute, as ``encode`` returns it, or into the message of
    ``together``. Attributes are written in their ``order``, the lowest first. ``last`` gets the wanted and the reported
    attributes, and returns whether to write this one after all others. ``remakes_netdev``: after the write the VF's driver must
    be bound again, which makes a new netdev. ``explain`` returns an errno and a text for a refusal whose reason is known.

    For people: ``meaning``, ``unit`` and ``default`` make a row of the reference. ``show`` returns what ``inspect``
    prints.
    """

    name: str
    type: Any
    meaning: str
    unit: str = ""
    default: str = "left alone"
    order: int = 1000
    validator: Any = None
    of_one_vf: bool = False
    check: Callable[[Any], str] = lambda attributes: ""
    netlink: str
    read: Callable[[bytes], Any]
    unreported: Value = None
    key: str = ""
    encode: Callable[[Any], Any] = lambda value: value
    together: Together | None = None
    last: Callable[[Any, Any], bool] | None = None
    remakes_netdev: bool = False
    explain: Callable[[Refusal], tuple[int, str] | None] = lambda refusal: None
    show: Callable[[Any], tuple[str, ...]] | None = None

    def shown(self, vf: Any) -> tuple[str, ...]:
        """What ``inspect`` prints for a VF: by default the name and the value, unless the value is not reported."""
        if self.show is not None:
            return self.show(vf)
        value = getattr(vf, self.name)
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        return () if value == self.unreported else (f"{self.name.replace('_', ' ')} {text}",)


@cache
def ordered() -> tuple[VfAttribute, ...]:
    """Every record of this folder, in the order of the writes; records of the same order by name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return tuple(sorted((each for module in modules for each in module.ATTRIBUTES), key=lambda a: (a.order, a.name)))


@cache
def by_name() -> Mapping[str, VfAttribute]:
    """The records by name, in the same order."""
    return {attribute.name: attribute for attribute in ordered()}


@cache
def of_one_vf() -> tuple[str, ...]:
    """The names of the attributes that no two VFs share."""
    return tuple(attribute.name for attribute in ordered() if attribute.of_one_vf)


def with_wanted(record: type, own: list[Attribute[Any]]) -> list[Attribute[Any]]:
    """For attrs (``field_transformer``): adds a field for each attribute that the spec may give; None leaves it alone."""
    given = {each.name: field(default=None, validator=each.validator, type=each.type | None) for each in ordered()}
    return _with(record, own, given)


def with_reported(record: type, own: list[Attribute[Any]]) -> list[Attribute[Any]]:
    """For attrs (``field_transformer``): adds a field for each attribute that a PF reports."""
    given = {each.name: field(default=each.unreported, type=each.type | None) for each in ordered()}
    return _with(record, own, given)


def _with(record: type, own: list[Attribute[Any]], given: Mapping[str, Any]) -> list[Attribute[Any]]:
    made = make_class(record.__name__, dict(given))
    # The parser and the schema look for the types here.
    record.__annotations__ |= {name: made.__annotations__[name] for name in given}
    required = [each for each in own if each.name == "index" and not each.kw_only]
    return [*required, *fields_of(made), *(each for each in own if each not in required)]
