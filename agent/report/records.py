"""The records of changes, outcomes and reports, and their conversion to JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeVar

import cattrs
from attrs import frozen

from agent.documents import LARGEST_REPORT, load
from agent.report.target import device_of


@frozen
class Numbers:
    """Numbers that a device takes in one step, by name and in the order of the names. None: it does not have that number."""

    values: tuple[tuple[str, int | None], ...]

    @classmethod
    def of(cls, values: Mapping[str, int | None]) -> Numbers:
        """The record of these numbers."""
        return cls(tuple(sorted(values.items())))

    @property
    def present(self) -> dict[str, int]:
        """The numbers that the device has."""
        return {name: value for name, value in self.values if value is not None}

    def __str__(self) -> str:
        return " ".join(f"{name}={say_value(value)}" for name, value in self.values)


Mode = Literal["read", "write"]
"""What a call into the kernel does to the state of a kind."""

Value = str | int | bool | Numbers | None
Record = TypeVar("Record")

SETTLING = "it may come right by itself"
"""The error of a change whose grace period is not over yet."""

HOST = "host"
"""The target of changes that concern no device: sysctls, hugepages, loaded modules."""

WHOLE_KIND = "*"
"""The field of a change that stands for all changes of its kind, while they are unknown until other changes are made."""


class Disruption(IntEnum):
    """How a change disturbs the users of a device. Each level includes those before it."""

    NONE = 0
    REBIND = 1
    LINK_FLAP = 2
    VF_RESET = 3
    REBOOT = 4

    @classmethod
    def parse(cls, text: str) -> Disruption:
        """The level called ``text`` ("link-flap").

        :raises ValueError: there is no such level.
        """
        try:
            return cls[text.upper().replace("-", "_")]
        except KeyError:
            raise ValueError(f"{text!r} is not a disruption; one of {', '.join(map(str, cls))}") from None

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


class Place(NamedTuple):
    """What a change sets."""

    kind: str
    target: str
    field: str


Key = tuple[Place, Value]
"""What a change sets, and to which value. Changes with the same key are the same, whatever the value was before."""


@frozen
class Change:
    """One change of one field to its desired value.

    ``target`` is a physical function's PCI address, ``ADDRESS#N`` for its VF N, or ``host`` for what belongs to no device.
    ``affected``: the users whom the change would disturb. ``blocker``: why it cannot be made (then it is not tried), and
    ``remedy``: what to do about that. ``grace_period``: seconds to wait before it is made, since the value may become right by
    itself; with a blocker: the blocker may go away by itself, so the change is soon planned again.
    ``skip_if_owned``: it is not made while another program owns the VF.
    ``required``: the node is not ready without it. (For a NIC's change, the NIC must be required, too.)
    ``original``: the spec no longer has a value, so the one from before the agent's first change in this boot is restored.
    ``note``: why it is made, if neither the spec nor another program's write is the reason.
    """

    kind: str
    target: str
    field: str
    before: Value
    after: Value
    disruption: Disruption = Disruption.NONE
    affected: tuple[str, ...] = ()
    blocker: str = ""
    remedy: str = ""
    grace_period: float = 0.0
    skip_if_owned: bool = False
    required: bool = True
    original: bool = False
    note: str = ""

    @property
    def place(self) -> Place:
        """What it sets."""
        return Place(self.kind, self.target, self.field)

    @property
    def key(self) -> Key:
        """Which change it is."""
        return self.place, self.after

    @property
    def number(self) -> int:
        """``after`` of a field whose value is one number."""
        return self.after if isinstance(self.after, int) else 0

    @property
    def device(self) -> str:
        """The physical function's PCI address, or :data:`HOST`."""
        return device_of(self.target)

    def __str__(self) -> str:
        why = "as it was before" if self.original else self.note
        values = f"{say_value(self.before)} -> {say_value(self.after)}"
        return f"{self.kind} {self.target} {self.field}: {values}{why and f' ({why})'}"


def say_value(value: Value) -> str:
    """A value of a change as people read it."""
    if value is None:
        return "none"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


Result = Literal["applied", "failed", "deferred", "unsupported", "blocked"]


@frozen
class Outcome:
    """The result of a change. ``blocked``: it has a blocker; ``deferred``: the spec does not allow its disruption now."""

    change: Change
    result: Result
    error: str = ""
    remedy: str = ""


Status = Literal["True", "False", "Unknown"]
Stage = Literal["device", "network", "cluster"]
Severity = Literal["required", "warn"]
Certainty = Literal["certain", "likely", "unknown"]
"""How sure a verdict is.

``certain``: the agent has read it. ``likely``: it follows from counted losses. ``unknown``: a check gave no answer.
"""
LinkState = Literal["good", "suspect", "quarantined", "probation"]


@frozen
class FunctionFault:
    """Why a condition does not hold for one function: ``target`` is a PF or a VF, :data:`HOST`, or the name of a NIC not found.

    ``severity``: ``required`` makes the function not ready. That does not depend on whether the node requires its NIC.
    """

    target: str
    reason: str
    message: str
    severity: Severity = "required"
    certainty: Certainty = "certain"


@frozen
class Condition:
    """One statement about the node; ``reason`` is a CamelCase word, as Kubernetes wants it.

    ``remedy``: what to do about it. It is empty if the message lists several faults, each with its remedy.
    ``faults``: the functions for which it does not hold, also those of NICs that the node does not require. A condition that is
    not True and has none is about the node as a whole.
    """

    type: str
    status: Status
    reason: str
    message: str = ""
    stage: Stage = "device"
    severity: Severity = "required"
    remedy: str = ""
    faults: tuple[FunctionFault, ...] = ()

    @property
    def text(self) -> str:
        """The message with the remedy."""
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


@frozen
class VfVerdict:
    """Why a VF is not ready although its PF is. ``since``: as that of :class:`Report`."""

    index: int
    reason: str
    message: str
    certainty: Certainty = "certain"
    since: float = 0.0


@frozen
class NicVerdict:
    """Whether one NIC of the spec is ready, and with it its VFs, except those in ``faulty_vfs``.

    ``pci``: the address of its PF; empty if it was not found. ``required``: the node requires it. ``link``: the state of its
    link, by its losses of carrier. ``since``: when ``ready`` last changed, as that of :class:`Report`. ``vfs``: the PCI
    addresses of its VFs by their index; empty for a VF that is away.
    """

    name: str
    pci: str
    required: bool
    ready: bool
    reason: str = ""
    message: str = ""
    certainty: Certainty = "certain"
    since: float = 0.0
    link: LinkState = "good"
    vfs: tuple[str, ...] = ()
    faulty_vfs: tuple[VfVerdict, ...] = ()

    @property
    def ready_vfs(self) -> int:
        """How many of its VFs are ready."""
        faulty = {vf.index for vf in self.faulty_vfs}
        return sum(bool(pci) and index not in faulty for index, pci in enumerate(self.vfs)) if self.ready else 0


@frozen
class Report:
    """The state of the node; written to /run/trackbed/report.json.

    ``time``: when its content last changed (seconds since the epoch). ``heartbeat``: when the supervisor last confirmed it.
    ``uptime``: the same moment in seconds since the boot (CLOCK_BOOTTIME). The node judges the age of the report by ``uptime``,
    which does not jump when the clock is set.
    ``ready`` refers to the spec in force, ``spec_hash``. ``up_to_date`` is False while a newer spec waits or was refused;
    ``refusal`` says why.
    ``generation`` grows within the boot ``boot_id`` whenever anything but the times changes.
    ``announcement`` identifies the announcement of a change that the agent makes once it is published.
    ``devices``: a hash of the spec's PFs and their VFs' drivers; empty if it is unknown.
    ``kubelet``: when the kubelet was last started (seconds since the epoch); 0: there is none.
    ``since``: when ``ready`` last changed, in seconds since the boot, as ``uptime``.
    ``nics``: a verdict for each NIC of the spec; none if the last pass ended early.
    """

    node_name: str
    spec_hash: str
    boot_id: str
    agent_version: str
    ready: bool
    up_to_date: bool
    refusal: str = ""
    generation: int = 0
    time: float = 0.0
    heartbeat: float = 0.0
    uptime: float = 0.0
    devices: str = ""
    kubelet: float = 0.0
    announcement: str = ""
    since: float = 0.0
    conditions: tuple[Condition, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    nics: tuple[NicVerdict, ...] = ()


def _shown(value: str) -> str:
    """The text with escapes for bytes that are not UTF-8: a netdev's name may have any bytes."""
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()


_converter = cattrs.Converter()
_converter.register_unstructure_hook(Disruption, str)
_converter.register_structure_hook(Disruption, lambda value, _: Disruption.parse(value))
_converter.register_structure_hook_func(lambda t: t == Value, lambda value, _: value_from_plain(value))
_converter.register_unstructure_hook(str, _shown)
_converter.register_unstructure_hook(Numbers, lambda numbers: dict(numbers.values))
_converter.register_structure_hook(str, lambda value, _: _encodable(str(value)))
_converter.register_structure_hook(float, lambda value, _: _finite(value))


def _encodable(value: Any) -> Any:
    """Refuse half of a surrogate pair. JSON can express it and UTF-8 cannot, so it could be neither printed nor sent."""
    if isinstance(value, str) and not value.isascii():
        value.encode()
    return value


def _finite(value: Any) -> float:
    """Refuse NaN and infinity: no comparison with NaN is true, so a report with it would never be too old."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def value_from_plain(value: Any) -> Value:
    """Read the :func:`to_plain` of a value back.

    :raises ValueError: it is not the value of a change.
    """
    if isinstance(value, dict):
        if not all(number is None or type(number) is int for number in value.values()):
            raise ValueError(f"{value!r} has values that are no numbers")
        return Numbers.of(value)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not the value of a change")
    plain: Value = _encodable(value)
    return plain


def to_plain(record: Any) -> Any:
    """Plain data (dicts, lists, scalars) of any record of this module."""
    return _converter.unstructure(record)


def report_to_json(report: Report) -> str:
    """The report file's text."""
    return json.dumps(to_plain(report), sort_keys=True) + "\n"


def report_from_json(text: str) -> Report:
    """Read :func:`report_to_json` back.

    :raises ValueError: the text is not a report.
    """
    return from_plain(load(text, LARGEST_REPORT), Report)


def changes_from_plain(document: Any) -> tuple[Change, ...]:
    """Read the changes of `trackbed plan --json` back.

    :raises ValueError: the document is something else.
    """
    return from_plain(document, tuple[Change, ...])


def from_plain(document: Any, record: type[Record]) -> Record:
    """Read :func:`to_plain` back.

    :raises ValueError: the document is something else.
    """
    try:
        return _converter.structure(document, record)
    except (cattrs.BaseValidationError, ValueError, TypeError, OverflowError) as error:
        # cattrs describes a fault in this form: required field missing @ $.conditions[0].type
        faults = cattrs.transform_error(error) if isinstance(error, cattrs.BaseValidationError) else [error]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        name = "list of changes" if record == tuple[Change, ...] else record.__name__
        raise ValueError(f"not a {name} of this agent: {faults[0]}{more}") from None
