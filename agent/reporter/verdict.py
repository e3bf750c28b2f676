"""What the report says at this moment: it grows stale by itself."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve, frozen

from agent.documents import LARGEST_REPORT, read
from agent.report.records import STALE, Report, report_from_json, why_not
from agent.runtime import boot_id, uptime


@frozen
class Verdict:
    """The report, None if there is none. ``reasons``: why the node is not ready; ``age``: seconds since the heartbeat.

    ``fresh``: the report is of this boot, and somebody vouches for it.
    """

    report: Report | None
    reasons: tuple[str, ...]
    age: float = 0.0
    fresh: bool = False

    @property
    def ready(self) -> bool:
        """Whether the node is ready by a fresh report of this boot."""
        return not self.reasons

    def beyond_heartbeat(self) -> Verdict:
        """What it says, and not how old that is."""
        report = self.report
        return evolve(self, age=0.0, report=report and evolve(report, heartbeat=0.0, uptime=0.0))


def look(path: Path) -> Verdict:
    """Read the report and judge it."""
    try:
        report = report_from_json(read(path, LARGEST_REPORT))
    except FileNotFoundError:
        return Verdict(None, (f"{path} is not there: the agent has not run since the boot, or could not write it",))
    except (OSError, ValueError) as error:
        return Verdict(None, (f"{path}: {error}",))
    now, boot = uptime(), boot_id()
    age = max(0.0, now - report.uptime)
    return Verdict(report, tuple(why_not(report, boot, now)), age, report.boot_id == boot and age <= STALE)
