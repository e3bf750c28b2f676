"""The supervisor acts at its deadlines: in most of these tests no heartbeat wakes it before."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.report.records import report_from_json
from agent.runtime import doubling, uptime
from agent.service.supervisor import FIRST_RESPAWN, LAST_RESPAWN
from tests.contract.asking import soon
from tests.stand_ins import program
from tests.unit.service.supervised import NOTED, Start, Supervised, needs_fuse

pytestmark = pytest.mark.slow

QUIET = 600.0
"""Seconds that a read may take, and until the first heartbeat: no test takes that long."""

AVOIDING = "start --avoid 0000:21:00.0"

# A write that hangs. A message after it wakes the supervisor.
HANGS = 'activity.doing("vfs", "write"); activity.call(PF, "sriov_numvfs = 8"); report(False); time.sleep(600)\n'

# The report that was published when a worker started.
NOTES_REPORT = 'note((folder / "report.json").read_text().strip().replace("\\n", " "))\n'


def beats(supervised: Supervised, times: int) -> None:
    """Wait for so many heartbeats."""
    for _ in range(times):
        before = supervised.report().heartbeat
        supervised.wait_for(lambda report, before=before: report.heartbeat > before)  # type: ignore[misc]


def said(supervised: Supervised, start: int) -> tuple[str, str]:
    """Reason and message of the last condition in the report that the worker with this number noted at its start."""
    last = report_from_json(supervised.noted()[2 * start - 1]).conditions[-1]
    return last.reason, last.message


def seconds(message: str) -> int:
    match = re.search(r" (-?\d+) s", message)
    assert match, message
    return int(match[1])


def test_each_crash_in_a_row_doubles_the_wait() -> None:
    waits = [doubling(FIRST_RESPAWN, deaths, LAST_RESPAWN) for deaths in range(1, 9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert doubling(FIRST_RESPAWN, 100_000, LAST_RESPAWN) == 30.0


def test_a_device_whose_write_hangs_is_avoided_tried_again_at_its_time_and_then_avoided_at_once(start: Start) -> None:
    body = NOTES_REPORT + f"if PF not in sys.argv: {HANGS}report(True); sys.stdin.read()"
    supervised = start(NOTED + body, read=QUIET, write=1.0, retry=3.0, leave=QUIET)
    soon(lambda: len(supervised.noted()) >= 8 or None, "four starts", 60.0)
    assert supervised.noted()[:8:2] == ["start", AVOIDING] * 2
    reason, message = said(supervised, 2)
    assert (reason, message.partition(" has not")[0]) == ("WorkerStuck", "vfs: sriov_numvfs = 8 (device 0000:21:00.0)")
    assert 1 <= seconds(message) < QUIET
    assert said(supervised, 3) == ("DeviceTried", "0000:21:00.0 hung before, and is tried again")


def test_a_write_has_more_time_than_a_read(start: Start) -> None:
    body = """
activity.doing("vfs", "write" if starts == 1 else "read")
activity.call(PF, "sriov_numvfs"); report(False); time.sleep(4 if starts == 1 else 0); activity.idle()
report(True); sys.stdin.read()
"""
    supervised = start(NOTED + body, read=2.0)
    supervised.wait_for(lambda report: report.ready)
    assert supervised.noted() == ["start"]


def test_two_devices_that_hung_are_both_avoided(start: Start) -> None:
    hangs = 'activity.doing("vfs", "write"); activity.call({}, "write"); report(False); time.sleep(600)\n'
    body = f"if starts == 1: {hangs.format('PF')}if starts == 2: {hangs.format(repr('0000:41:00.0'))}sys.stdin.read()"
    supervised = start(NOTED + body, read=QUIET, write=0.5)
    supervised.wait_until_noted("start", AVOIDING, f"{AVOIDING} --avoid 0000:41:00.0")


def test_silence_is_noticed_without_waiting_for_a_heartbeat(start: Start) -> None:
    body = NOTES_REPORT + "activity.idle(); report(True)\nif starts == 1: time.sleep(600)\nsys.stdin.read()"
    supervised = start(NOTED + body, read=QUIET, silence=1.0)
    soon(lambda: len(supervised.noted()) >= 4 or None, "two starts", 60.0)
    reason, message = said(supervised, 2)
    assert (reason, message.partition(" for")[0]) == ("WorkerStuck", "the worker has made no call")
    assert 1 <= seconds(message) < QUIET


def test_a_worker_that_stays_stopped_by_a_signal_is_replaced_at_once(start: Start) -> None:
    """It takes no events, so the report would say Ready whatever happens."""
    body = NOTES_REPORT + "activity.idle(); report(True)\nif starts == 1: os.kill(os.getpid(), 19)\nsys.stdin.read()"
    supervised = start(NOTED + body, read=QUIET)
    soon(lambda: len(supervised.noted()) >= 4 or None, "two starts", 60.0)
    assert said(supervised, 2) == ("WorkerStuck", "a signal has stopped the worker; it is replaced")


def test_a_worker_that_goes_on_soon_after_it_was_stopped_stays(start: Start) -> None:
    supervised = start(NOTED + "note(str(os.getpid())); report(True); sys.stdin.read()", read=2.0)
    supervised.wait_for(lambda report: report.ready)
    _, pid = supervised.noted()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(int(pid), number)
    beats(supervised, 2)
    assert (supervised.report().ready, supervised.noted()) == (True, ["start", pid])


def test_a_record_that_is_being_written_is_no_silence(start: Start) -> None:
    # As of a worker that waits for the CPU between two stores: an odd number, and half of a time.
    body = """import struct
def published(spec_hash):
    while json.loads((folder / "report.json").read_text())["spec_hash"] != spec_hash: time.sleep(0.05)
activity.idle(); report(True)
published("h1")
activity._memory[:16] = struct.pack("=Qd", 99, 1e-300)
report(True, "h2")
published("h2")
report(True, "h3")
sys.stdin.read()
"""
    supervised = start(NOTED + body, read=QUIET)
    supervised.wait_for(lambda report: report.spec_hash == "h3")
    assert supervised.noted() == ["start"]


def test_a_worker_that_makes_no_first_call_is_noticed_without_waiting_for_a_heartbeat(start: Start) -> None:
    body = NOTES_REPORT + "if starts == 1: time.sleep(600)\nactivity.idle(); report(True); sys.stdin.read()"
    supervised = start(NOTED + body, read=QUIET, first=3.0)
    soon(lambda: len(supervised.noted()) >= 4 or None, "two starts", 60.0)
    assert 3 <= seconds(said(supervised, 2)[1]) < QUIET


def test_while_an_event_waits_outside_of_any_call_no_call_is_named(start: Start) -> None:
    body = 'report(True)\nactivity.idle(); activity.waits(time.monotonic()); say({"checking": True}); sys.stdin.read()'
    supervised = start(NOTED + body)
    supervised.wait_for(lambda report: report.ready)
    checking = supervised.wait_for(lambda report: not report.ready)
    assert checking.conditions[0].message.endswith("reading it takes more than 0.5 s")
    assert not is_busy(supervised, 1)


def test_ready_is_withdrawn_while_an_event_waits_that_came_long_after_the_workers_message(start: Start) -> None:
    # The worker speaks of events at most twice a second. This one comes two seconds after it did.
    body = """report(True)
activity.idle()
came = time.monotonic() + 2.0; note(str(came))
activity.waits(came); say({"checking": True})
sys.stdin.read()
"""
    supervised = start(NOTED + body, read=QUIET)
    supervised.wait_for(lambda report: report.ready)
    checking = supervised.wait_for(lambda report: report.conditions[0].reason == "Checking")
    # Before, the next pass may answer the event, and Ready stays.
    assert checking.since >= uptime() - time.monotonic() + float(supervised.noted()[1]) + 0.5


def test_an_event_that_comes_soon_after_the_workers_message_is_noticed(start: Start) -> None:
    body = """report(True)
activity.idle()
say({"checking": True}); report(True, "h2")
while json.loads((folder / "report.json").read_text())["spec_hash"] != "h2": time.sleep(0.05)
activity.waits(time.monotonic() - 600.0)
sys.stdin.read()
"""
    supervised = start(NOTED + body, read=QUIET, answered=8.0)
    supervised.wait_for(lambda report: report.conditions[0].reason == "Checking")


def is_busy(supervised: Supervised, times: int) -> bool:
    """Whether the supervisor runs all the time, during so many heartbeats: what it waits for a CPU does not count."""

    def ran_and_waited() -> tuple[float, float]:
        ran, waited, _ = Path(f"/proc/{supervised.process.pid}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9

    began, (ran, waited) = time.monotonic(), ran_and_waited()
    beats(supervised, times)
    ran_now, waited_now = ran_and_waited()
    return ran_now - ran > (time.monotonic() - began - (waited_now - waited)) / 2


@needs_fuse
def test_the_supervisor_waits_for_a_write_to_no_device(start: Start, end_hang: Callable[[], None]) -> None:
    held = """
if starts == 1: activity.doing("sysctls", "write"); activity.call("", "write"); open(folder / "mounted/value").read()
report(True); sys.stdin.read()
"""
    supervised = start(NOTED + held, write=0.5, retry=0.1, read=2.0)
    supervised.wait_for(lambda report: report.conditions[-1].reason == "WorkerStuck")
    beats(supervised, 1)
    assert not is_busy(supervised, 1)
    assert supervised.noted() == ["start"]
    end_hang()
    supervised.wait_for(lambda report: report.ready)


@needs_fuse
def test_a_device_is_not_tried_again_while_a_process_hangs_in_it(start: Start, end_hang: Callable[[], None]) -> None:
    held = """
if starts == 1: activity.call(PF, "read"); open(folder / "mounted/value").read()
report(True); sys.stdin.read()
"""
    supervised = start(NOTED + held, read=2.0, retry=0.1)
    supervised.wait_until_noted("start", AVOIDING)
    beats(supervised, 3)
    assert supervised.noted() == ["start", AVOIDING]
    assert not is_busy(supervised, 1)
    end_hang()
    supervised.wait_until_noted("start", AVOIDING, "start")
    supervised.wait_for(lambda report: report.ready)
    assert not is_busy(supervised, 1)


@needs_fuse
def test_a_process_that_hangs_in_a_read_of_no_device_does_not_bar_the_next_worker(
    start: Start, end_hang: Callable[[], None]
) -> None:
    held = """
if starts == 1: activity.call("", "read"); open(folder / "mounted/value").read()
report(True); sys.stdin.read()
"""
    supervised = start(NOTED + held, read=1.0, retry=0.5)
    supervised.wait_for(lambda report: report.ready)
    assert supervised.noted() == ["start", "start"]


@needs_fuse
def test_after_a_process_hung_in_no_device_the_next_worker_waits(start: Start, end_hang: Callable[[], None]) -> None:
    supervised = start(NOTED + 'activity.call("", "read"); open(folder / "mounted/value").read()', read=1.0)
    supervised.wait_for(lambda report: report.conditions[-1].reason == "WorkerStuck")
    beats(supervised, 3)
    assert supervised.noted() == ["start"]


def test_after_a_second_hang_in_no_device_the_next_worker_waits(start: Start) -> None:
    hangs = 'note(str(os.getpid())); activity.call("", "read"); time.sleep(600)'
    supervised = start(NOTED + hangs, read=1.0)
    soon(lambda: len(supervised.noted()) >= 4 or None, "two starts", 60.0)
    second = Path("/proc", supervised.noted()[3])
    soon(lambda: not second.exists() or None, "end of the second worker", 60.0)
    beats(supervised, 2)
    assert supervised.noted()[::2] == ["start", "start"]


def test_a_worker_that_closes_its_output_in_a_call_is_replaced_by_one_that_avoids_the_device(start: Start) -> None:
    body = NOTES_REPORT + (
        'if starts == 1: activity.call(PF, "read"); os.close(1); time.sleep(600)\nreport(True); sys.stdin.read()'
    )
    supervised = start(NOTED + body, read=QUIET)
    supervised.wait_for(lambda report: report.ready)
    assert supervised.noted()[2] == AVOIDING
    message = "the worker closed its standard output and goes on; it is replaced"
    assert said(supervised, 2) == ("WorkerStuck", message)


def test_a_worker_that_reads_nothing_does_not_stop_the_supervisor(start: Start) -> None:
    body = "import fcntl; fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, 4096); report(True); time.sleep(600)"
    supervised = start(NOTED + body, leave=0.2)
    supervised.wait_for(lambda report: report.ready)
    for _ in range(4096 // len(b"reload\n") + 10):
        supervised.reload()
    beats(supervised, 1)
    supervised.end()


def test_a_reload_that_a_worker_cannot_receive_reaches_the_next_one(start: Start, tmp_path: Path) -> None:
    body = """
if starts == 1:
    os.close(0); report(True, "h1")
    while not (folder / "go").exists(): time.sleep(0.05)
    sys.exit(3)
for line in sys.stdin: report(True, "h2")
"""
    supervised = start(NOTED + body)
    supervised.wait_for(lambda report: report.ready)
    supervised.reload()
    (tmp_path / "go").touch()
    supervised.wait_for(lambda report: report.ready and report.spec_hash == "h2")


def test_a_reload_that_a_worker_has_received_does_not_reach_the_next_one(start: Start) -> None:
    body = """
report(True, f"h{starts}")
if sys.stdin.readline() and starts == 1: sys.exit(3)
note("read"); sys.stdin.read()
"""
    supervised = start(NOTED + body)
    supervised.wait_for(lambda report: report.ready)
    supervised.process.send_signal(signal.SIGHUP)
    supervised.wait_for(lambda report: report.spec_hash == "h2")
    beats(supervised, 2)
    assert supervised.noted() == ["start", "start"]


def test_a_reload_while_a_worker_leaves_reaches_the_next_one(start: Start, tmp_path: Path) -> None:
    body = """
if starts == 1: activity.call(PF, "read"); time.sleep(600)
if starts == 2:
    sys.stdin.read(); note("leaves")
    while not (folder / "go").exists(): time.sleep(0.05)
    sys.exit()
for line in sys.stdin: report(True, "h2")
"""
    supervised = start(NOTED + body, read=1.0, retry=0.1, leave=QUIET)
    supervised.wait_until_noted("start", AVOIDING, "leaves")
    supervised.reload()
    (tmp_path / "go").touch()
    supervised.wait_for(lambda report: report.ready and report.spec_hash == "h2")


def test_a_worker_that_cannot_be_started_is_no_crash_that_a_spec_has_caused(start: Start, tmp_path: Path) -> None:
    python = tmp_path / "python"
    body = 'note(os.environ.get("TRACKBED_CRASHED", "none")); sys.stdin.read()'
    supervised = start(NOTED + body, program=str(python))
    supervised.wait_for(lambda report: report.conditions[-1].reason == "WorkerLost")
    # A heartbeat comes every two seconds, and the first three tries take less.
    beats(supervised, 3)
    written = tmp_path / "written"
    # A link would be an interpreter without this environment's packages.
    program(written, f'exec {sys.executable} "$@"')
    written.rename(python)
    soon(lambda: supervised.noted()[1:] or None, "start", 60.0)
    assert supervised.noted()[1] == "none"


def test_on_sigterm_a_worker_that_does_not_end_is_killed(start: Start) -> None:
    supervised = start(NOTED + "note(str(os.getpid())); report(True); time.sleep(600)", leave=0.2)
    supervised.wait_for(lambda report: report.ready)
    supervised.end()
    assert not Path("/proc", supervised.noted()[1]).exists()


def test_on_sigterm_a_worker_writes_its_last_report_however_large(start: Start) -> None:
    """It records a pass after that. The report has more than a pipe holds."""
    supervised = start(NOTED + "report(True); sys.stdin.read(); report(True, 'h' * (1 << 18)); note('recorded')")
    supervised.wait_for(lambda report: report.ready)
    supervised.end()
    assert supervised.noted()[1:] == ["recorded"]


def test_many_signals_at_once_leave_no_traceback(start: Start) -> None:
    # Python gives signals their defaults back at its end, so the worker ends after the last signal.
    sent = start.folder / "sent"
    body = f"""import os, time
report(True)
sys.stdin.read()
while not os.path.exists({str(sent)!r}):
    time.sleep(0.02)
"""
    supervised = start(body, stderr=subprocess.PIPE)
    supervised.wait_for(lambda report: report.ready)
    process = supervised.process
    process.send_signal(signal.SIGTERM)
    status = Path(f"/proc/{process.pid}/status")

    def is_pending() -> bool:
        pending = re.search(r"^ShdPnd:\s*(\S+)", status.read_text(), re.MULTILINE)
        return pending is not None and int(pending[1], 16) > 0

    # It waits for its worker now, and reads no signals.
    for _ in range(1000):
        process.send_signal(signal.SIGHUP)
        while process.poll() is None and is_pending():
            pass
    sent.touch()
    assert process.stderr is not None
    printed = process.stderr.read().decode()
    assert process.wait(60) == 0
    assert "wakeup" not in printed, printed
