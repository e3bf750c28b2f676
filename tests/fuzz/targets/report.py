"""The report and the files beside it, which are judged, published, printed and stored."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agent.documents import LARGEST_REPORT, load
from agent.report import history, published
from agent.report.drift import Counts
from agent.report.printable import printable
from agent.report.records import (
    Change,
    Condition,
    Outcome,
    Report,
    changes_from_plain,
    from_plain,
    report_from_json,
    report_to_json,
    to_plain,
)
from agent.report.verdict import NoReport, Verdict, read_report, why_not_ready
from agent.reporter.http.metrics import render
from agent.reporter.kubernetes.node import Node, desired, node_patch, status_patch
from agent.reporter.settings import Settings, read_labels, read_settings
from agent.service.apply_socket import Progress
from tests.fuzz.targets import choose, chosen

FOLDER = Path(tempfile.mkdtemp(prefix="trackbed-fuzz-report-"))
FILE = FOLDER / "file"
SETTINGS = Settings("n1", "https://api", "/ca", required_resources=("a.com/vf",))


def _report(data: bytes) -> None:
    FILE.write_bytes(data)
    with suppress(NoReport):
        report = read_report(FILE)
        reasons = why_not_ready(report, "boot", 100.0, "hash")
        verdict = Verdict(report, tuple(reasons), 0.0, True)
        printable("\n".join(reasons)).encode()
        for accept in ("", "application/openmetrics-text"):
            render(verdict, Counts(Counter(links=1)), accept)
        wanted = desired(verdict, SETTINGS, (), Node("u", "1"), False)
        json.dumps([node_patch(wanted, Node("u", "1")), status_patch(wanted, Node("u", "1"), 1e9)]).encode()
        assert report_from_json(report_to_json(report)) == report


def _published(data: bytes) -> None:
    FILE.write_bytes(data)
    published.read(FILE)


def _history(data: bytes) -> None:
    (FOLDER / history.NAME).write_bytes(data)
    for entry in history.read(FOLDER):
        json.dumps(to_plain(entry))


def _settings(data: bytes) -> None:
    FILE.write_bytes(data)
    for read in (read_settings, read_labels):
        with suppress(ValueError):
            read(FILE)


def _plan(data: bytes) -> None:
    with suppress(ValueError):
        changes_from_plain(load(data, LARGEST_REPORT))


def _progress(data: bytes) -> None:
    with suppress(ValueError):
        from_plain(load(data, LARGEST_REPORT), Progress)


def check(data: bytes) -> None:
    """Read one file."""
    choose(data, (_report, _published, _history, _settings, _plan, _progress))


def seeds() -> Sequence[bytes]:
    """One file of each form."""
    outcome = Outcome(Change("vfs", "0000:21:00.0", "count", 4, 5), "failed", "ENOSPC", "lower it")
    condition = Condition("Converged", "False", "Failed", "why", remedy="do")
    whole = Report("n1", "hash", "boot", "0.1", False, True, uptime=99.0, conditions=(condition,), outcomes=(outcome,))
    entry = history.Entry(1.0, "boot", "hash", "event", outcome)
    plain = {"ready": True, "outcomes": [to_plain(outcome)], "conditions": [to_plain(condition)]}
    labels = {"labels": [{"key": "a", "value": "b", "role": "plugin", "resource": "a.com/vf"}]}
    return [
        chosen(0, report_to_json(whole).encode()),
        chosen(1, json.dumps(to_plain(published.Published("boot", 7, True, "why", 1.0, "d"))).encode()),
        chosen(2, (json.dumps(to_plain(entry)) + "\n").encode() * 2),
        chosen(3, json.dumps({"node_name": "n1", "server": "https://a", "ca_file": "/ca"}).encode()),
        chosen(3, json.dumps(labels).encode()),
        chosen(4, json.dumps([to_plain(outcome.change)]).encode()),
        chosen(5, json.dumps(plain).encode()),
    ]
