"""The history: a file that survives the agent, and stays small."""

import copy
import json
import os
from pathlib import Path

import pytest
from attrs import evolve

from agent.report import history
from agent.report.history import History, read
from agent.report.records import Change, Outcome

CHANGE = Change("links", "0000:21:00.0", "mtu", 1500, 9000)
APPLIED = Outcome(CHANGE, "applied")
FAILED = Outcome(evolve(CHANGE, field="state"), "failed", "EBUSY", "see dmesg")


@pytest.fixture
def kept(tmp_path: Path) -> History:
    return History(tmp_path, "boot-1")


def test_what_was_written_is_read_back_and_the_next_boot_appends_to_it(kept: History, tmp_path: Path) -> None:
    assert kept.record([APPLIED, FAILED], "h1", "event 0000:21:00.0") == ""
    History(tmp_path, "boot-2").record([APPLIED], "h1", "start")
    first, second, third = read(tmp_path)
    assert (first.boot_id, first.spec_hash, first.trigger, first.outcome) == (
        "boot-1",
        "h1",
        "event 0000:21:00.0",
        APPLIED,
    )
    assert (second.outcome, third.boot_id) == (FAILED, "boot-2")
    assert first.time > 1_600_000_000


def test_a_repeated_failure_is_written_once_and_each_applied_change_always(kept: History, tmp_path: Path) -> None:
    for _ in range(3):
        kept.record([APPLIED, FAILED], "h1", "retry")
    assert [entry.outcome.result for entry in read(tmp_path)] == ["applied", "failed", "applied", "applied"]
    kept.record([], "h1", "resync")
    kept.record([FAILED], "h1", "resync")
    assert [entry.outcome.result for entry in read(tmp_path)][-1] == "failed"
    assert len(list(read(tmp_path))) == 5


def test_a_history_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / history.NAME)
    with pytest.raises(OSError, match="not a regular file"):
        list(read(tmp_path))


def test_a_line_that_a_power_cut_has_cut_does_not_affect_others(kept: History, tmp_path: Path) -> None:
    kept.record([APPLIED], "h1", "start")
    with (tmp_path / history.NAME).open("a") as file:
        file.write('{"time": 1.0, "boot')
    kept.record([APPLIED], "h2", "start")
    assert [entry.spec_hash for entry in read(tmp_path)] == ["h1", "h2"]


def test_lines_with_odd_values_are_left_out(kept: History, tmp_path: Path) -> None:
    kept.record([APPLIED], "h1", "start")
    [line] = (tmp_path / history.NAME).read_text().splitlines()
    entry = json.loads(line)
    odd = copy.deepcopy(entry)
    odd["outcome"]["change"]["target"] = "x#y"
    (tmp_path / history.NAME).write_text(f"{json.dumps({**entry, 'time': 1e300})}\n{json.dumps(odd)}\n{line}\n")
    damaged: dict[Path, int] = {}
    assert [entry.spec_hash for entry in read(tmp_path, damaged.__setitem__)] == ["h1"]
    assert damaged == {tmp_path / history.NAME: 2}


def test_the_history_takes_at_most_two_files_of_the_largest_size(
    kept: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LARGEST", 2000)
    for number in range(100):
        kept.record([APPLIED], f"h{number}", "retry")
    # After the last entry the file may just have been renamed.
    assert {path.name for path in tmp_path.iterdir()} <= {history.NAME, f"{history.NAME}.1"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2400
    hashes = [entry.spec_hash for entry in read(tmp_path)]
    assert hashes == [f"h{number}" for number in range(100 - len(hashes), 100)]


def test_a_missing_folder_is_logged_once_and_nothing_fails(tmp_path: Path) -> None:
    kept = History(tmp_path / "absent", "boot-1")
    assert "No such file" in kept.record([APPLIED], "h1", "start")
    assert kept.record([APPLIED], "h1", "start") == ""
    assert list(read(tmp_path / "absent")) == []
