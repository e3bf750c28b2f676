"""The report's file and the kubelet's marker, as their readers find them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent.report.publisher import FIRST_PASS, Publisher
from agent.report.records import Condition, NicVerdict, Report, VfVerdict, report_from_json, to_plain
from agent.report.verdict import STALE
from agent.runtime import uptime

CONDITION = {"type": "Converged", "status": "True", "reason": "AsWanted"}


def read(folder: Path) -> Report:
    return report_from_json((folder / "report.json").read_text())


def begin(folder: Path) -> Publisher:
    return Publisher(folder, "boot-1", "v1")


def body(ready: bool = True, **more: Any) -> dict[str, Any]:
    converged = Condition("Converged", "True" if ready else "False", "AsWanted")
    report = to_plain(Report("n1", "h1", "", "", ready, True, conditions=(converged,)))
    return {**report, **more}


def facts(report: Report) -> tuple[Any, ...]:
    return report.ready, [(c.type, c.status, c.reason, c.message) for c in report.conditions]


def nic(name: str, ready: bool, *faulty: int) -> NicVerdict:
    return NicVerdict(name, "", True, ready, faulty_vfs=tuple(VfVerdict(index, "NoCarrier", "") for index in faulty))


def test_each_nic_and_faulty_vf_has_the_time_since_when_it_is_so(tmp_path: Path) -> None:
    publisher = begin(tmp_path)
    publisher.publish_pass(body(nics=to_plain((nic("a", True, 1), nic("b", True)))))
    first, other = read(tmp_path).nics
    assert 0 < first.since == first.faulty_vfs[0].since == other.since <= uptime()
    publisher.publish_pass(body(nics=to_plain((nic("a", True, 1, 2), nic("b", False)))))
    again, changed = read(tmp_path).nics
    assert (again.since, again.faulty_vfs[0]) == (first.since, first.faulty_vfs[0])
    assert again.faulty_vfs[1].since == changed.since > other.since
    generation = read(tmp_path).generation
    publisher.publish_pass(body(nics=to_plain((nic("a", True, 1, 2), nic("b", False)))))
    assert read(tmp_path).generation == generation


def test_while_no_worker_watches_nothing_is_known_of_any_nic(tmp_path: Path) -> None:
    publisher = begin(tmp_path)
    publisher.publish_pass(body(nics=to_plain((nic("a", True, 1),))))
    publisher.publish_unattended("WorkerLost", "it has died")
    (lost,) = read(tmp_path).nics
    assert (lost.ready, lost.reason, lost.certainty, lost.faulty_vfs) == (False, "WorkerLost", "unknown", ())


def test_without_a_worker_the_report_keeps_the_last_result_and_has_the_reason(tmp_path: Path) -> None:
    publisher = begin(tmp_path)
    publisher.publish_pass(body())
    publisher.publish_unattended("WorkerLost", "it is gone")
    publisher.publish_unattended("WorkerStuck", "it hangs")
    lost = ("WorkerAlive", "False", "WorkerStuck", "it hangs")
    assert facts(read(tmp_path)) == (False, [("Converged", "True", "AsWanted", ""), lost])
    assert read(tmp_path).spec_hash == "h1"
    publisher.publish_pass(body())
    assert facts(read(tmp_path)) == (True, [("Converged", "True", "AsWanted", "")])


def test_while_a_device_is_checked_no_other_condition_changes(tmp_path: Path) -> None:
    publisher = begin(tmp_path)
    other = {"type": "Uncontended", "status": "True", "reason": "Alone"}
    publisher.publish_pass(body(conditions=[CONDITION, other]))
    publisher.publish_checking("reading takes long")
    checked = [("Converged", "Unknown", "Checking", "reading takes long"), ("Uncontended", "True", "Alone", "")]
    assert facts(read(tmp_path)) == (False, checked)
    assert not publisher.ready


def test_the_gate_opens_with_the_first_verified_pass_and_stays_open(tmp_path: Path) -> None:
    publisher, marker = begin(tmp_path), tmp_path / FIRST_PASS
    publisher.publish_pass(body(False))
    assert not marker.exists()
    publisher.publish_pass(body())
    assert marker.read_text() == "boot-1\n"
    publisher.publish_pass(body(False))
    assert marker.exists()
    marker.unlink()
    publisher.renew_heartbeat()
    assert marker.read_text() == "boot-1\n"


def test_every_user_may_read_both_files(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        begin(tmp_path).publish_pass(body())
    finally:
        os.umask(before)
    for name in ("report.json", FIRST_PASS):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o644


def test_a_report_that_cannot_be_written_is_logged_once_and_written_when_there_is_room(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    publisher = begin(folder)
    publisher.publish_pass(body())
    (folder / "report.json").unlink()
    (folder / FIRST_PASS).unlink()
    folder.rmdir()
    capfd.readouterr()
    publisher.renew_heartbeat()
    publisher.renew_heartbeat()
    said = capfd.readouterr().err
    for name, means in (("report.json", "counts as not ready"), (FIRST_PASS, "the kubelet's gate waits")):
        (line,) = [line for line in said.splitlines() if f"{folder}/{name} cannot be written: No such file" in line]
        assert means in line
    folder.mkdir()
    publisher.renew_heartbeat()
    assert read(folder).ready
    assert (folder / FIRST_PASS).exists()
    assert "verified" in capfd.readouterr().err
    for name in ("report.json", FIRST_PASS):
        (folder / name).unlink()
    folder.rmdir()
    publisher.renew_heartbeat()
    assert capfd.readouterr().err.count("cannot be written") == 2


def test_an_outdated_report_that_can_be_neither_written_nor_removed_is_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    publisher = begin(tmp_path)
    (tmp_path / "report.json").unlink()
    (tmp_path / "report.json").mkdir()
    publisher.renew_heartbeat()
    assert (
        f"cannot be removed (Is a directory), and counts until its heartbeat is {STALE:.0f} s" in capfd.readouterr().err
    )


def test_ready_and_up_to_date_are_true_or_false_in_the_json(tmp_path: Path) -> None:
    def flags() -> tuple[Any, Any]:
        report = json.loads((tmp_path / "report.json").read_text())
        return report["ready"], report["up_to_date"]

    publisher = begin(tmp_path)
    assert flags() == (False, False)
    publisher.publish_pass(body())
    assert flags() == (True, True)
    publisher.publish_checking("reading takes long")
    assert flags() == (False, True)
    publisher.publish_pass(body())
    publisher.publish_unattended("Stopped", "the agent was stopped")
    assert flags() == (False, True)


def test_the_report_says_since_when_the_node_is_ready_or_not(tmp_path: Path) -> None:
    publisher = begin(tmp_path)
    started = read(tmp_path).since
    assert started > 0
    publisher.publish_pass(body(False))
    assert read(tmp_path).since == started
    publisher.publish_pass(body(True))
    became_ready = read(tmp_path).since
    assert became_ready > started
    publisher.publish_pass(body(True, spec_hash="h2"))
    publisher.renew_heartbeat()
    assert read(tmp_path).since == became_ready
    publisher.publish_unattended("WorkerLost", "it has ended")
    assert read(tmp_path).since > became_ready
