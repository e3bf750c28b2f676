"""What the reporter has told Kubernetes: it writes this, `trackbed status` shows it, and the agent waits for it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from agent import documents
from agent.documents import LARGEST_REPORT, load
from agent.report.records import Change, from_plain, report_from_json, to_plain
from agent.runtime import boot_id, journal, write_atomically

PATH = Path("/run/trackbed-reporter/published.json")
"""Where the unit's reporter writes it; readable by all."""

SETTINGS = Path("/etc/trackbed/reporter.json")
"""The reporter's settings for Kubernetes; on nodes that have none, nothing is published there."""


ACKNOWLEDGEMENT = 10.0
"""Seconds for which a disruptive change waits until NotReady is published: an API server that is gone must not stop repairs."""

_LOOK = 0.05


@frozen
class Published:
    """What the API server has acknowledged.

    ``boot_id`` and ``generation``: of the newest report that is published as a whole; ``ready``: what it says.
    ``error``: why something newer is not published; empty if all is. ``since``: since when it is so (seconds since the epoch).
    ``devices``: those of the report that the device plugins were started with.
    """

    boot_id: str = ""
    generation: int = 0
    ready: bool = False
    error: str = ""
    since: float = 0.0
    devices: str = ""

    def not_ready(self, boot_id: str, generation: int) -> bool:
        """Whether NotReady is published for this generation, or a later one, of this boot."""
        return self.boot_id == boot_id and self.generation >= generation and not self.ready


def read(path: Path) -> Published | None:
    """What is published; None: nothing yet, or nothing that can be read."""
    try:
        return from_plain(load(documents.read(path, LARGEST_REPORT), LARGEST_REPORT), Published)
    except (OSError, ValueError):
        return None


def write(path: Path, published: Published) -> bool:
    """Replace the file; False: it cannot be written, and was removed, since what it says is no longer true."""
    try:
        write_atomically(path, json.dumps(to_plain(published)) + "\n", 0o644)
    except OSError as error:
        journal(f"{path} cannot be written and is removed: {error.strerror}; make room: df {path.parent}")
        with suppress(OSError):
            path.unlink()
        return False
    return True


def wait_until_not_ready(
    report: Path, change: Change, path: Path = PATH, settings: Path = SETTINGS, timeout: float = ACKNOWLEDGEMENT
) -> str:
    """Wait until it is published that the node is not ready because of ``change``; at once where nothing is published.

    :param report: the report's file, in which the change is announced.
    :param timeout: seconds after which it is given up.
    :returns: why it was given up; empty: it is published.
    """
    end = time.monotonic() + timeout
    while settings.exists():
        generation = _announced(report, change)
        done = read(path)
        if generation is not None and done is not None and done.not_ready(boot_id(), generation):
            return ""
        if time.monotonic() >= end:
            why = done.error if done is not None and done.error else "is trackbed-reporter running?"
            return f"NotReady could not be published within {timeout:.0f} s ({why}); going on with {change}"
        time.sleep(_LOOK)
    return ""


def _announced(report: Path, change: Change) -> int | None:
    """The generation of the report that announces the change; None: it is not written yet."""
    try:
        found = report_from_json(documents.read(report, LARGEST_REPORT))
    except (OSError, ValueError):
        return None
    announced = any(c.reason == "Converging" and c.message == str(change) for c in found.conditions)
    return found.generation if announced and not found.ready else None
