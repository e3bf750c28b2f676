"""The file on the control host in which a deploy notes how long its operations take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from agent.documents import load, read
from agent.report.records import from_plain, to_plain
from agent.runtime import write_atomically
from fleet.paths import state

LARGEST = 16 << 20
"""Bytes. A deploy of 8,000 hosts has less than one million."""


@frozen
class Operation:
    """An operation of a deploy, with the seconds of its slowest host and of the median one."""

    name: str
    hosts: int
    longest: float
    median: float
    slowest: str


@frozen
class LastDeploy:
    """A deploy that is running or has ended.

    ``files``: the inventory and the deploy's file. ``began``: when the deploy began (seconds since the epoch); ``noted``: when
    this was written. ``operations``: those that have ended, in their order. ``hosts``: each host's seconds in operations.
    """

    files: tuple[str, ...]
    began: float
    noted: float
    operations: tuple[Operation, ...]
    hosts: Mapping[str, float]


def duration(seconds: float) -> str:
    """A duration in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"


def default_path() -> Path:
    """The path of the file."""
    return state() / "deploy.json"


def write(path: Path, deploy: LastDeploy) -> None:
    """Replace the file.

    :raises OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(to_plain(deploy)) + "\n", 0o644)


def last_deploy(path: Path) -> LastDeploy | None:
    """The last deploy; None if there is no such file.

    :raises ValueError: the file has another format.
    :raises OSError: it cannot be read.
    """
    try:
        return from_plain(load(read(path, LARGEST), LARGEST), LastDeploy)
    except FileNotFoundError:
        return None
