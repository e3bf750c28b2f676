"""What the supervisor publishes and tells systemd, and when it replaces its worker."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent.report.records import Report, report_to_json
from tests.contract.asking import soon
from tests.unit.service.supervised import NOTED, Start, needs_fuse, waits_in


def test_systemd_is_notified_and_the_report_and_the_marker_are_written(start: Start) -> None:
    supervised = start("report(True); sys.stdin.read()")
    assert supervised.notified.recv(100) == b"READY=1"
    report = supervised.wait_for(lambda report: report.ready)
    assert (report.node_name, report.spec_hash) == ("n1", "h1")
    assert (report.boot_id, report.agent_version) == ("boot-1", "v1")
    marker = supervised.folder / "first-pass"
    soon(lambda: marker.exists() or None, "marker, which comes after the report")
    assert marker.read_text().strip() == "boot-1"


def test_before_the_first_result_the_node_is_not_ready(start: Start) -> None:
    supervised = start("sys.stdin.read()")
    report = supervised.wait_for(lambda report: True)
    assert not report.ready and not report.up_to_date
    assert [(each.status, each.reason) for each in report.conditions] == [("Unknown", "Starting")]
    assert not (supervised.folder / "first-pass").exists()


def test_the_first_pass_does_not_wait_for_conditions_of_the_stage_cluster(start: Start) -> None:
    supervised = start("report(False); report(True, 'h2', cluster=False); report(False, 'h3'); sys.stdin.read()")
    assert not supervised.wait_for(lambda report: report.spec_hash == "h3").ready
    assert (supervised.folder / "first-pass").exists()


def test_there_is_no_first_pass_while_a_device_condition_is_false(start: Start) -> None:
    supervised = start("report(False); report(False, 'h2'); sys.stdin.read()")
    supervised.wait_for(lambda report: report.spec_hash == "h2")
    assert not (supervised.folder / "first-pass").exists()


def test_a_worker_that_dies_makes_the_node_not_ready_until_the_next_one_has_looked(start: Start) -> None:
    supervised = start("report(True)\nif sys.stdin.readline(): sys.exit(3)")
    first = supervised.wait_for(lambda report: report.ready)
    supervised.process.send_signal(signal.SIGHUP)
    lost = supervised.wait_for(lambda report: not report.ready)
    assert "status 3" in lost.conditions[-1].message
    again = supervised.wait_for(lambda report: report.ready)
    assert again.generation == first.generation + 2


def test_a_worker_that_was_only_slow_is_replaced_at_once(start: Start) -> None:
    # The second one begins before the ten minutes of a retry are over, or not at all within this test.
    supervised = start(
        NOTED + 'if starts == 1: activity.call("", "running"); time.sleep(600)\nreport(True); sys.stdin.read()'
    )
    supervised.wait_for(lambda report: report.ready)
    assert supervised.noted() == ["start", "start"]
    assert supervised.changes(supervised.report()) == 2  # Starting, WorkerStuck, ready


@pytest.mark.slow  # a worker must have time to start and to end, also on a busy machine
def test_a_busy_worker_finishes_what_it_writes_before_another_one_tries_a_hung_device_again(start: Start) -> None:
    busy = """
done = "ends" in (folder / "noted").read_text()
if not done and PF not in sys.argv: activity.call(PF, "read"); time.sleep(600)
if not done:
    activity.doing("vfs", "write")
    activity.call("0000:41:00.0", "write")
    note("begins"); sys.stdin.read(); time.sleep(12); note("ends")
    # Between two writes, as when it looks for events.
    activity.idle(); time.sleep(1); note("rests")
report(done); sys.stdin.read()
"""
    supervised = start(NOTED + busy, retry=0.1, leave=10.0)
    supervised.wait_for(lambda report: report.ready)
    noted = supervised.noted()
    # A worker that needs longer than it may only to start is replaced, too, and the device hangs again.
    assert noted[noted.index("begins") :] == ["begins", "ends", "rests", "start"]


@pytest.mark.slow  # a worker must have time to start, also on a busy machine
def test_a_write_that_takes_longer_than_the_time_to_leave_is_not_cut_short(start: Start) -> None:
    # Without a heartbeat nothing but the deadline for leaving wakes the supervisor meanwhile.
    writing = """
if starts == 1: activity.doing("vfs", "write"); activity.call(PF, "write"); report(False); time.sleep(600)
if starts == 2:
    activity.doing("vfs", "write")
    activity.call("0000:41:00.0", "write")
    note("writes"); sys.stdin.read(); time.sleep(12); note("has written")
    activity.idle(); sys.exit()
report(True); sys.stdin.read()
"""
    supervised = start(NOTED + writing, retry=0.1, leave=10.0, read=600.0, write=20.0)
    supervised.wait_for(lambda report: report.ready)
    assert supervised.noted()[1:4] == ["start --avoid 0000:21:00.0", "writes", "has written"]


@pytest.mark.slow  # a worker must have time to start and note that, also on a busy machine
def test_an_idle_worker_that_does_not_end_is_killed_and_the_device_is_tried_again(start: Start) -> None:
    deaf = 'if starts == 1: activity.call(PF, "read")\nif starts < 3: time.sleep(600)\nreport(True); sys.stdin.read()'
    supervised = start(NOTED + deaf, retry=0.1, leave=10.0)
    supervised.wait_until_noted("start", "start --avoid 0000:21:00.0", "start")
    supervised.wait_for(lambda report: report.ready)


@needs_fuse
def test_on_sigterm_a_worker_that_cannot_be_killed_is_waited_for(start: Start, end_hang: Callable[[], None]) -> None:
    supervised = start(NOTED + 'note(str(os.getpid())); open(folder / "mounted/value").read()', leave=0.1)
    supervisor = supervised.process
    worker = soon(lambda: int(supervised.noted()[1]) if supervised.noted()[1:] else None, "worker", 60.0)
    soon(lambda: waits_in(worker, "request_wait_answer") or None, "hanging read", 60.0)
    supervisor.send_signal(signal.SIGTERM)
    soon(lambda: supervisor.poll() is not None or waits_in(supervisor.pid, "do_wait") or None, "waiting", 60.0)
    assert supervisor.poll() is None, "it has ended, and the worker has not"
    end_hang()
    assert supervisor.wait(timeout=60) == 0


def test_a_worker_that_keeps_crashing_is_restarted_with_growing_delays(start: Start) -> None:
    # No heartbeat is due that would wake the supervisor.
    supervised = start(NOTED + "note(str(time.monotonic()))", read=600.0)
    soon(lambda: len(supervised.noted()) >= 8 or None, "four starts", 60.0)
    began = [float(line) for line in supervised.noted()[1:8:2]]
    # However busy the machine is, they do not come sooner.
    assert [
        later - earlier >= wait for earlier, later, wait in zip(began, began[1:], (0.5, 1.0, 2.0), strict=False)
    ] == [True] * 3


def test_a_worker_that_closes_its_output_and_stays_is_replaced(start: Start) -> None:
    supervised = start(NOTED + "if starts == 1: os.close(1); time.sleep(600)\nreport(True); sys.stdin.read()")
    supervised.wait_for(lambda report: report.ready)


def keeps_memory(pid: int) -> bool:
    """Whether a process has memory that it shares with a worker."""
    kept = False
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kept = kept or "memfd" in str(descriptor.readlink())
    return kept


def test_a_worker_that_cannot_be_started_is_reported_and_retried(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "python"
    supervised = start("report(True); sys.stdin.read()", program=str(program))
    lost = supervised.wait_for(lambda report: report.conditions[-1].reason == "WorkerLost")
    assert "could not be started" in lost.conditions[-1].message
    # If each try kept its memory, there would be no descriptor left for the report or a worker after some hours.
    soon(lambda: not keeps_memory(supervised.process.pid) or None, "process without the memory of a worker")
    program.symlink_to(sys.executable)
    supervised.wait_for(lambda report: report.ready)


def test_the_heartbeat_is_renewed_while_nothing_changes(start: Start) -> None:
    began = time.monotonic()
    supervised = start("report(True); sys.stdin.read()")
    before = supervised.wait_for(lambda report: report.ready)
    after = supervised.wait_for(lambda report: report.heartbeat > before.heartbeat + 4.0)
    assert after.uptime > before.uptime
    assert (after.generation, after.time) == (before.generation, before.time)
    assert [supervised.notified.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]
    beats = 1
    supervised.notified.setblocking(False)
    with suppress(BlockingIOError):
        while supervised.notified.recv(100) == b"WATCHDOG=1":
            beats += 1
    # One comes every two seconds. On a busy machine there may be fewer.
    assert beats <= (time.monotonic() - began) / 2.0


@pytest.mark.slow  # the silence between two calls must be short enough, also on a busy machine
def test_a_worker_that_makes_calls_now_and_then_is_not_replaced(start: Start) -> None:
    # As the worker's own loop: each wait for events has a time-out, and is recorded.
    body = """import select
report(True)
ends = time.monotonic() + 15.0
while time.monotonic() < ends:
    activity.idle()
    select.select([sys.stdin], [], [], 0.2)
note("end")
sys.stdin.read()
"""
    supervised = start(NOTED + body, silence=10.0, read=0.5)
    supervised.wait_until_noted("start", "end")


@pytest.mark.parametrize("removed", [False, True], ids=["with its report", "with its report removed"])
def test_a_restart_in_the_same_boot_starts_from_not_ready_and_a_higher_generation(start: Start, removed: bool) -> None:
    # The worker changes its report as fast as it can: no number of changes may be ahead of the next start.
    first = start(
        "for number in range(2000): report(number % 2 == 1, 'last' if number == 1999 else 'h1')\nsys.stdin.read()"
    )
    before = first.wait_for(lambda report: report.spec_hash == "last")
    first.process.kill()
    first.process.wait()
    if removed:
        # As in a full /run, where the agent could not write a newer one.
        (first.folder / "report.json").unlink()
    second = start("sys.stdin.read()")
    assert second.notified.recv(100) == b"READY=1"
    report = second.report()
    assert report.generation > before.generation
    assert not report.ready


def test_generations_of_an_earlier_boot_do_not_count(start: Start, tmp_path: Path) -> None:
    earlier = Report("n1", "h1", "boot-0", "v1", ready=True, up_to_date=True, generation=10**18)
    (tmp_path / "report.json").write_text(report_to_json(earlier))
    supervised = start("report(True); sys.stdin.read()")
    assert (
        supervised.wait_for(lambda report: report.ready and report.boot_id == "boot-1").generation < earlier.generation
    )


def test_a_reload_between_two_workers_reaches_the_next_one(start: Start) -> None:
    supervised = start(
        NOTED
        + """
if starts == 1: sys.exit(3)
report(False)
for line in sys.stdin: report(True, "h2")
"""
    )
    supervised.wait_for(lambda report: report.conditions[-1].reason == "WorkerLost")
    supervised.process.send_signal(signal.SIGHUP)
    supervised.wait_for(lambda report: report.ready and report.spec_hash == "h2")


def test_after_three_crashes_a_worker_learns_of_them_until_a_reload(start: Start) -> None:
    body = """note(os.environ.get("TRACKBED_CRASHED", ""))
if starts <= 3: sys.exit(3)
report(True)
if starts >= 5 or sys.stdin.readline(): sys.exit(3)
"""
    supervised = start(NOTED + body)
    crashed = "the worker ended with status 3, 3 times in a row"
    lines = [*["start", ""] * 3, "start", crashed]
    supervised.wait_until_noted(*lines)
    supervised.wait_for(lambda report: report.ready)
    supervised.process.send_signal(signal.SIGHUP)
    supervised.wait_until_noted(*lines, *["start", ""] * 2, "start", crashed)


IN_A_ROW = "the worker ended with status 3, 3 times in a row"
NOT_UNDERSTOOD = "the worker sent a message that cannot be understood"
# A message after the call wakes the supervisor, which counts silence from the first call.
WELL_THEN_SILENT = """report(True)
while not json.loads((folder / "report.json").read_text())["ready"]: time.sleep(0.05)
activity.idle(); report(True, "h2")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("dies", "limits", "fourth"),
    [
        pytest.param("report(False); sys.exit(3)", {"well": 0.0}, IN_A_ROW, id="never ready, however long they lived"),
        pytest.param("report(True); sys.exit(3)", {"well": 600.0}, IN_A_ROW, id="ready, and died soon"),
        pytest.param("report(starts == 1); sys.exit(3)", {"well": 0.0}, IN_A_ROW, id="only the first one was well"),
        pytest.param("report(True); sys.exit(3)", {"well": 0.0}, "", id="each one was well"),
        pytest.param('os.write(1, b"nonsense\\n"); sys.stdin.read()', {}, NOT_UNDERSTOOD, id="not understood"),
        pytest.param("activity.idle(); time.sleep(600)", {"silence": 0.5}, "the worker made no call", id="silent"),
        pytest.param(
            WELL_THEN_SILENT,
            {"read": 600.0, "silence": 1.0, "well": 0.0},
            "",
            id="well, then silent",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_workers_that_die_and_were_not_well_before_crash_in_a_row(
    start: Start, dies: str, limits: dict[str, Any], fourth: str
) -> None:
    """The fourth one learns of it, without the details."""
    body = 'note(os.environ.get("TRACKBED_CRASHED", "").partition(":")[0].partition(" for ")[0])\n' + dies
    supervised = start(NOTED + body, **limits)
    supervised.wait_until_noted(*["start", ""] * 3, "start", fourth)
