"""What the report file says of the node, and whether it can be believed."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from agent import runtime
from agent.documents import LARGEST_REPORT, read
from agent.report import publisher, records
from agent.report.records import Report, report_from_json


class NoReport(Exception):
    """There is no report that can be read; says why, and the remedy."""


def read_report(folder: Path) -> Report:
    """The report in the agent's run-time folder.

    :raises NoReport: it is not there or cannot be read.
    """
    path = folder / publisher.REPORT
    try:
        return report_from_json(read(path, LARGEST_REPORT))
    except FileNotFoundError:
        raise NoReport(
            f"{path} is not there: the agent has not run since the boot, or could not write it; "
            f"systemctl start trackbed; df {folder}"
        ) from None
    except (OSError, ValueError) as error:
        raise NoReport(
            f"{path}: {error}; is another version of the agent running? systemctl restart trackbed"
        ) from None


def unbelievable(report: Report) -> list[str]:
    """Why the report says nothing of the node as it is now; empty if it is of this boot, and fresh."""
    # Of a report that says that all is well, what is left is what speaks against the report itself.
    return why_not(evolve(report, ready=True, conditions=()), None)


def why_not(report: Report, wanted_hash: str | None) -> list[str]:
    """Why the node is not ready for a spec (any, if None); empty if it is."""
    return records.why_not(report, runtime.boot_id(), runtime.uptime(), wanted_hash)
