"""The journal's entry of a pass: what journald gets, and what happens without it."""

import re
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import get_args

import pytest

from agent.report.records import Change, Condition, Outcome, Report, Result
from agent.service import pass_log
from agent.service.pass_log import DEBUG, INFO, LONGEST, MOST_CHANGES, MOST_CONDITIONS, QUIET, PassLog
from tests.journald import heard, listening

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"

MTU = Change("links", "0000:21:00.0", "mtu", 1500, 9000)
CONVERGED = Condition("Converged", "True", "AsWanted")


def after(*outcomes: Outcome, conditions: tuple[Condition, ...] = (CONVERGED,), ready: bool = True) -> Report:
    return Report("n1", "h1", "", "", ready, True, outcomes=outcomes, conditions=conditions)


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with listening(tmp_path / "journal") as made:
        monkeypatch.setattr(pass_log, "SOCKET", tmp_path / "journal")
        yield made


def test_an_entry_says_what_the_pass_did(journald: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    carrier = Condition("Carrier", "False", "NoCarrier", "no carrier on ens1f0")
    failed = Outcome(MTU, "failed", "EBUSY")
    PassLog().write(
        after(Outcome(MTU, "applied"), failed, conditions=(CONVERGED, carrier), ready=False),
        "event 0000:21:00.0 0000:41:00.0",
        0.25,
    )
    assert heard(journald) == {
        "MESSAGE": ["pass (event): 1 applied, 1 failed; not ready"],
        "MESSAGE_ID": [pass_log.MESSAGE_ID],
        "PRIORITY": [INFO],
        "SYSLOG_IDENTIFIER": ["trackbed"],
        "TRACKBED_TRIGGER": ["event"],
        "TRACKBED_DEVICES": ["0000:21:00.0 0000:41:00.0"],
        "TRACKBED_OMITTED": ["0"],
        "TRACKBED_DURATION_USEC": ["250000"],
        "TRACKBED_SPEC_HASH": ["h1"],
        "TRACKBED_READY": ["0"],
        "TRACKBED_UP_TO_DATE": ["1"],
        "TRACKBED_APPLIED": ["1"],
        "TRACKBED_FAILED": ["1"],
        "TRACKBED_DEFERRED": ["0"],
        "TRACKBED_UNSUPPORTED": ["0"],
        "TRACKBED_BLOCKED": ["0"],
        "TRACKBED_NOT_TRUE": ["Carrier False NoCarrier"],
        "TRACKBED_CHANGE": [
            "applied: links 0000:21:00.0 mtu: 1500 -> 9000",
            "failed: links 0000:21:00.0 mtu: 1500 -> 9000: EBUSY",
        ],
    }
    assert capsys.readouterr().err == ""


def test_a_pass_without_news_has_the_priority_debug(journald: socket.socket) -> None:
    log = PassLog(clock=count(step=QUIET).__next__)
    waiting = Outcome(MTU, "deferred")
    passes = [
        (after(), INFO),
        (after(), DEBUG),
        (after(waiting), INFO),
        (after(waiting), DEBUG),
        (after(waiting, ready=False), INFO),
        (after(Outcome(MTU, "applied")), INFO),
        (after(Outcome(MTU, "applied")), INFO),
        (after(), DEBUG),
    ]
    for result, priority in passes:
        log.write(result, "resync", 0.01)
        assert heard(journald)["PRIORITY"] == [priority]


def test_passes_without_news_have_one_entry_a_minute(journald: socket.socket) -> None:
    times = [*range(0, 121, 10), 130, 130]
    log = PassLog(clock=map(float, times).__next__)
    for _ in range(13):
        log.write(after(), "event", 0.01)
    entries = [heard(journald) for _ in range(3)]
    assert [(entry["PRIORITY"], entry["TRACKBED_OMITTED"]) for entry in entries] == [
        ([INFO], ["0"]),
        ([DEBUG], ["5"]),
        ([DEBUG], ["5"]),
    ]
    log.write(after(), "event", 0.01)
    log.write(after(Outcome(MTU, "applied")), "event", 0.01)
    entry = heard(journald)
    assert (entry["PRIORITY"], entry["TRACKBED_OMITTED"]) == ([INFO], ["1"])


def test_no_entry_is_large(journald: socket.socket) -> None:
    outcomes = [Outcome(MTU, "failed", "line\n" * 10_000) for _ in range(1000)]
    conditions = tuple(Condition(f"C{number}", "False", "R" * 1000) for number in range(1000))
    devices = " ".join(f"0000:{bus:02x}:00.0" for bus in range(255))
    PassLog().write(after(*outcomes, conditions=conditions, ready=False), f"event {devices}", 0.01)
    entry = heard(journald)
    assert entry["TRACKBED_FAILED"] == ["1000"]
    assert len(entry["TRACKBED_CHANGE"]) == MOST_CHANGES
    assert len(entry["TRACKBED_NOT_TRUE"]) == MOST_CONDITIONS
    assert max(len(value) for values in entry.values() for value in values) == LONGEST
    assert "\n" in entry["TRACKBED_CHANGE"][0]


def test_without_journald_a_pass_with_news_is_written_to_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pass_log, "SOCKET", tmp_path / "nothing")
    log = PassLog()
    for _ in range(3):
        log.write(after(), "resync", 0.01)
    assert capsys.readouterr().err == "pass (resync): nothing to change; ready\n"


def test_a_journald_that_hangs_does_not_delay_a_pass(
    journald: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    log = PassLog()
    while not capsys.readouterr().err:
        log.write(after(Outcome(MTU, "applied")), "resync", 0.01)
    assert heard(journald)["TRACKBED_APPLIED"] == ["1"]


def test_the_docs_have_each_field(journald: socket.socket) -> None:
    PassLog().write(after(Outcome(MTU, "failed"), conditions=(), ready=False), "start", 0.01)
    sent = {name for name in heard(journald) if name.startswith("TRACKBED_")} | {"TRACKBED_NOT_TRUE"}
    assert {f"TRACKBED_{result.upper()}" for result in get_args(Result)} <= sent
    text = DOCS.read_text()
    assert set(re.findall(r"`(TRACKBED_\w+)`", text)) == sent
    assert f"MESSAGE_ID={pass_log.MESSAGE_ID}" in text
