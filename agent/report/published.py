"""What is published in Kubernetes. The reporter writes this file; `trackbed status` and the agent read it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from agent import documents
from agent.documents import LARGEST_REPORT, load
from agent.report.records import from_plain, report_from_json, to_plain
from agent.runtime import boot_id, journal, write_atomically

PATH = Path("/run/trackbed-reporter/published.json")
"""Where the unit's reporter writes it; readable by all."""

SETTINGS = Path("/etc/trackbed/reporter.json")
"""The reporter's settings for Kubernetes. A node without this file is not published there."""

ACKNOWLEDGEMENT = 10.0
"""Seconds that a disruptive change waits for NotReady to be published. A lost API server must not stop repairs."""

REPLACED = 45.0
"""Seconds that it waits if the reporter does not say why nothing is published. By then systemd has replaced a reporter that
hangs (WatchdogSec of its unit), and the next one has published NotReady, or says why not."""

_POLL = 0.05


@frozen
class Published:
    """What the API server has acknowledged.

    ``boot_id``, ``generation`` and ``ready``: those of the newest report that was published completely.
    ``error``: why a newer report is not published; empty if there is none. ``since``: when this state began (seconds since the
    epoch). ``devices``: the report's ``devices`` when the device plugins were last started. ``tainted_until``: when Ready
    was last published, what the taint waited for; empty if the node had none. ``refused``: the API server does not know the
    reporter's credentials (401), by its last answer. Then the deploy brings others.
    """

    boot_id: str = ""
    generation: int = 0
    ready: bool = False
    error: str = ""
    since: float = 0.0
    devices: str = ""
    tainted_until: str = ""
    refused: bool = False

    def not_ready(self, boot_id: str, generation: int) -> bool:
        """Whether NotReady is published for this generation of this boot, or for a later one."""
        return self.boot_id == boot_id and self.generation >= generation and not self.ready


def read(path: Path) -> Published | None:
    """The file's content; None if it is missing or cannot be read."""
    try:
        return parsed(documents.read(path, LARGEST_REPORT, follow=False))
    except (OSError, ValueError):
        return None


def parsed(text: str) -> Published | None:
    """What the file's text says; None if it is something else."""
    try:
        return from_plain(load(text, LARGEST_REPORT), Published)
    except ValueError:
        return None


def write(path: Path, published: Published) -> bool:
    """Replace the file. If it cannot be written, remove the outdated one and return False."""
    try:
        write_atomically(path, json.dumps(to_plain(published)) + "\n", 0o644)
    except OSError as error:
        journal(f"{path} cannot be written and is removed: {error.strerror}; make room: df {path.parent}")
        with suppress(OSError):
            path.unlink()
        return False
    return True


def wait_until_not_ready(
    path: Path,
    announcement: str,
    published: Path = PATH,
    settings: Path = SETTINGS,
    timeout: float = ACKNOWLEDGEMENT,
    replaced: float = REPLACED,
) -> str:
    """Wait until the report with this announcement is published. On a node that is not published, return at once.

    :param path: the report file.
    :param announcement: as in :attr:`Report.announcement`.
    :param timeout: seconds to wait at most if the reporter says why nothing is published.
    :param replaced: seconds to wait at most if it says nothing.
    :returns: why it was not published in that time; empty if it was.
    """
    began = time.monotonic()
    while settings.exists():
        generation = _generation_of(path, announcement)
        latest = read(published)
        if generation is not None and latest is not None and latest.not_ready(boot_id(), generation):
            return ""
        cause = latest.error if latest is not None else ""
        limit = timeout if cause else replaced
        if time.monotonic() - began >= limit:
            return f"NotReady could not be published within {limit:.0f} s ({cause or 'is trackbed-reporter running?'})"
        time.sleep(_POLL)
    return ""


def _generation_of(path: Path, announcement: str) -> int | None:
    """The generation of the report if it has this announcement and is not ready, else None."""
    try:
        report = report_from_json(documents.read(path, LARGEST_REPORT))
    except (OSError, ValueError):
        return None
    return report.generation if report.announcement == announcement and not report.ready else None
