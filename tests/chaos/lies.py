"""How long the node, or the API for it, may say that it is ready while the kernel differs from before."""

from collections.abc import Mapping, Sequence

from attrs import frozen

from tests.chaos.faults import Fault
from tests.chaos.oracle import EVENTS, SILENT

SAID = {EVENTS: 2.0, SILENT: 65.0}
"""Seconds for which the report may say ready while the kernel differs: on an emulated node, and by the next full reading."""

HEARTBEAT = 35.0
"""The same while the agent cannot answer: its report is believed until the heartbeat is stale."""

MUTE = 65.0
"""The same in the API while the reporter cannot publish: it is replaced, or tries again later."""

PUBLISHING = 10.0
"""Seconds by which the API may be later than the report. So long a disruptive change waits for it, too (docs/kubernetes.md)."""

CLOCKS = 1.0
"""Seconds by which the times of this host and of the node may be wrong against each other."""


@frozen
class Lie:
    """For how long something was said while a value differed. ``claim``: who said what; ``what``: the name of the value."""

    seconds: float
    claim: str
    what: str


def in_api(kind: str) -> str:
    """The name of a class of values in the results, for what the API showed."""
    return f"{kind}, in the API"


def limits(faults: Sequence[Fault]) -> dict[str, float]:
    """The longest lie that these faults excuse, in seconds, by class."""
    silent, mute = any(fault.silences for fault in faults), any(fault.mutes for fault in faults)
    said = {kind: max(HEARTBEAT, limit) if silent else limit for kind, limit in SAID.items()}
    shown = {kind: max(MUTE, limit) if mute else limit for kind, limit in said.items()}
    return said | {in_api(kind): limit + PUBLISHING + CLOCKS for kind, limit in shown.items()}


def too_long(lies: Mapping[str, Lie], faults: Sequence[Fault]) -> list[str]:
    """What is wrong with these lies, by class."""
    allowed = limits(faults)
    return [
        f"{lie.claim} for {lie.seconds:.1f} s while {lie.what} differed ({kind})"
        for kind, lie in lies.items()
        if lie.seconds > allowed[kind]
    ]
