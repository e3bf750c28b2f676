"""Reads the report file, and judges whether the node is ready by it."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from agent import runtime
from agent.documents import LARGEST_REPORT, read
from agent.report import publisher, records
from agent.report.records import Report, report_from_json


class NoReport(Exception):
    """The report is missing or cannot be read. The message says why, and what to do."""


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
    """Why the report does not describe the node as it is now; empty if it is of this boot and has a fresh heartbeat."""
    # With everything in it set to ready, only reasons against the report itself remain.
    return why_not(evolve(report, ready=True, conditions=()), None)


def why_not(report: Report, wanted_hash: str | None) -> list[str]:
    """Why the node is not ready for a spec (any, if None); empty if it is."""
    return records.why_not(report, runtime.boot_id(), runtime.uptime(), wanted_hash)
